// Which instruction sets the kernels were compiled for, and which of them this machine has.
//
// Owns: the choice of an instruction set.  Does not know: what a kernel computes.
#pragma once
#include "model.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace foredraft {

#define FOREDRAFT_DECLARE(isa) namespace isa { extern const Kernels kernels; }
FOREDRAFT_DECLARE(generic)
#if defined(__x86_64__)
FOREDRAFT_DECLARE(avx2)
FOREDRAFT_DECLARE(avxvnni)
FOREDRAFT_DECLARE(avx512)
#endif

inline std::vector<const Kernels*> detect_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    found.push_back(&avx512::kernels);
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  if (avx2 && (eax >> 4 & 1)) found.push_back(&avxvnni::kernels);
  if (avx2) found.push_back(&avx2::kernels);
#endif
  found.push_back(&generic::kernels);
  return found;
}

// Those that this machine can run, best first.  Asked once: on a virtual machine the question takes microseconds.
inline const std::vector<const Kernels*>& supported_kernels() {
  static const std::vector<const Kernels*> found = detect_kernels();
  return found;
}

inline const Kernels& kernels_by_name(const std::string& name) {
  for (const Kernels* kernels : supported_kernels())
    if (name.empty() || name == kernels->name) return *kernels;
  throw std::invalid_argument("instruction set '" + name + "' cannot run on this machine");
}

}  // namespace foredraft
