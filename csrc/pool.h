// Threads that run passes together, and how they wait for each other.
//
// Owns: threads.  Does not know: what a pass is.
#pragma once
#include "model.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include <unistd.h>

namespace foredraft {

// Workers 1 .. n-1; the caller is worker 0.  A worker spins for a moment before it sleeps, so that the passes of consecutive
// tokens find it awake, and an idle engine costs nothing.
class Pool {
 public:
  explicit Pool(int num_threads) {
    barrier_.count = num_threads;
    if (num_threads > num_processors()) barrier_.patience = 0;  // some partner is not running
    try {
      for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {  // the system gives no further thread; those that run must end before they are forgotten
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Those that this process may use.
  static int num_processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return int(std::thread::hardware_concurrency());
  }

  int size() const { return int(workers_.size()) + 1; }

  void run(const std::function<void(int, Barrier&)>& task) {
    if (!workers_.empty() && getpid() != owner_) {
      throw std::runtime_error(
          "this model was loaded before the process was forked, and its threads stayed behind; load it in the new process.");
    }
    task_ = &task;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_->notify_all();
    task(0, barrier_);
    barrier_.wait();
  }

 private:
  void stop() {
    if (getpid() != owner_) {  // after a fork there are no threads to wait for, and a condition with sleepers cannot be destroyed
      for (std::thread& worker : workers_) worker.detach();
      wake_.release();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_->notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void work(int index) {
    for (unsigned seen = 0;;) {
      const auto asleep_at = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
      for (int spins = 0; job_.load(std::memory_order_acquire) == seen; ++spins) {
        Barrier::relax(spins, barrier_.patience);
        if (spins % 64 == 63 && std::chrono::steady_clock::now() > asleep_at) {
          std::unique_lock<std::mutex> lock(mutex_);
          wake_->wait(lock, [&] { return job_.load(std::memory_order_acquire) != seen; });
        }
      }
      seen = job_.load(std::memory_order_acquire);
      if (stopping_) return;
      (*task_)(index, barrier_);
      barrier_.wait();
    }
  }

  Barrier barrier_;
  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> wake_ = std::make_unique<std::condition_variable>();
  std::atomic<unsigned> job_{0};
  bool stopping_ = false;
  const pid_t owner_ = getpid();
  const std::function<void(int, Barrier&)>* task_ = nullptr;
  // Last, since threads use the others from the start.
  std::vector<std::thread> workers_;
};

}  // namespace foredraft
