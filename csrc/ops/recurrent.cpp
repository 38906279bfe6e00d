// xopt::recurrent: all layers of an LSTM, GRU or plain recurrent network, over sequences of one length or packed ones.
#include "kernels/recurrent.h"

#include <vector>

#include "ops/gemm_arguments.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "recurrent";
constexpr NamedValue<RecurrentCell> kCells[] = {{"lstm", RecurrentCell::lstm},
                                                {"gru", RecurrentCell::gru},
                                                {"rnn_tanh", RecurrentCell::rnn_tanh},
                                                {"rnn_relu", RecurrentCell::rnn_relu}};

struct RecurrentArguments {
  explicit RecurrentArguments(Stack stack)
      : input(stack.tensor()),
        weights(stack.tensors()),
        hidden(stack.optional_tensor()),
        cell_state(stack.optional_tensor()),
        batch_sizes(stack.optional_tensor()),
        cell(stack.string()),
        hidden_size(stack.integer()),
        proj_size(stack.integer()),
        num_layers(stack.integer()),
        bias(stack.boolean()),
        bidirectional(stack.boolean()),
        batch_first(stack.boolean()),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor input;
  Tensors weights;
  Tensor hidden, cell_state, batch_sizes;
  String cell;
  int64_t hidden_size, proj_size, num_layers;
  bool bias, bidirectional, batch_first;
  std::optional<int32_t> out_dtype;
};

// What is the same for all layers, and where the sequences are.
struct Shape {
  RecurrentCell cell;
  bool projected, packed;
  int64_t units, outputs, layers, directions;
  int64_t batch, steps, rows;
  int64_t batch_dim;  // of an input that is not packed
  DType out_dtype;
  std::vector<int64_t> first_row;
};

void check_gradients(const RecurrentArguments& arguments) {
  check_no_gradient(
      {{kOp, "input", arguments.input}, {kOp, "hidden", arguments.hidden}, {kOp, "cell_state", arguments.cell_state}});
  for (int64_t i = 0; i < arguments.weights.size(); ++i) {
    check_no_gradient({{kOp, "weights", arguments.weights[i]}});
  }
}

// The first row of each step, and behind them their number.
std::vector<int64_t> first_rows(const Tensor& batch_sizes, int64_t rows) {
  const Checked checked{kOp, "batch_sizes", batch_sizes};
  checked.cpu();
  if (batch_sizes.dtype_code() != aoti_torch_dtype_int64()) {
    checked.fail("expected dtype int64, got ", torch_dtype_name(batch_sizes.dtype_code()));
  }
  if (batch_sizes.dims() != 1) checked.fail("expected one dimension, got shape ", batch_sizes.shape_text());
  std::vector<int64_t> first{0};
  int64_t before = rows;
  const auto* sizes = static_cast<const int64_t*>(batch_sizes.data());
  for (int64_t step = 0; step < batch_sizes.size(0); ++step) {
    const int64_t size = sizes[step * batch_sizes.stride(0)];
    if (size < 1 || size > before) {
      checked.fail("expected positive sizes that never grow and sum to the input's ", rows, " rows, got ", size,
                   " at step ", step);
    }
    before = size;
    first.push_back(first.back() + size);
  }
  if (first.back() != rows) checked.fail("expected a sum of ", rows, ", the input's rows, got ", first.back());
  return first;
}

Shape read_shape(const RecurrentArguments& arguments) {
  const Tensor& input = arguments.input;
  Shape shape{};
  shape.cell = parse_name(kOp, "cell", arguments.cell.text(), kCells);
  shape.units = arguments.hidden_size;
  shape.projected = arguments.proj_size != 0;
  shape.outputs = shape.projected ? arguments.proj_size : shape.units;
  shape.layers = arguments.num_layers;
  shape.directions = arguments.bidirectional ? 2 : 1;
  if (shape.units < 1) fail(kOp, "hidden_size", "expected at least 1, got ", shape.units);
  if (shape.layers < 1) fail(kOp, "num_layers", "expected at least 1, got ", shape.layers);
  if (arguments.proj_size < 0 || (shape.projected && shape.cell != RecurrentCell::lstm)) {
    fail(kOp, "proj_size", "expected 0, or a positive number for an lstm, got ", arguments.proj_size);
  }
  const Checked checked{kOp, "input", input};
  checked.cpu();
  const DType dtype = checked.dtype(kFloating);
  shape.out_dtype = arguments.out_dtype ? parse_dtype(kOp, "out_dtype", *arguments.out_dtype, kFloating) : dtype;
  shape.packed = static_cast<bool>(arguments.batch_sizes);
  if (input.dims() != (shape.packed ? 2 : 3)) {
    checked.fail("expected ", shape.packed ? "two dimensions [rows, features] with batch_sizes" : "three dimensions",
                 ", got shape ", input.shape_text());
  }
  if (shape.packed) {
    if (arguments.batch_first) fail(kOp, "batch_first", "expected False with batch_sizes");
    if (!arguments.hidden) fail(kOp, "hidden", "expected a tensor with batch_sizes, got None");
    shape.first_row = first_rows(arguments.batch_sizes, input.size(0));
    shape.rows = input.size(0);
    shape.steps = arguments.batch_sizes.size(0);
    shape.batch = shape.steps == 0 ? arguments.hidden.size(1) : shape.first_row[1];
  } else {
    shape.batch_dim = arguments.batch_first ? 0 : 1;
    shape.batch = input.size(shape.batch_dim);
    shape.steps = input.size(1 - shape.batch_dim);
    shape.rows = shape.batch * shape.steps;
  }
  return shape;
}

