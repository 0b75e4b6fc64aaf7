// The threads that compute a step. The caller's thread and `size - 1` helpers share the tasks of one job after another.
//
// A job ends when all its tasks are done, not when all threads have arrived: a helper that the system has suspended
// between two tasks holds nothing up, the others take the tasks instead. Each thread claims one task at a time, so a
// thread that runs on a busy core takes fewer of them.
//
// A helper without a task spins, then gives way to other threads of its core, then sleeps. The
// next job of a step comes within the first two periods; between two steps the helpers sleep and leave their cores to
// others. The caller spins and gives way; it does not sleep.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace farsight {

constexpr int kSpins = 2000;       // pauses before a waiting thread gives way: 100 us on a Zen 4 core
constexpr int kAwakeMicros = 100;  // time of giving way after which a helper sleeps

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Only one thread at a time may call `share`. A task must not call it.
class Team {
 public:
  // Starts size - 1 helpers. Throws std::system_error if the system refuses a thread.
  explicit Team(int size) : owner_(getpid()) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the helpers inherit it: signals are the main thread's
    try {
      for (int i = 1; i < size; ++i) {
        helpers_.emplace_back([this] { help(); });
#if defined(__linux__)
        pthread_setname_np(helpers_.back().native_handle(), "farsight-step");  // what `top -H` shows
#endif
      }
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      dismiss();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Team() { dismiss(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return int(helpers_.size()) + 1; }

  // Calls task(i) once for each 0 <= i < count, in any order and by several threads at once; returns when all calls
  // have returned. If calls throw, one of the exceptions is thrown here after that; other calls may not be made.
  template <class Task>
  void share(int count, const Task& task) {
    if (count <= 1 || helpers_.empty()) {
      for (int i = 0; i < count; ++i) task(i);
      return;
    }
    call_ = [](const void* t, int i) { (*static_cast<const Task*>(t))(i); };
    task_ = &task;
    count_ = count;
    unfinished_.store(count, std::memory_order_relaxed);
    unclaimed_.store(count);  // publishes the job; in one total order with asleep_
    if (asleep_.load() > 0 && getpid() == owner_) wake();
    work();
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) wait_once(spins);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  // Calls task(begin, end) for ranges that cover 0 .. count, of nearly equal length.
  template <class Task>
  void share_ranges(int count, const Task& task) {
    const int ranges = std::min(count, helpers_.empty() ? 1 : kRangesPerThread * size());
    share(ranges, [&](int i) {
      task(int(int64_t(count) * i / ranges), int(int64_t(count) * (i + 1) / ranges));
    });
  }

 private:
  static constexpr int kRangesPerThread = 2;

  // Claims tasks and runs them until none is left; returns how many.
  int work() {
    int done = 0;
    int left = unclaimed_.load(std::memory_order_acquire);
    while (left > 0) {
      // The claim may be one of a later job than the look at `left` was, or come too late and be none. It keeps its
      // job open, so the job's description is read only now.
      left = unclaimed_.fetch_sub(1, std::memory_order_acq_rel);
      if (left <= 0) break;
      try {
        call_(task_, count_ - left);
      } catch (...) {
        std::lock_guard<std::mutex> lock(bed_->mutex);
        if (!error_) error_ = std::current_exception();
      }
      ++done;
      left = unclaimed_.load(std::memory_order_acquire);
    }
    if (done > 0) unfinished_.fetch_sub(done, std::memory_order_acq_rel);
    return done;
  }

  void help() {
    while (!stopped_.load(std::memory_order_acquire)) {
      if (work() > 0) continue;
      if (!await_task()) sleep();
    }
  }

  bool has_news() const { return unclaimed_.load() > 0 || stopped_.load(); }

  static void wait_once(int spins) {
    if (spins < kSpins)
      pause_briefly();
    else
      sched_yield();
  }

  // Whether there was news while the helper stayed awake.
  bool await_task() const {
    using Clock = std::chrono::steady_clock;
    for (int spins = 0; spins < kSpins; ++spins) {
      if (has_news()) return true;
      pause_briefly();
    }
    const auto until = Clock::now() + std::chrono::microseconds(kAwakeMicros);
    while (!has_news()) {
      if (Clock::now() > until) return false;
      sched_yield();
    }
    return true;
  }

  void sleep() {
    std::unique_lock<std::mutex> lock(bed_->mutex);
    asleep_.fetch_add(1);
    bed_->awake.wait(lock, [this] { return has_news(); });
    asleep_.fetch_sub(1);
  }

  void wake() {
    std::lock_guard<std::mutex> lock(bed_->mutex);
    bed_->awake.notify_all();
  }

  void dismiss() {
    if (getpid() != owner_) {  // a child of fork has no helpers: nothing that knows of them can be ended
      for (auto& helper : helpers_) new (&helper) std::thread();
      (void)bed_.release();
      return;
    }
    stopped_.store(true);
    wake();
    for (auto& helper : helpers_) helper.join();
  }

  // Where helpers sleep.
  struct Bed {
    std::mutex mutex;
    std::condition_variable awake;
  };

  const pid_t owner_;
  std::vector<std::thread> helpers_;
  // The job. The caller writes it while no task is open, the others read it while they hold one of its tasks; a claim
  // has just brought them the cache line.
  alignas(128) std::atomic<int> unclaimed_{0};  // below 0 after claims that came too late
  int count_ = 0;
  void (*call_)(const void*, int) = nullptr;
  const void* task_ = nullptr;
  alignas(128) std::atomic<int> unfinished_{0};
  alignas(128) std::atomic<int> asleep_{0};
  std::atomic<bool> stopped_{false};
  std::unique_ptr<Bed> bed_ = std::make_unique<Bed>();
  std::exception_ptr error_;
};

}  // namespace farsight
