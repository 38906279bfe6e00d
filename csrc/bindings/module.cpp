// Python module xopt._C, free of torch: what the CPU can do, the kernels of this build and the runtime's knobs.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/module_guard.h"
#include "bindings/operands.h"
#include "kernels/probe.h"
#include "runtime/affinity.h"
#include "runtime/arena.h"
#include "runtime/cpu.h"
#include "runtime/outputs.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "runtime/replays.h"
#include "runtime/trace.h"
#include "runtime/tuner.h"
#include "runtime/xpu.h"

namespace py = pybind11;

namespace xopt {
namespace {

struct Feature {
  const char* name;
  bool CpuFeatures::* flag;
};

constexpr Feature kFeatures[] = {
    {"avx2", &CpuFeatures::avx2},
    {"fma", &CpuFeatures::fma},
    {"f16c", &CpuFeatures::f16c},
    {"avx512f", &CpuFeatures::avx512f},
    {"avx512bw", &CpuFeatures::avx512bw},
    {"avx512dq", &CpuFeatures::avx512dq},
    {"avx512vl", &CpuFeatures::avx512vl},
    {"avx512vbmi", &CpuFeatures::avx512vbmi},
    {"avx512_vnni", &CpuFeatures::avx512_vnni},
    {"avx512_bf16", &CpuFeatures::avx512_bf16},
    {"avx512_fp16", &CpuFeatures::avx512_fp16},
    {"amx_tile", &CpuFeatures::amx_tile},
    {"amx_int8", &CpuFeatures::amx_int8},
    {"amx_bf16", &CpuFeatures::amx_bf16},
    {"amx_fp16", &CpuFeatures::amx_fp16},
    {"amx_permitted", &CpuFeatures::amx_permitted},
    {"emulated", &CpuFeatures::emulated},
};

py::tuple isa_names() {
  py::tuple names(kIsaCount);
  for (int i = 0; i < kIsaCount; ++i) names[i] = isa_name(static_cast<Isa>(i));
  return names;
}

Isa isa_of_name(const std::string& name) {
  std::string known;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (name == isa_name(isa)) return isa;
    known += (i == 0 ? "" : ", ") + std::string(isa_name(isa));
  }
  throw py::value_error("unknown ISA level '" + name + "'; known levels: " + known);
}

py::dict features_of(const CpuFeatures& cpu) {
  py::dict features;
  for (const Feature& feature : kFeatures) features[feature.name] = cpu.*feature.flag;
  return features;
}

std::string level_of_features(const py::dict& features) {
  CpuFeatures cpu{};
  for (const auto& entry : features) {
    const std::string name = py::str(entry.first);
    const Feature* known = nullptr;
    for (const Feature& feature : kFeatures) {
      if (name == feature.name) known = &feature;
    }
    if (known == nullptr) throw py::value_error("unknown CPU feature '" + name + "'");
    cpu.*known->flag = entry.second.cast<bool>();
  }
  return isa_name(level_of(cpu));
}

py::list kernel_records() {
  py::list records;
  for (const KernelRecord* record = first_kernel(); record != nullptr; record = record->next) {
    const bool within_level = record->isa <= active_isa();
    py::dict entry;
    entry["name"] = record->name;
    entry["dtype"] = record->dtype;
    entry["isa"] = isa_name(record->isa);
    entry["calls"] = record->calls.load(std::memory_order_relaxed);
    entry["chosen"] = within_level && find_kernel(record->name, record->dtype) == record;
    records.append(entry);
  }
  return records;
}

void reset_kernel_calls() {
  for (KernelRecord* record = first_kernel(); record != nullptr; record = record->next) record->calls = 0;
}

void bind_cpu(py::module_& m) {
  m.def("isa_levels", &isa_names, "All levels, lowest first.");
  m.def("detected_isa", [] { return isa_name(detected_isa()); }, "The highest level that this process may use.");
  m.def("active_isa", [] { return isa_name(active_isa()); }, "The level that kernels are chosen by.");
  m.def(
      "cap_isa", [](const std::string& name) { cap_isa(isa_of_name(name)); }, py::arg("level"),
      "Caps the level, in place of an earlier cap.");
  m.def("cpu_brand", [] { return std::string(cpu_features().brand); });
  m.def("cpu_features", [] { return features_of(cpu_features()); });
  m.def(
      "cache_bytes",
      [] { return py::make_tuple(cpu_features().l1d_bytes, cpu_features().l2_bytes, cpu_features().l3_bytes); },
      "L1 data, L2 and L3 in bytes; 0 where unknown.");
  m.def("level_of", &level_of_features, py::arg("features"), "The level of a CPU with these features.");
}

void bind_registry(py::module_& m) {
  m.def("kernels", &kernel_records, "All kernels of this build: name, dtype, isa, calls, chosen.");
  m.def("reset_kernel_calls", &reset_kernel_calls);
  m.def(
      "find_kernel",
      [](const std::string& name, const std::string& dtype) {
        return isa_name(find_kernel(name.c_str(), dtype.c_str())->isa);
      },
      py::arg("name"), py::arg("dtype"), "The level of the kernel that is chosen now.");
}

// ---- The roofs of this machine, for the bench ----------------------------------------------------------------------

py::tuple probe(const std::string& kind, int threads, int repeats) {
  if (threads < 1) throw py::value_error("probe: threads is " + std::to_string(threads) + ", expected at least 1");
  if (repeats < 1) throw py::value_error("probe: repeats is " + std::to_string(repeats) + ", expected at least 1");
  ProbeCall call{};
  call.threads = threads;
  call.repeats = repeats;
  {
    const py::gil_scoped_release unlocked;
    Kernel<ProbeFn>("probe", kind.c_str())(call);
  }
  return py::make_tuple(call.seconds, call.work, call.instruction);
}

// ---- Threads and their CPUs -----------------------------------------------------------------------------------------

using Masks = std::vector<std::pair<int, std::vector<int>>>;

Masks pairs_of(std::vector<ThreadMask> masks) {
  Masks pairs;
  for (ThreadMask& mask : masks) pairs.emplace_back(mask.thread_id, std::move(mask.cpus));
  return pairs;
}

// Linux's refusals are OSError in Python, with their errno.
// NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's signature
void translate_system_error(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::system_error& refused) {
    errno = refused.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

void bind_threads(py::module_& m) {
  py::register_local_exception_translator(&translate_system_error);
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("max_threads", &max_threads, "How many threads a kernel called now may use.");
  m.def("openmp_threads", &openmp_threads, "OpenMP's own count of threads for the next region of this thread.");
  m.def("openmp_cpus", &openmp_cpus, "CPUs that OpenMP binds threads to, if it does; else none, or the process's.");
  m.def("openmp_library", &openmp_library, "Path of the OpenMP runtime that kernels run on.");
  m.def(
      "bind_team",
      [](const std::vector<int>& cpus, const std::map<int, std::vector<int>>& exceptions) {
        return pairs_of(bind_team(cpus, exceptions));
      },
      py::arg("cpus"), py::arg("exceptions"), unlocked,
      "Binds this thread's OpenMP team to CPUs, some by their thread ids to others: (thread id, CPUs before) of each.");
  m.def(
      "team_masks", [] { return pairs_of(team_masks()); }, unlocked,
      "(thread id, CPUs that it may run on) of each thread of this thread's OpenMP team.");
}

// ---- Traces, for the profiler ---------------------------------------------------------------------------------------

py::list trace_entries() {
  std::vector<TraceEntry> entries(trace_size());
  entries.resize(read_trace(0, entries.data(), entries.size()));
  py::list rows;
  for (const TraceEntry& entry : entries) {
    rows.append(py::make_tuple(entry.start, entry.end, entry.busy, entry.caller, entry.threads, entry.name));
  }
  return rows;
}

void bind_trace(py::module_& m) {
  m.def("start_trace", &start_trace, "Forgets earlier entries, and notes regions and names from now on.");
  m.def("stop_trace", &stop_trace);
  m.def("trace_dropped", &trace_dropped, "Entries that there was no room for.");
  m.def("trace_entries", &trace_entries,
        "(start, end, busy, caller, threads, name) of each region, with 0 threads of each name, with -1 of each tuned "
        "instance; times in ns.");
}

// ---- Autotuning -----------------------------------------------------------------------------------------------------

constexpr const char* kTuningModes[] = {"off", "use", "max"};

TuningMode tuning_mode_of(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kTuningModes[i]) return static_cast<TuningMode>(i);
  }
  throw py::value_error("unknown mode of autotuning '" + name + "'; known modes: off, use, max");
}