// A state [layers * directions, batch, features] that was given, contiguous.
void read_state(const char* name, const Shape& shape, int64_t features, Tensor* state) {
  if (!*state) return;
  const Checked checked{kOp, name, *state};
  checked.cpu();
  checked.dtype(kFloating);
  checked.shape({shape.layers * shape.directions, shape.batch, features});
  if (!state->is_contiguous()) *state = state->contiguous_copy();
}

// Of a tensor that was checked, or f32 where there is none.
DType dtype_of(const Tensor& tensor) {
  return tensor ? dtype_from_torch(tensor.dtype_code()).value_or(DType::f32) : DType::f32;
}

const void* part_of(const Tensor& state, int64_t index, int64_t elements) {
  if (!state) return nullptr;
  return static_cast<const uint8_t*>(state.data()) + index * elements * dtype_size(dtype_of(state));
}

int64_t tensors_of_a_direction(const RecurrentArguments& arguments, const Shape& shape) {
  return 2 + (arguments.bias ? 2 : 0) + (shape.projected ? 1 : 0);
}

// Weights and biases of one direction of one layer, in the order of torch's flat weights.
RecurrentDirection read_direction(RecurrentArguments* arguments, const Shape& shape, int64_t index,
                                  int64_t in_features) {
  const int64_t gates = recurrent_gate_count(shape.cell);
  const int64_t sums = round_up(shape.units, kRecurrentBlock) * gates;
  Tensors& weights = arguments->weights;
  int64_t next = index * tensors_of_a_direction(*arguments, shape);
  const auto weight = [&](int64_t features, int64_t from) {
    return packed_weight(kOp, weights[next++], WeightKind::floating, false, features, from);
  };
  const PackedWeight input_weight = weight(sums, in_features), hidden_weight = weight(sums, shape.outputs);
  ColumnVector input_bias, hidden_bias;
  if (arguments->bias) {
    input_bias = column_vector(kOp, "weights", &weights[next++], gates * shape.units);
    hidden_bias = column_vector(kOp, "weights", &weights[next++], gates * shape.units);
  }
  RecurrentDirection direction{input_weight, hidden_weight, hidden_weight, input_bias, hidden_bias, nullptr,
                               nullptr,      DType::f32,    DType::f32,    nullptr,    nullptr};
  if (shape.projected) direction.projection = weight(shape.outputs, shape.units);
  return direction;
}

// Where the input of a layer lies: as the caller gave it, or as the layer before has left it.
struct LayerInput {
  const void* data;
  DType dtype;
  int64_t features, row_stride, step_stride;
};

LayerInput first_input(Tensor* input, const Shape& shape) {
  const int64_t last = input->dims() - 1;
  if (input->size(last) > 1 && input->stride(last) != 1) *input = input->contiguous_copy();
  const DType dtype = dtype_of(*input);
  if (shape.packed) return {input->data(), dtype, input->size(last), input->stride(0), 0};
  return {input->data(), dtype, input->size(last), input->stride(shape.batch_dim), input->stride(1 - shape.batch_dim)};
}

struct Results {
  Tensor out, hidden, cell;
};

Results empty_results(const Tensor& input, const Shape& shape) {
  const bool lstm = shape.cell == RecurrentCell::lstm;
  const int64_t width = shape.directions * shape.outputs, states = shape.layers * shape.directions;
  const int64_t plain[3] = {input.size(0), input.size(1), width}, packed[2] = {input.size(0), width};
  const int64_t hidden[3] = {states, shape.batch, shape.outputs};
  const int64_t cell[3] = {states, shape.batch, shape.units}, no_elements = 0;
  return {Tensor::empty(shape.packed ? packed : plain, input.dims(), shape.out_dtype),
          Tensor::empty(hidden, 3, shape.out_dtype),
          lstm ? Tensor::empty(cell, 3, shape.out_dtype) : Tensor::empty(&no_elements, 1, shape.out_dtype)};
}

