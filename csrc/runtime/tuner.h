// Autotuning: tries what a call may choose (tuning.h) when a shape is first met, and remembers what is clearly faster.
//
// It is off unless a scope of this thread or the process as a whole turns it on; off, a call pays one load and one
// branch. What was found is held in memory here; python/xopt/tuning keeps it on disk.
//
// A trial runs the very call, on its operands, into its output. Weights and caches of
// keys are flushed from the CPU's caches before each run, since they do not stay there from one forward to the next. Contenders take turns for several rounds, and
// the heuristics' choice stays unless another is faster by a clear margin, in its best run and in the median of rounds,
// and once more in a second series.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/registry.h"
#include "runtime/tuning.h"

namespace xopt {

enum class TuningMode : int {
  off,
  use,     // what was found is used
  max,     // and what is not known yet is tried
  forced,  // a scope's own choice, for tests and benches
};

// How many scopes there are in all threads; one more if the process's mode is not off.
extern std::atomic<int> tuning_users;
inline bool tuning_on() { return tuning_users.load(std::memory_order_relaxed) != 0; }

// What a call is known by: the kernel, and all sizes that decide how fast it is.
struct TuningKey {
  std::string kernel, dtype;
  Isa level = Isa::scalar;  // the active one
  int threads = 1;
  std::vector<int64_t> sizes;

  bool operator==(const TuningKey& other) const {
    return level == other.level && threads == other.threads && sizes == other.sizes && kernel == other.kernel &&
           dtype == other.dtype;
  }
};

struct TunedCall {
  TuningKey key;
  Tuning choice;
  double seconds = 0, default_seconds = 0;  // of a call: what was chosen, and what the heuristics choose
  bool fresh = false;                       // found in this process, and not yet asked for by take_fresh
};

// What is flushed from the caches before each run.
struct ColdMemory {
  struct Run {
    const void* data = nullptr;
    size_t bytes = 0;
  };
  Run runs[2] = {};
};

// A call that can be repeated.
struct TuningTrial {
  void (*run)(const void* context, const Tuning& choice);
  const void* context;
  ColdMemory cold;
};

// What to do for a call in this thread: the heuristics' choice where its mode is off, and inside parallel regions.
Tuning choose_tuning(const TuningKey& key, const TuningTrial& trial);

// The choices that there are for a kernel, but for the heuristics' own. Of the key its sizes do not matter.
std::vector<Tuning> tuning_candidates(const TuningKey& key);
// The level that a choice runs at.
Isa level_of_choice(const TuningKey& key, const Tuning& choice);
// The instance in words: "avx512", "avx2, 4 panels".
std::string instance_text(const TuningKey& key, const Tuning& choice);

// ---- Modes ---------------------------------------------------------------------------------------------------------

void set_process_tuning(TuningMode mode);
TuningMode process_tuning();
// Scopes of the calling thread, inside each other. `forced` is looked at in that mode alone.
void enter_tuning(TuningMode mode, const Tuning& forced);
// Ends the innermost scope: numbers of what its calls used, each once.
std::vector<int> leave_tuning();

// ---- What is known -------------------------------------------------------------------------------------------------

// Puts it in the place of what is known of the key; nothing where the table is full.
void add_tuned(const TunedCall& tuned);
// All of it, by number.
std::vector<TunedCall> tuned_calls();
bool has_fresh();
// What is fresh, which it then no longer is.
std::vector<TunedCall> take_fresh();
void forget_tuned();

}  // namespace xopt
