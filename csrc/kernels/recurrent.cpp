// The loop over time. See recurrent.h.
//
// One parallel region for all steps. A job is a direction, or some sequences of one: jobs need nothing of each other, so
// where there are enough of them no thread ever waits. Otherwise several threads share a job, each with some blocks of
// units (whose weights stay in its caches), and meet after each step. Sums of the input for some steps ahead wait in
// scratch that stays in L2.
#include "kernels/recurrent.h"

#include <cstring>
#include <new>

#include "runtime/arena.h"
#include "runtime/barrier.h"
#include "runtime/cpu.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"

namespace xopt {
namespace {

Kernel<RecurrentGatesFn> gates_kernel("recurrent_gates", "f32");
Kernel<RecurrentRowsFn> rows_kernel("recurrent_rows", "f32");

// Rows of one product of the input. Their sums wait for the gates, near by; but a weight that does not stay in L2 is
// read anew for each.
constexpr int64_t kInputRows = 64, kInputRowsOfLargeWeights = 256;

// Sums of the hidden state that gates are to find in L1. Each group copies the hidden state for its product, which
// vector blocks do for each 8 panels anyway, while with tiles one copy serves all panels of a product.
constexpr int64_t kGroupBytes = 32 * 1024;
constexpr int64_t kGroupPanels = 8;

struct Range {
  int64_t begin, end;
  [[nodiscard]] int64_t size() const { return end - begin; }
};

Range share(int64_t total, int64_t parts, int64_t part) { return {total * part / parts, total * (part + 1) / parts}; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t bytes_of(const PackedWeight& weight) { return weight.panels * weight.panel_bytes; }
int64_t blocks_of(int64_t units) { return (units + kRecurrentBlock - 1) / kRecurrentBlock; }

void* at(void* data, DType dtype, int64_t index) { return static_cast<uint8_t*>(data) + index * dtype_size(dtype); }
const void* at(const void* data, DType dtype, int64_t index) {
  return static_cast<const uint8_t*>(data) + index * dtype_size(dtype);
}

// How threads share the work; a function of the call and of how many of them there are.
struct Sharing {
  Sharing(const RecurrentCall& call, int threads) {
    const bool stays = bytes_of(call.direction[0].hidden_weight) <= l2_bytes();
    const bool may_split_rows = call.first_row == nullptr && stays;
    const int64_t wanted = (threads + call.directions - 1) / call.directions;
    // Results must not depend on the number of threads.
    row_groups = may_split_rows ? most(1, least(wanted, call.batch / kLeastRowsOfMany)) : 1;
    jobs = call.directions * static_cast<int>(row_groups);
    members = static_cast<int>(most(1, least(threads / jobs, blocks_of(call.units))));
    teams = static_cast<int>(least(threads / members, jobs));
  }

  int64_t row_groups;
  int jobs;
  int members;  // threads of a job
  int teams;    // jobs under way at a time
};

// Two hidden states of all sequences of a direction, of which each step reads one and writes the other, and the cells'
// outputs on their way to a projection.
struct SharedStates {
  uint8_t *hidden[2], *unprojected;
  int64_t hidden_stride, unprojected_stride;
};

// A thread's part of a job: some blocks of units of some sequences.
class Worker {
 public:
  Worker(const RecurrentCall& call, const SharedStates& states, Barrier* barrier, int direction, Range rows, int member,
         int members)
      : call_(call),
        direction_(call.direction[direction]),
        states_(states),
        barrier_(barrier),
        backward_(direction == 1),
        rows_(rows),
        member_(member),
        members_(members),
        gates_(recurrent_gate_count(call.cell)),
        blocks_(share(blocks_of(call.units), members, member)),
        units_(least(blocks_.end * kRecurrentBlock, call.units) - blocks_.begin * kRecurrentBlock),
        sums_(blocks_.size() * gates_ * kRecurrentBlock),
        hidden_weight_(direction_.hidden_weight.columns(first_sum(), sums_)),
        input_weight_(direction_.input_weight.columns(first_sum(), sums_)),
        out_(at(call.out, call.out_dtype, direction * call.outputs)) {
    const bool stays = bytes_of(direction_.input_weight) <= l2_bytes();
    const int64_t input_rows = stays ? kInputRows : kInputRowsOfLargeWeights;
    chunk_steps_ = least(most(1, input_rows / rows.size()), call.steps);
    const int64_t group_bytes = most(kGroupPanels * kPanelColumns * 4 * rows.size(), kGroupBytes);
    group_blocks_ = most(1, group_bytes / (gates_ * kRecurrentBlock * 4 * rows.size()));
    if (active_isa() == Isa::amx && hidden_dtype() != DType::f32) group_blocks_ = blocks_.size();
  }

  void run() {
    const int64_t rows = rows_.size(), state_stride = blocks_.size() * kRecurrentBlock;
    const Scratch state(static_cast<size_t>(rows * state_stride) * 4);
    const Scratch biases(static_cast<size_t>(2 * sums_) * 4);
    const Scratch input_sums(static_cast<size_t>(chunk_steps_ * rows * sums_) * 4);
    const Scratch hidden_sums(static_cast<size_t>(rows * most(sums_, call_.outputs)) * 4);
    state_ = state.as<float>();
    state_stride_ = state_stride;
    input_bias_ = arranged(direction_.input_bias, biases.as<float>());
    hidden_bias_ = arranged(direction_.hidden_bias, biases.as<float>() + sums_);
    input_sums_ = input_sums.as<float>();
    hidden_sums_ = hidden_sums.as<float>();
    begin_states();
    if (!barrier_->wait(members_)) return;
    const int64_t chunks = (call_.steps + chunk_steps_ - 1) / chunk_steps_;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t first = (backward_ ? chunks - 1 - i : i) * chunk_steps_;
      if (!run_chunk({first, least(first + chunk_steps_, call_.steps)})) return;
    }
    finish_states();
  }

 private:
  int64_t first_sum() const { return blocks_.begin * gates_ * kRecurrentBlock; }
  int64_t first_unit() const { return blocks_.begin * kRecurrentBlock; }
  int64_t rows_at(int64_t step) const {
    return call_.first_row == nullptr ? rows_.size() : call_.first_row[step + 1] - call_.first_row[step];
  }
  int64_t input_offset(int64_t step) const {
    if (call_.first_row != nullptr) return call_.first_row[step] * call_.input_row_stride;
    return step * call_.input_step_stride + rows_.begin * call_.input_row_stride;
  }
  int64_t out_offset(int64_t step) const {
    if (call_.first_row != nullptr) return call_.first_row[step] * call_.out_row_stride;
    return step * call_.out_step_stride + rows_.begin * call_.out_row_stride;
  }
  DType hidden_dtype() const { return direction_.hidden_weight.dtype; }
  uint8_t* hidden(int which) const {
    return states_.hidden[which] + rows_.begin * states_.hidden_stride * dtype_size(hidden_dtype());
  }

  // A bias in the order of the sums. Only these blocks' part of it is wanted.
  ColumnVector arranged(const ColumnVector& bias, float* to) const {
    if (bias.data == nullptr) return {};
    std::memset(to, 0, static_cast<size_t>(sums_) * 4);
    for (int64_t unit = 0; unit < units_; unit += kRecurrentBlock) {
      const void* from = at(bias.data, bias.dtype, first_unit() + unit);
      rows_kernel(RecurrentRowsCall{from, bias.dtype, call_.units, to + unit * gates_, DType::f32, kRecurrentBlock,
                                    gates_, least(kRecurrentBlock, units_ - unit)});
    }
    return {to, DType::f32};
  }

  // The first member brings in the hidden state, which all read; each its own units' cells.
  void begin_states() const {
    const int64_t rows = rows_.size(), outputs = call_.outputs;
    for (int which = 0; member_ == 0 && which < 2; ++which) {
      if (direction_.first_hidden == nullptr) {
        std::memset(hidden(which), 0, static_cast<size_t>(rows * states_.hidden_stride * dtype_size(hidden_dtype())));
      } else {
        const DType dtype = direction_.first_hidden_dtype;
        rows_kernel(RecurrentRowsCall{at(direction_.first_hidden, dtype, rows_.begin * outputs), dtype, outputs,
                                      hidden(which), hidden_dtype(), states_.hidden_stride, rows, outputs});
      }
    }
    std::memset(state_, 0, static_cast<size_t>(rows * state_stride_) * 4);
    const bool lstm = call_.cell == RecurrentCell::lstm;
    const void* first = lstm ? direction_.first_cell : direction_.first_hidden;
    const DType dtype = lstm ? direction_.first_cell_dtype : direction_.first_hidden_dtype;
    if (first == nullptr) return;
    rows_kernel(RecurrentRowsCall{at(first, dtype, rows_.begin * call_.units + first_unit()), dtype, call_.units,
                                  state_, DType::f32, state_stride_, rows, units_});
  }

  void finish_states() const {
    const int64_t outputs = call_.outputs;
    for (int64_t row = rows_.begin; member_ == 0 && row < rows_.end; ++row) {
      const int64_t from = out_offset(last_step(row)) + (row - rows_.begin) * call_.out_row_stride;
      std::memcpy(at(direction_.last_hidden, call_.out_dtype, row * outputs), at(out_, call_.out_dtype, from),
                  static_cast<size_t>(outputs * dtype_size(call_.out_dtype)));
    }
    if (call_.cell != RecurrentCell::lstm) return;
    void* to = at(direction_.last_cell, call_.out_dtype, rows_.begin * call_.units + first_unit());
    rows_kernel(
        RecurrentRowsCall{state_, DType::f32, state_stride_, to, call_.out_dtype, call_.units, rows_.size(), units_});
  }

  int64_t last_step(int64_t row) const {
    int64_t step = backward_ ? 0 : call_.steps - 1;
    while (row - rows_.begin >= rows_at(step)) --step;
    return step;
  }

  bool run_chunk(Range steps) {
    multiply_input(steps);
    int64_t row = 0;  // of the input's sums
    if (backward_) {
      for (int64_t step = steps.begin; step < steps.end; ++step) row += rows_at(step);
    }
    for (int64_t i = 0; i < steps.size(); ++i) {
      const int64_t step = backward_ ? steps.end - 1 - i : steps.begin + i, rows = rows_at(step);
      if (backward_) row -= rows;
      if (!run_step(step, rows, input_sums_ + row * sums_)) return false;
      if (!backward_) row += rows;
    }
    return true;
  }

  // Steps of packed sequences follow each other without a gap, others at one distance.
  void multiply_input(Range steps) const {
    GemmCall call = product(input_weight_, input_bias_, input_sums_, sums_);
    call.a.data = at(call_.input, call_.input_dtype, input_offset(steps.begin));
    call.a.dtype = call_.input_dtype;
    call.a.row_stride = call_.input_row_stride;
    if (call_.first_row != nullptr) {
      call.m = call.a.inner_rows = call_.first_row[steps.end] - call_.first_row[steps.begin];
    } else {
      call.m = steps.size() * rows_.size();
      call.a.inner_rows = rows_.size();
      call.a.outer_stride = call_.input_step_stride;
    }
    call_.product(call);
  }

  bool run_step(int64_t step, int64_t rows, const float* input_sums) {
    void* out = at(out_, call_.out_dtype, out_offset(step));
    for (int64_t block = 0; block < blocks_.size(); block += group_blocks_) {
      run_group({block, least(block + group_blocks_, blocks_.size())}, rows, input_sums, out);
    }
    if (!barrier_->wait(members_)) return false;
    if (call_.projected) {
      project(rows, out);
      if (!barrier_->wait(members_)) return false;
    }
    turn_ ^= 1;
    return true;
  }

  // A step of some of these blocks.
  void run_group(Range blocks, int64_t rows, const float* input_sums, void* out) const {
    const int64_t sums_of_a_block = gates_ * kRecurrentBlock;
    const int64_t first = blocks.begin * sums_of_a_block, count = blocks.size() * sums_of_a_block;
    ColumnVector bias = hidden_bias_;
    if (bias.data != nullptr) bias.data = static_cast<const float*>(bias.data) + first;
    GemmCall call = product(hidden_weight_.columns(first, count), bias, hidden_sums_, count);
    read_state(&call, rows, hidden(turn_), hidden_dtype(), states_.hidden_stride);
    call_.product(call);

    const int64_t unit = blocks.begin * kRecurrentBlock;
    RecurrentGatesCall gates{};
    gates.cell = call_.cell;
    gates.rows = rows;
    gates.units = least(blocks.end * kRecurrentBlock, units_) - unit;
    gates.input_sums = input_sums + first;
    gates.input_sums_stride = sums_;
    gates.hidden_sums = hidden_sums_;
    gates.hidden_sums_stride = count;
    gates.state = state_ + unit;
    gates.state_stride = state_stride_;
    if (call_.projected) {
      gates.hidden_dtype = direction_.projection.dtype;
      gates.hidden = at(unprojected(), gates.hidden_dtype, first_unit() + unit);
      gates.hidden_stride = states_.unprojected_stride;
    } else {
      gates.hidden_dtype = hidden_dtype();
      gates.hidden = at(hidden(turn_ ^ 1), gates.hidden_dtype, first_unit() + unit);
      gates.hidden_stride = states_.hidden_stride;
      gates.out = at(out, call_.out_dtype, first_unit() + unit);
      gates.out_dtype = call_.out_dtype;
      gates.out_stride = call_.out_row_stride;
    }
    gates_kernel(gates);
  }

  uint8_t* unprojected() const {
    return states_.unprojected + rows_.begin * states_.unprojected_stride * dtype_size(direction_.projection.dtype);
  }

  // This member's panels of the projection.
  void project(int64_t rows, void* out) const {
    const Range panels = share(direction_.projection.panels, members_, member_);
    if (panels.size() == 0) return;
    const int64_t first = panels.begin * kPanelColumns;
    const int64_t count = least(panels.end * kPanelColumns, call_.outputs) - first;
    GemmCall call = product(direction_.projection.columns(first, count), {}, hidden_sums_, count);
    read_state(&call, rows, unprojected(), direction_.projection.dtype, states_.unprojected_stride);
    call_.product(call);
    rows_kernel(RecurrentRowsCall{hidden_sums_, DType::f32, count, at(hidden(turn_ ^ 1), hidden_dtype(), first),
                                  hidden_dtype(), states_.hidden_stride, rows, count});
    rows_kernel(RecurrentRowsCall{hidden_sums_, DType::f32, count, at(out, call_.out_dtype, first), call_.out_dtype,
                                  call_.out_row_stride, rows, count});
  }

  static GemmCall product(const PackedWeight& weight, const ColumnVector& bias, float* out, int64_t out_stride) {
    GemmCall call{0, {}, weight, {}};
    call.epilogue.bias = bias;
    call.epilogue.out = out;
    call.epilogue.out_row_stride = out_stride;
    return call;
  }

  static void read_state(GemmCall* call, int64_t rows, const void* state, DType dtype, int64_t stride) {
    call->m = call->a.inner_rows = rows;
    call->a.data = state;
    call->a.dtype = dtype;
    call->a.row_stride = stride;
  }

  const RecurrentCall& call_;
  const RecurrentDirection& direction_;
  const SharedStates& states_;
  Barrier* barrier_;
  const bool backward_;
  const Range rows_;
  const int member_, members_;
  const int64_t gates_;
  const Range blocks_;
  const int64_t units_, sums_;  // units of these blocks, and their sums a row
  const PackedWeight hidden_weight_, input_weight_;
  void* const out_;
  int64_t chunk_steps_, group_blocks_;
  int turn_ = 0;

  float *state_ = nullptr, *input_sums_ = nullptr, *hidden_sums_ = nullptr;
  int64_t state_stride_ = 0;
  ColumnVector input_bias_, hidden_bias_;
};

// The jobs of one team, one after the other.
void run_jobs(const RecurrentCall& call, const Sharing& sharing, const SharedStates* states, Barrier* barriers,
              int thread) {
  const int team = thread / sharing.members, member = thread % sharing.members;
  for (int job = team; team < sharing.teams && job < sharing.jobs; job += sharing.teams) {
    const int direction = job % call.directions;
    const Range rows = share(call.batch, sharing.row_groups, job / call.directions);
    Barrier* barrier = barriers + job;
    try {
      Worker(call, states[direction], barrier, direction, rows, member, sharing.members).run();
    } catch (...) {
      barrier->give_up();
      throw;
    }
  }
}

}  // namespace

void recurrent(const RecurrentCall& call) {
  const Sharing most_threads(call, max_threads());
  SharedStates states[2] = {};
  const int64_t hidden_stride = round_up(call.outputs, kRecurrentBlock);
  const int64_t unprojected_stride = call.projected ? round_up(call.units, kRecurrentBlock) : 0;
  const int64_t hidden_bytes = call.batch * hidden_stride * 4;  // of floats, at most
  const int64_t bytes = 2 * hidden_bytes + call.batch * unprojected_stride * 4;
  const Scratch scratch(static_cast<size_t>(bytes * call.directions));
  for (int direction = 0; direction < call.directions; ++direction) {
    auto* from = scratch.as<uint8_t>() + direction * bytes;
    states[direction] = {{from, from + hidden_bytes}, from + 2 * hidden_bytes, hidden_stride, unprojected_stride};
  }
  // Fewer threads, should the runtime grant no more, never have more jobs.
  const Scratch barrier_memory(sizeof(Barrier) * static_cast<size_t>(most_threads.jobs));
  auto* barriers = barrier_memory.as<Barrier>();
  for (int job = 0; job < most_threads.jobs; ++job) new (barriers + job) Barrier;
  parallel(most_threads.members * most_threads.teams,
           [&](int thread, int count) { run_jobs(call, Sharing(call, count), states, barriers, thread); });
}

}  // namespace xopt
