// See tuner.h.
#include "runtime/tuner.h"

#include <cpuid.h>
#include <emmintrin.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "runtime/parallel.h"
#include "runtime/trace.h"

namespace xopt {

std::atomic<int> tuning_users{0};

namespace {

constexpr size_t kMostTuned = 4096;

// ---- The table -----------------------------------------------------------------------------------------------------

struct KeyHash {
  size_t operator()(const TuningKey& key) const {
    uint64_t hash = 14695981039346656037U;
    const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211U; };
    for (const char letter : key.kernel) mix(static_cast<uint64_t>(letter));
    for (const char letter : key.dtype) mix(static_cast<uint64_t>(letter));
    mix(static_cast<uint64_t>(key.level));
    mix(static_cast<uint64_t>(key.threads));
    for (const int64_t size : key.sizes) mix(static_cast<uint64_t>(size));
    return static_cast<size_t>(hash);
  }
};

struct Table {
  std::shared_mutex lock;
  std::unordered_map<TuningKey, int, KeyHash> numbers;
  std::vector<TunedCall> calls;
  std::mutex trying;  // two trials at once would slow each other down
  std::atomic<int> process_mode{static_cast<int>(TuningMode::off)};
  std::atomic<bool> has_fresh{false};
};

// Never destroyed: threads may still run kernels while the process ends.
Table& table() {
  static Table& only = *new Table;
  return only;
}

struct Found {
  int number = -1;
  Tuning choice;
};

Found find(const TuningKey& key) {
  Table& all = table();
  const std::shared_lock<std::shared_mutex> held(all.lock);
  const auto place = all.numbers.find(key);
  if (place == all.numbers.end()) return {};
  return {place->second, all.calls[static_cast<size_t>(place->second)].choice};
}

int put(const TunedCall& tuned) {
  Table& all = table();
  const std::unique_lock<std::shared_mutex> held(all.lock);
  const auto place = all.numbers.find(tuned.key);
  if (place != all.numbers.end()) {
    all.calls[static_cast<size_t>(place->second)] = tuned;
    return place->second;
  }
  if (all.calls.size() >= kMostTuned) return -1;
  all.calls.push_back(tuned);
  return all.numbers[tuned.key] = static_cast<int>(all.calls.size()) - 1;
}

bool is_full() {
  Table& all = table();
  const std::shared_lock<std::shared_mutex> held(all.lock);
  return all.calls.size() >= kMostTuned;
}

// ---- Scopes --------------------------------------------------------------------------------------------------------

struct Scope {
  TuningMode mode;
  Tuning forced;
  std::vector<int> used;
};

thread_local std::vector<Scope> scopes;

void note_use(int number) {
  if (scopes.empty() || number < 0) return;
  std::vector<int>& used = scopes.back().used;
  if (std::find(used.begin(), used.end(), number) == used.end()) used.push_back(number);
}

// ---- Trials --------------------------------------------------------------------------------------------------------

constexpr int kScreeningRounds = 3, kRounds = 15, kLeastRounds = 5;
constexpr size_t kFinalists = 3;
constexpr double kClearly = 1.03;     // times as fast: less is not told from chance
constexpr double kMostSeconds = 2.0;  // of a series of rounds; the least number of rounds is done all the same

struct Contender {
  Tuning choice;
  std::vector<double> seconds;
  bool failed = false;
  double best() const { return *std::min_element(seconds.begin(), seconds.end()); }
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool can_flush_unordered() {
  constexpr unsigned kFlushOpt = 1U << 23;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kFlushOpt) != 0;
}

// What is larger than all caches flushes itself.
void flush(const void* data, size_t bytes) {
  constexpr size_t kLine = 64;
  static const bool unordered = can_flush_unordered();
  const auto l3 = static_cast<size_t>(cpu_features().l3_bytes);
  if (l3 > 0 && bytes > l3) return;
  const auto* first = static_cast<const char*>(data);
  for (size_t at = 0; at < bytes; at += kLine) {
    if (unordered) {
      asm volatile("clflushopt %0" : : "m"(first[at]));
    } else {
      _mm_clflush(first + at);
    }
  }
  _mm_mfence();
}

void run_once(const TuningTrial& trial, Contender* contender) {
  for (const ColdMemory::Run& run : trial.cold.runs) flush(run.data, run.bytes);
  const double start = now();
  try {
    trial.run(trial.context, contender->choice);
  } catch (const std::exception&) {  // scratch memory that is not to be had: the choice is none
    contender->failed = true;
    return;
  }
  contender->seconds.push_back(now() - start);
}

void take_turns(const TuningTrial& trial, int rounds, int least, std::vector<Contender>* contenders) {
  const double start = now();
  for (int round = 0; round < rounds && (round < least || now() - start < kMostSeconds); ++round) {
    for (Contender& contender : *contenders) {
      if (!contender.failed) run_once(trial, &contender);
    }
  }
}

// How many times as fast as the first one, by the more careful of two measures.
double gain(const Contender& first, const Contender& other) {
  if (first.failed || other.failed || other.seconds.empty()) return 0;
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(first.seconds.size(), other.seconds.size()); ++i) {
    ratios.push_back(first.seconds[i] / other.seconds[i]);
  }
  std::sort(ratios.begin(), ratios.end());
  return std::min(ratios[ratios.size() / 2], first.best() / other.best());
}