// The weights and states of a layer's directions.
std::vector<RecurrentDirection> read_directions(RecurrentArguments* arguments, const Shape& shape, int64_t layer,
                                                int64_t in_features, const Results& results) {
  const int64_t hidden = shape.batch * shape.outputs, cell = shape.batch * shape.units;
  const int64_t size = dtype_size(shape.out_dtype);
  std::vector<RecurrentDirection> directions;
  for (int64_t index = layer * shape.directions; index < (layer + 1) * shape.directions; ++index) {
    RecurrentDirection direction = read_direction(arguments, shape, index, in_features);
    direction.first_hidden_dtype = dtype_of(arguments->hidden);
    direction.first_hidden = part_of(arguments->hidden, index, hidden);
    direction.first_cell_dtype = dtype_of(arguments->cell_state);
    direction.first_cell = part_of(arguments->cell_state, index, cell);
    direction.last_hidden = static_cast<uint8_t*>(results.hidden.mutable_data()) + index * hidden * size;
    if (shape.cell == RecurrentCell::lstm) {
      direction.last_cell = static_cast<uint8_t*>(results.cell.mutable_data()) + index * cell * size;
    }
    directions.push_back(direction);
  }
  return directions;
}

RecurrentCall layer_call(const Shape& shape, const LayerInput& input) {
  RecurrentCall call{};
  call.cell = shape.cell;
  call.projected = shape.projected;
  call.units = shape.units;
  call.outputs = shape.outputs;
  call.steps = shape.steps;
  call.batch = shape.batch;
  call.first_row = shape.packed ? shape.first_row.data() : nullptr;
  call.input = input.data;
  call.input_dtype = input.dtype;
  call.input_row_stride = input.row_stride;
  call.input_step_stride = input.step_stride;
  call.out_dtype = shape.out_dtype;
  call.directions = static_cast<int>(shape.directions);
  call.product = run_gemm;
  return call;
}

void run_layers(RecurrentArguments* arguments, const Shape& shape, const Results& results) {
  const int64_t width = shape.directions * shape.outputs;
  const int64_t between[2] = {shape.rows, width};
  LayerInput input = first_input(&arguments->input, shape);
  Tensor former;  // what the layer before has left
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    RecurrentCall call = layer_call(shape, input);
    const bool last = layer + 1 == shape.layers;
    Tensor made = last ? Tensor() : Tensor::empty(between, 2, shape.out_dtype);
    call.out = last ? results.out.mutable_data() : made.mutable_data();
    call.out_row_stride = last && !shape.packed ? results.out.stride(shape.batch_dim) : width;
    call.out_step_stride = last && !shape.packed ? results.out.stride(1 - shape.batch_dim) : shape.batch * width;
    const std::vector<RecurrentDirection> directions =
        read_directions(arguments, shape, layer, input.features, results);
    call.direction = directions.data();
    if (shape.rows > 0) xopt::recurrent(call);
    input = {call.out, shape.out_dtype, width, call.out_row_stride, call.out_step_stride};
    former = std::move(made);
  }
}

void recurrent(StableIValue* stack, uint64_t, uint64_t) {
  RecurrentArguments arguments{Stack(stack)};
  check_gradients(arguments);
  const Shape shape = read_shape(arguments);
  if (arguments.cell_state && shape.cell != RecurrentCell::lstm) {
    fail(kOp, "cell_state", "expected None for a cell other than lstm, got a tensor");
  }
  read_state("hidden", shape, shape.outputs, &arguments.hidden);
  read_state("cell_state", shape, shape.units, &arguments.cell_state);
  const int64_t expected = shape.layers * shape.directions * tensors_of_a_direction(arguments, shape);
  if (arguments.weights.size() != expected) {
    fail(kOp, "weights", "expected ", expected, " tensors, got ", arguments.weights.size());
  }
  if (shape.batch > 0 && shape.steps == 0) fail(kOp, "input", "expected at least one time step, got 0");
  Results results = empty_results(arguments.input, shape);
  run_layers(&arguments, shape, results);
  return_tensor(stack, 0, std::move(results.out));
  return_tensor(stack, 1, std::move(results.hidden));
  return_tensor(stack, 2, std::move(results.cell));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "recurrent(Tensor input, Tensor[] weights, Tensor? hidden=None, Tensor? cell_state=None, "
      "Tensor? batch_sizes=None, *, str cell, int hidden_size, int proj_size=0, int num_layers=1, bool bias=True, "
      "bool bidirectional=False, bool batch_first=False, ScalarType? out_dtype=None) "
      "-> (Tensor out, Tensor last_hidden, Tensor last_cell)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("recurrent", &recurrent); }

}  // namespace xopt::ops
