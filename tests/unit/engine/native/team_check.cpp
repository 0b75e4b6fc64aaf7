// Checks engine/native/team.h: `team_check CASE`. Prints nothing and ends with 0 if the case holds.
#include "../../../../engine/native/team.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

using farsight::Team;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

int num_threads() {
  DIR* tasks = opendir("/proc/self/task");
  int count = 0;
  while (const dirent* entry = readdir(tasks)) count += entry->d_name[0] != '.';
  closedir(tasks);
  return count;
}

// Limits the process's addresses; returns the limit before.
rlimit limit_memory(rlim_t bytes) {
  rlimit before;
  getrlimit(RLIMIT_AS, &before);
  const rlimit limit = {bytes, before.rlim_max};
  setrlimit(RLIMIT_AS, &limit);
  return before;
}

// Runs `jobs` jobs of 0 .. 99 tasks; each task must be run exactly once before its job ends.
void check_jobs(Team& team, int jobs) {
  int counts[100];
  for (int job = 0; job < jobs; ++job) {
    const int count = job % 100;
    std::fill_n(counts, 100, 0);
    team.share(count, [&](int i) { ++counts[i]; });
    for (int i = 0; i < 100; ++i) require(counts[i] == (i < count), "a task was not run exactly once");
  }
}

void check_ranges(Team& team) {
  for (int count = 0; count < 200; ++count) {
    std::vector<int> seen(count, 0);
    team.share_ranges(count, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) ++seen[i];
    });
    require(std::count(seen.begin(), seen.end(), 1) == count, "the ranges do not cover the count once");
  }
}

void once() {
  for (int size : {1, 2, 4}) {
    Team team(size);
    require(team.size() == size, "size");
    check_jobs(team, 20000);
    check_ranges(team);
  }
}

// More threads than cores, some of them never scheduled in time: jobs end all the same.
void crowded() {
  Team team(4 * int(std::thread::hardware_concurrency()) + 3);
  check_jobs(team, 2000);
}

void sleeps() {
  Team team(3);
  for (int round = 0; round < 200; ++round) {
    check_jobs(team, 5);
    std::this_thread::sleep_for(std::chrono::microseconds(7 * round));  // around kAwakeMicros
  }
}

void throws() {
  for (int size : {1, 3}) {
    Team team(size);
    for (int round = 0; round < 200; ++round) {
      std::atomic<int> run{0};
      bool caught = false;
      try {
        team.share(50, [&](int i) {
          ++run;
          if (i % 7 == 3) throw std::runtime_error("task");
        });
      } catch (const std::runtime_error& error) {
        caught = !std::strcmp(error.what(), "task");
      }
      require(caught, "the exception did not come");
      require(size == 1 || run == 50, "the other tasks were not run");
      check_jobs(team, 10);
    }
  }
}

void leaves_no_thread() {
  for (int i = 0; i < 100; ++i) {
    Team team(5);
    if (i % 2) check_jobs(team, 3);
  }
  require(num_threads() == 1, "threads are left");
}

// The system refuses a thread: those that have started end, and a smaller team works.
void refused() {
  const rlimit before = limit_memory(1 << 28);
  bool caught = false;
  try {
    Team team(1000);  // whose stacks do not fit
  } catch (const std::system_error&) {
    caught = true;
  }
  require(caught, "1000 threads in 256 MiB of addresses");
  setrlimit(RLIMIT_AS, &before);
  require(num_threads() == 1, "threads are left");
  Team team(3);
  check_jobs(team, 100);
}

// A child of fork has no helpers; it computes alone, and ends.
void forks() {
  Team* team = new Team(4);
  check_jobs(*team, 100);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // no helper holds the mutex
  const pid_t child = fork();
  if (child == 0) {
    check_jobs(*team, 100);
    delete team;
    std::_Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child failed");
  check_jobs(*team, 100);
  delete team;
}

// Helpers take no signal: those are the main thread's, where Python handles them.
void signals() {
  static pthread_t taken_by;
  static std::atomic<int> taken{0};
  struct sigaction action = {};
  action.sa_handler = [](int) {
    taken_by = pthread_self();
    ++taken;
  };
  sigaction(SIGUSR1, &action, nullptr);
  Team team(4);
  for (int i = 1; i <= 50; ++i) {
    kill(getpid(), SIGUSR1);
    check_jobs(team, 100);
    require(taken == i && pthread_equal(taken_by, pthread_self()), "a helper took the signal");
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::pair<const char*, void (*)()> cases[] = {
      {"once", once},   {"crowded", crowded}, {"sleeps", sleeps},   {"throws", throws},
      {"forks", forks}, {"signals", signals}, {"leaves_no_thread", leaves_no_thread}, {"refused", refused}};
  for (const auto& [name, check] : cases)
    if (!std::strcmp(name, arguments[1])) {
      check();
      return 0;
    }
  return 2;
}