using ChoiceNumbers = std::vector<int>;

ChoiceNumbers numbers_of(const Tuning& choice) {
  return {choice.level,
          choice.chunk_panels,
          static_cast<int>(choice.chunk_rows),
          choice.grid_rows,
          static_cast<int>(choice.weights_stay),
          static_cast<int>(choice.path)};
}

Tuning choice_of(const ChoiceNumbers& numbers) {
  constexpr int kMost[] = {kIsaCount - 1, 127, 2, 32767, 2, 2};
  bool known = numbers.size() == 6;
  for (size_t i = 0; known && i < numbers.size(); ++i)
    known = numbers[i] >= (i == 0 ? -1 : 0) && numbers[i] <= kMost[i];
  if (!known) throw py::value_error("choice: expected what tuned_calls or tuning_candidates told");
  Tuning choice;
  choice.level = static_cast<int8_t>(numbers[0]);
  choice.chunk_panels = static_cast<int16_t>(numbers[1]);
  choice.chunk_rows = static_cast<TunedRows>(numbers[2]);
  choice.grid_rows = static_cast<int16_t>(numbers[3]);
  choice.weights_stay = static_cast<TunedStay>(numbers[4]);
  choice.path = static_cast<TunedPath>(numbers[5]);
  return choice;
}

TuningKey tuning_key(const std::string& kernel, const std::string& dtype, const std::string& level, int threads,
                     const std::vector<int64_t>& sizes) {
  find_kernel(kernel.c_str(), dtype.c_str());  // an error where there is none
  return {kernel, dtype, isa_of_name(level), threads, sizes};
}