// Those that looked faster after a few rounds, the fastest first, and the two fastest in one where they do not conflict.
std::vector<Tuning> finalists(const std::vector<Contender>& tried) {
  std::vector<const Contender*> faster;
  for (size_t i = 1; i < tried.size(); ++i) {
    if (!tried[i].failed && tried[i].best() * kClearly < tried[0].best()) faster.push_back(&tried[i]);
  }
  std::sort(faster.begin(), faster.end(), [](const auto* a, const auto* b) { return a->best() < b->best(); });
  if (faster.size() > kFinalists) faster.resize(kFinalists);
  std::vector<Tuning> found;
  found.reserve(faster.size() + 1);
  for (const Contender* each : faster) found.push_back(each->choice);
  if (found.size() < 2) return found;
  const Tuning &a = found[0], &b = found[1];
  Tuning both = a;
  if (both.level < 0) both.level = b.level;
  if (both.chunk_panels == 0) both.chunk_panels = b.chunk_panels;
  if (both.chunk_rows == TunedRows::automatic) both.chunk_rows = b.chunk_rows;
  if (both.grid_rows == 0) both.grid_rows = b.grid_rows;
  if (both.weights_stay == TunedStay::automatic) both.weights_stay = b.weights_stay;
  if (both.path == TunedPath::automatic) both.path = b.path;
  if (!(both == a)) found.push_back(both);
  return found;
}

std::vector<Contender> contenders_of(const std::vector<Tuning>& choices) {
  std::vector<Contender> contenders(1);  // the heuristics
  for (const Tuning& choice : choices) contenders.push_back({choice, {}, false});
  return contenders;
}

TunedCall try_all(const TuningKey& key, const TuningTrial& trial) {
  TunedCall tuned{key, {}, 0, 0, true};
  trial.run(trial.context, {});  // warms up, and fails as it would have without the tuner
  std::vector<Contender> tried = contenders_of(tuning_candidates(key));
  take_turns(trial, kScreeningRounds, kScreeningRounds, &tried);
  tuned.seconds = tuned.default_seconds = tried[0].best();
  const std::vector<Tuning> left = finalists(tried);
  if (left.empty()) return tuned;
  std::vector<Contender> last = contenders_of(left);
  take_turns(trial, kRounds, kLeastRounds, &last);
  size_t winner = 0;
  double most = kClearly;
  for (size_t i = 1; i < last.size(); ++i) {
    if (gain(last[0], last[i]) > most) {
      most = gain(last[0], last[i]);
      winner = i;
    }
  }
  tuned.seconds = tuned.default_seconds = last[0].best();
  if (winner == 0) return tuned;
  // Of several that are equally fast, one is always the luckiest: it has to win alone.
  std::vector<Contender> again = contenders_of({last[winner].choice});
  take_turns(trial, kRounds, kLeastRounds, &again);
  if (gain(again[0], again[1]) < kClearly) return tuned;
  tuned.choice = again[1].choice;
  tuned.seconds = again[1].best();
  tuned.default_seconds = again[0].best();
  return tuned;
}

}  // namespace

