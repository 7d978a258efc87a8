// Binds the quick form of the suffix drafter.
#pragma once

#include <nanobind/nanobind.h>

namespace foredraft {

void bind_suffix(nanobind::module_& module);

}  // namespace foredraft