py::list rows_of(const std::vector<TunedCall>& calls) {
  py::list rows;
  for (const TunedCall& call : calls) {
    const TuningKey& key = call.key;
    rows.append(py::make_tuple(key.kernel, key.dtype, isa_name(key.level), key.threads, key.sizes,
                               numbers_of(call.choice), instance_text(key, call.choice), call.seconds,
                               call.default_seconds));
  }
  return rows;
}

void bind_tuning(py::module_& m) {
  m.def(
      "set_tuning", [](const std::string& mode) { set_process_tuning(tuning_mode_of(mode)); }, py::arg("mode"),
      "Of all calls of the process that no scope says otherwise of: off, use or max.");
  m.def(
      "enter_tuning", [](const std::string& mode) { enter_tuning(tuning_mode_of(mode), {}); }, py::arg("mode"),
      "Begins a scope of this thread.");
  m.def(
      "force_tuning", [](const ChoiceNumbers& choice) { enter_tuning(TuningMode::forced, choice_of(choice)); },
      py::arg("choice"), "Begins a scope of this thread in which each call is run by this choice.");
  m.def("leave_tuning", &leave_tuning, "Ends this thread's innermost scope: numbers of what was used in it.");
  m.def(
      "tuning_candidates",
      [](const std::string& kernel, const std::string& dtype, int threads) {
        const TuningKey key = tuning_key(kernel, dtype, isa_name(active_isa()), threads, {});
        std::vector<std::pair<std::string, ChoiceNumbers>> found;
        for (const Tuning& choice : tuning_candidates(key)) {
          found.emplace_back(instance_text(key, choice), numbers_of(choice));
        }
        return found;
      },
      py::arg("kernel"), py::arg("dtype"), py::arg("threads"), "(instance, choice) of each that is tried.");
  m.def(
      "add_tuned",
      [](const std::string& kernel, const std::string& dtype, const std::string& level, int threads,
         const std::vector<int64_t>& sizes, const ChoiceNumbers& choice, double seconds, double default_seconds) {
        add_tuned(
            {tuning_key(kernel, dtype, level, threads, sizes), choice_of(choice), seconds, default_seconds, false});
      },
      py::arg("kernel"), py::arg("dtype"), py::arg("level"), py::arg("threads"), py::arg("sizes"), py::arg("choice"),
      py::arg("seconds"), py::arg("default_seconds"));
  m.def(
      "tuned_calls", [] { return rows_of(tuned_calls()); },
      "(kernel, dtype, level, threads, sizes, choice, instance, seconds, default's seconds), by number.");
  m.def(
      "take_fresh_tuned", [] { return rows_of(take_fresh()); },
      "Of these, what was tried since the last call of this.");
  m.def("has_fresh_tuned", &has_fresh, "Whether there is any such.");
  m.def("forget_tuned", &forget_tuned);
}