Tuning choose_tuning(const TuningKey& key, const TuningTrial& trial) {
  if (in_region()) return {};
  const bool own = !scopes.empty();
  const TuningMode mode = own ? scopes.back().mode : process_tuning();
  Tuning choice;
  if (mode == TuningMode::forced) {
    choice = scopes.back().forced;
  } else if (mode != TuningMode::off) {
    Found found = find(key);
    if (found.number < 0 && mode == TuningMode::max) {
      const std::lock_guard<std::mutex> held(table().trying);
      found = find(key);  // another thread may have been faster
      if (found.number < 0 && !is_full()) {
        const TunedCall tuned = try_all(key, trial);
        found = {put(tuned), tuned.choice};
        table().has_fresh = true;
      }
    }
    note_use(found.number);
    choice = found.choice;
  }
  if (tracing() && !(choice == Tuning{})) trace_instance(instance_text(key, choice).c_str());
  return choice;
}

namespace {

// Whose records there are to choose from: products with weights of a few bits hand their panels over to the GEMM.
const char* multiplying_kernel(const TuningKey& key) {
  return key.kernel == "gemm_weight_only" ? "gemm" : key.kernel.c_str();
}

// What there is to choose beside levels.
std::vector<Tuning> blockings_of(const TuningKey& key, Isa usual) {
  std::vector<Tuning> found;
  const auto add = [&found](auto set) {
    Tuning choice;
    set(choice);
    found.push_back(choice);
  };
  const bool attends = key.kernel == "attention", depthwise = key.kernel == "conv_depthwise";
  const std::vector<int> panels = attends ? std::vector{2, 4, 8, 16, 32} : std::vector{1, 2, 4, 8};
  for (const int count : panels) add([&](Tuning& choice) { choice.chunk_panels = static_cast<int16_t>(count); });
  for (const TunedRows rows : {TunedRows::half, TunedRows::twice}) add([&](Tuning& c) { c.chunk_rows = rows; });
  if (attends) return found;
  for (int rows = 1; rows <= key.threads && key.threads > 1; ++rows) {
    if (key.threads % rows == 0) add([&](Tuning& choice) { choice.grid_rows = static_cast<int16_t>(rows); });
  }
  if (depthwise) return found;
  if (usual != Isa::amx || key.kernel == "gemm") {
    for (const TunedStay stay : {TunedStay::never, TunedStay::always}) add([&](Tuning& c) { c.weights_stay = stay; });
  }
  // Vector blocks read floats out of a padded image wherever they can; integers always come as patches.
  const bool is_int8 = key.dtype == "u8s8" || key.dtype == "s8s8";
  if (key.kernel == "conv" && (usual == Isa::amx || !is_int8)) add([](Tuning& c) { c.path = TunedPath::patches; });
  if (key.kernel == "conv" && usual == Isa::amx) add([](Tuning& c) { c.path = TunedPath::raster; });
  return found;
}

}  // namespace

