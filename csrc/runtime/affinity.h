// On which CPUs threads run: those of the OpenMP team that the calling thread uses for its kernels and torch's.
//
// Each thread that opens parallel regions has a team of its own, whose threads only that team can reach; so the team
// binds itself, in a region. Threads that the runtime starts later inherit the mask of the calling thread with libgomp;
// with libiomp5 they have that of the process.
#pragma once

#include <map>
#include <vector>

namespace xopt {

// Which CPUs a thread of the team, by its Linux thread id, could run on.
struct ThreadMask {
  int thread_id;
  std::vector<int> cpus;
};

// Lets every thread of the calling thread's team run on `cpus` only, but on exceptions.at(its thread id) where that is
// given. Returns what each could run on before, the calling thread first.
// Throws std::invalid_argument for a CPU number that Linux cannot have, std::system_error where Linux refuses.
std::vector<ThreadMask> bind_team(const std::vector<int>& cpus, const std::map<int, std::vector<int>>& exceptions);

// What each thread of the team may run on now, the calling thread first.
std::vector<ThreadMask> team_masks();

// The CPUs of OpenMP's places: what it binds its threads to, if it does; else empty, or those of the process. A process
// whose threads OpenMP binds (OMP_PROC_BIND, GOMP_CPU_AFFINITY, KMP_AFFINITY) has its main thread on one of them alone.
std::vector<int> openmp_cpus();

}  // namespace xopt