// ---- xopt._C.testing: the runtime's parts on their own -----------------------------------------------------------

template <class Body>
void maybe_with_team(bool team, const Body& body) {
  if (team) return with_team(body);
  body();
}

// For each region, which (thread, count) each body saw, in the order of the threads.
std::vector<std::vector<std::pair<int, int>>> region_members(const std::vector<int>& regions, bool team) {
  std::vector<std::vector<std::pair<int, int>>> members;
  maybe_with_team(team, [&] {
    for (const int threads : regions) {
      std::vector<int> counts(static_cast<size_t>(std::max(threads, 1)), 0);
      parallel(threads, [&](int thread, int count) { counts[static_cast<size_t>(thread)] = count; });
      members.emplace_back();
      for (int thread = 0; thread < static_cast<int>(counts.size()); ++thread) {
        const int count = counts[static_cast<size_t>(thread)];
        if (count > 0) members.back().emplace_back(thread, count);
      }
    }
  });
  return members;
}

// Every thread opens a region of its own: the sizes of these inner regions and what max_threads said.
std::pair<int, int> nested_region(int threads, bool team) {
  std::atomic<int> inner{0}, allowed{0};
  maybe_with_team(team, [&] {
    parallel(threads, [&](int, int) {
      allowed = std::max(allowed.load(), max_threads());
      maybe_with_team(team, [&] { parallel(threads, [&](int, int count) { inner = std::max(inner.load(), count); }); });
    });
  });
  return {inner.load(), allowed.load()};
}

// Throws on one thread, or on all of them where `thrower` is negative; the region before it does not.
void throwing_region(int threads, int thrower, bool team) {
  maybe_with_team(team, [&] {
    parallel(threads, [](int, int) {});
    parallel(threads, [&](int thread, int) {
      if (thread == thrower || thrower < 0) throw std::runtime_error("thrown by thread " + std::to_string(thread));
    });
  });
}

// Takes pieces of these sizes, fills each, gives them all back: the address of each, which no other piece overwrote.
std::vector<uintptr_t> scratch_pieces(const std::vector<size_t>& sizes) {
  std::vector<std::unique_ptr<Scratch>> pieces;
  struct Unwind {  // a vector would destroy its elements in the order of taking
    std::vector<std::unique_ptr<Scratch>>& pieces;
    ~Unwind() {
      while (!pieces.empty()) pieces.pop_back();
    }
  } unwind{pieces};
  std::vector<uintptr_t> addresses;
  for (size_t i = 0; i < sizes.size(); ++i) {
    pieces.push_back(std::make_unique<Scratch>(sizes[i]));
    std::memset(pieces.back()->as<void>(), static_cast<int>(i % 251), sizes[i]);
    addresses.push_back(reinterpret_cast<uintptr_t>(pieces.back()->as<void>()));
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const unsigned char* bytes = pieces[i]->as<unsigned char>();
    for (size_t at = 0; at < sizes[i]; ++at) {
      if (bytes[at] != i % 251) throw std::logic_error("piece " + std::to_string(i) + " was overwritten");
    }
  }
  return addresses;
}