std::vector<Tuning> tuning_candidates(const TuningKey& key) {
  const char *kernel = multiplying_kernel(key), *dtype = key.dtype.c_str();
  std::vector<Tuning> found;
  std::vector<int> levels;
  for (const KernelRecord* record = first_kernel(); record != nullptr; record = record->next) {
    const bool same = std::strcmp(record->name, kernel) == 0 && std::strcmp(record->dtype, dtype) == 0;
    const bool vectors = record->isa != Isa::scalar;
    if (same && vectors && record->isa < active_isa()) levels.push_back(static_cast<int>(record->isa));
  }
  std::sort(levels.rbegin(), levels.rend());
  const KernelRecord* usual = find_kernel(kernel, dtype);
  levels.erase(std::remove(levels.begin(), levels.end(), static_cast<int>(usual->isa)), levels.end());
  for (const int level : levels) {
    found.emplace_back();
    found.back().level = static_cast<int8_t>(level);
  }
  const std::vector<Tuning> blockings = blockings_of(key, usual->isa);
  found.insert(found.end(), blockings.begin(), blockings.end());
  return found;
}

Isa level_of_choice(const TuningKey& key, const Tuning& choice) {
  const Isa limit = choice.level < 0 ? key.level : static_cast<Isa>(choice.level);
  return find_kernel(multiplying_kernel(key), key.dtype.c_str(), std::min(limit, active_isa()))->isa;
}

std::string instance_text(const TuningKey& key, const Tuning& choice) {
  std::string text = isa_name(level_of_choice(key, choice));
  if (choice.path != TunedPath::automatic) text += choice.path == TunedPath::raster ? ", raster" : ", patches";
  if (choice.chunk_panels > 0) {
    const bool keys = key.kernel == "attention";
    text += ", " + std::to_string(choice.chunk_panels * (keys ? 32 : 1)) + (keys ? " keys" : " panels");
  }
  if (choice.chunk_rows != TunedRows::automatic) text += choice.chunk_rows == TunedRows::half ? ", rows/2" : ", rows*2";
  if (choice.grid_rows > 0) text += ", grid " + std::to_string(choice.grid_rows);
  if (choice.weights_stay != TunedStay::automatic) {
    text += choice.weights_stay == TunedStay::always ? ", stays" : ", streams";
  }
  return text;
}

// ---- Modes ---------------------------------------------------------------------------------------------------------

void set_process_tuning(TuningMode mode) {
  const int before = table().process_mode.exchange(static_cast<int>(mode));
  tuning_users += static_cast<int>(mode != TuningMode::off) - static_cast<int>(before != 0);
}

TuningMode process_tuning() { return static_cast<TuningMode>(table().process_mode.load(std::memory_order_relaxed)); }

void enter_tuning(TuningMode mode, const Tuning& forced) {
  scopes.push_back({mode, forced, {}});
  ++tuning_users;
}

std::vector<int> leave_tuning() {
  if (scopes.empty()) throw std::logic_error("leave_tuning: expected a scope of this thread, got none");
  --tuning_users;
  std::vector<int> used = std::move(scopes.back().used);
  scopes.pop_back();
  for (const int number : used) note_use(number);  // a scope around this one used it as well
  return used;
}

// ---- What is known -------------------------------------------------------------------------------------------------

void add_tuned(const TunedCall& tuned) { put(tuned); }

std::vector<TunedCall> tuned_calls() {
  Table& all = table();
  const std::shared_lock<std::shared_mutex> held(all.lock);
  return all.calls;
}

bool has_fresh() { return table().has_fresh.load(std::memory_order_relaxed); }

std::vector<TunedCall> take_fresh() {
  Table& all = table();
  const std::unique_lock<std::shared_mutex> held(all.lock);
  all.has_fresh = false;
  std::vector<TunedCall> fresh;
  for (TunedCall& tuned : all.calls) {
    if (tuned.fresh) fresh.push_back(tuned);
    tuned.fresh = false;
  }
  return fresh;
}

void forget_tuned() {
  Table& all = table();
  const std::unique_lock<std::shared_mutex> held(all.lock);
  all.numbers.clear();
  all.calls.clear();
}

}  // namespace xopt