// Tunes a call that only waits, `seconds` by the choice; choices that are not named take as long as the first, which is
// the heuristics' own: the instance that was found.
std::string tune_waits(const std::vector<std::pair<ChoiceNumbers, double>>& seconds) {
  static std::atomic<int64_t> calls{0};
  const TuningKey key{"gemm", "f32", active_isa(), 1, {-1, ++calls}};
  using Waits = std::vector<std::pair<ChoiceNumbers, double>>;
  const auto wait = [](const void* context, const Tuning& choice) {
    const Waits& all = *static_cast<const Waits*>(context);
    double left = all.front().second;
    for (const auto& [numbers, own] : all) left = choice_of(numbers) == choice ? own : left;
    std::this_thread::sleep_for(std::chrono::duration<double>(left));
  };
  enter_tuning(TuningMode::max, {});
  const Tuning chosen = choose_tuning(key, {wait, &seconds, {}});
  leave_tuning();
  return instance_text(key, chosen);
}

void bind_testing(py::module_ m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  m.def("region_members", &region_members, py::arg("regions"), py::arg("team") = false, unlocked);
  m.def("tune_waits", &tune_waits, py::arg("seconds"), unlocked);
  m.def("nested_region", &nested_region, py::arg("threads"), py::arg("team") = false, unlocked);
  m.def("throwing_region", &throwing_region, py::arg("threads"), py::arg("thrower"), py::arg("team") = false, unlocked);
  m.def("scratch_pieces", &scratch_pieces, py::arg("sizes"), unlocked);
  m.def(
      "weight_alloc", [](size_t bytes) { return reinterpret_cast<uintptr_t>(weight_alloc(bytes)); }, py::arg("bytes"));
  m.def("weight_free", [](uintptr_t address) { weight_free(reinterpret_cast<void*>(address)); }, py::arg("address"));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("__version__") = XOPT_VERSION;
  bind_cpu(m);
  bind_registry(m);
  m.def("probe", &probe, py::arg("kind"), py::arg("threads"), py::arg("repeats"),
        "Measures a roof, of kind f32, bf16, int8 or read: (seconds, operations or bytes in them, instruction).");
  bind_threads(m);
  bind_trace(m);
  bind_tuning(m);
  bind_module_guard(m);
  bind_operands(m);
  m.def("set_sycl_loader", &set_sycl_loader, py::arg("loader"),
        "What loads the SYCL part when an operator is first called on tensors of device xpu; it answers what is "
        "missing.");
  m.def("set_arena_limit", &set_arena_limit, py::arg("bytes"),
        "For tests: scratch memory a thread may have in use; negative for no limit.");
  m.def("arena_bytes", &arena_bytes, "Bytes that all scratch arenas hold.");
  m.def("replayed_calls", &replayed_calls, "Calls of kernels that chains have made again as they were noted.");
  m.def("weight_bytes", &weight_bytes, "Bytes of the pages that packed weights lie on.");
  m.def("set_kept_output_bytes", &set_kept_output_bytes, py::arg("bytes"),
        "How much memory of freed outputs is held at most for the next ones.");
  m.def(
      "output_statistics",
      [] {
        const OutputStatistics of = output_statistics();
        return py::make_tuple(of.live_bytes, of.kept_bytes, of.allocations, of.fresh_blocks);
      },
      "Of the memory of large outputs: bytes in use, bytes kept, allocations, and those that the system had to serve.");
  bind_testing(m.def_submodule("testing", "The runtime's parts on their own, for the tests."));
}

}  // namespace xopt
