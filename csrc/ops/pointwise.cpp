// xopt::pointwise: some steps of arithmetic on tensors that are broadcast to one shape, as one pass over memory.
#include "kernels/pointwise.h"

#include <iterator>

#include "kernels/each_activation.h"
#include "ops/broadcast.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "ops/text.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "pointwise";
constexpr int kMostInputs = PointwiseCall::kMostInputs, kMostSteps = PointwiseCall::kMostSteps;
constexpr const char* kNames[] = {"inputs[0]", "inputs[1]", "inputs[2]", "inputs[3]",
                                  "inputs[4]", "inputs[5]", "inputs[6]", "inputs[7]"};
static_assert(std::size(kNames) == kMostInputs && PointwiseCall::kDims == kBroadcastDims);

struct Known {
  PointwiseStep how;
  Activation activation;
  int operands;
  int numbers = 0;
};

constexpr Known activation(Activation of) {
  return {PointwiseStep::activation, of, 1, of == Activation::clamp ? 2 : of == Activation::leaky_relu ? 1 : 0};
}
constexpr Known plain(PointwiseStep how, int operands) { return {how, Activation::none, operands}; }

constexpr NamedValue<Known> kSteps[] = {
    {"add", plain(PointwiseStep::add, 2)},   {"sub", plain(PointwiseStep::sub, 2)},
    {"mul", plain(PointwiseStep::mul, 2)},   {"div", plain(PointwiseStep::div, 2)},
    {"abs", plain(PointwiseStep::abs, 1)},   {"sqrt", plain(PointwiseStep::sqrt, 1)},
    {"exp", plain(PointwiseStep::exp, 1)},   {"softplus", plain(PointwiseStep::softplus, 1)},
#define XOPT_ACTIVATION_STEP(NAME) {#NAME, activation(Activation::NAME)},
    XOPT_EACH_FUNCTION(XOPT_ACTIVATION_STEP)
#undef XOPT_ACTIVATION_STEP
};

float read_number(std::string_view text, std::string_view step) {
  double number = 0.0;
  if (!read(text, &number)) fail(kOp, "steps", "expected a number in '", step, "', got '", text, "'");
  return static_cast<float>(number);
}

// x0 is the first input, v0 what the first step has given; anything else is a number.
PointwiseCall::Operand read_operand(std::string_view text, std::string_view step, int inputs, int steps) {
  using In = PointwiseCall::Operand::In;
  const bool is_input = !text.empty() && text.front() == 'x';
  if (!is_input && (text.empty() || text.front() != 'v')) return {In::number, 0, read_number(text, step)};
  int place = -1;
  const int count = is_input ? inputs : steps;
  if (!read(text.substr(1), &place) || place < 0 || place >= count) {
    fail(kOp, "steps", "expected one of ", count, is_input ? " inputs" : " steps before it", " in '", step, "', got '",
         text, "'");
  }
  return {is_input ? In::input : In::step, static_cast<uint8_t>(place), 0.0F};
}

// "mul:x0:1.5;silu:v0;add:v1:x1"
void read_steps(std::string_view text, PointwiseCall* call) {
  while (!text.empty() || call->step_count == 0) {
    const std::string_view whole = take(&text, ';');
    if (call->step_count == kMostSteps) fail(kOp, "steps", "expected at most ", kMostSteps, " steps, got more");
    std::string_view rest = whole;
    const Known known = parse_name(kOp, "steps", take(&rest, ':'), kSteps);
    PointwiseCall::Step step{known.how, known.activation, {}, 0.0F, 0.0F};
    for (int i = 0; i < known.operands; ++i) {
      step.operands[i] = read_operand(take(&rest, ':'), whole, call->input_count, call->step_count);
    }
    for (int i = 0; i < known.numbers; ++i) (i == 0 ? step.alpha : step.beta) = read_number(take(&rest, ':'), whole);
    if (!rest.empty()) fail(kOp, "steps", "expected nothing more in '", whole, "', got '", rest, "'");
    call->steps[call->step_count++] = step;
  }
}

void run(const PointwiseCall& call) {
  static Kernel<PointwiseFn> kernel("pointwise", "f32");
  kernel(call);
}

struct PointwiseArguments {
  explicit PointwiseArguments(Stack stack)
      : inputs(stack.tensors()), steps(stack.string()), out_dtype(stack.optional_dtype_code()) {}

  Tensors inputs;
  String steps;
  std::optional<int32_t> out_dtype;
};

// Sizes of the result and its order in memory, which is that of the inputs' sum, one after the other.
Dims broadcast_all(const Tensors& inputs, const Lying (&parts)[kMostInputs], Dims* order) {
  Lying all = parts[0];
  *order = order_of(all, all, all.sizes);
  for (int64_t i = 1; i < inputs.size(); ++i) {
    Dims sizes;
    if (!broadcast(all.sizes, parts[i].sizes, &sizes)) {
      fail(kOp, kNames[i], "expected a shape that goes with those before it, got ", inputs[i].shape_text());
    }
    *order = order_of(all, parts[i], sizes);
    all = Lying::in_order(sizes, *order);
  }
  return all.sizes;
}

Tensor pointwise(Stack stack) {
  const PointwiseArguments arguments{stack};
  const Tensors& inputs = arguments.inputs;
  if (inputs.size() < 1 || inputs.size() > kMostInputs) {
    fail(kOp, "inputs", "expected 1 to ", kMostInputs, " tensors, got ", inputs.size());
  }
  PointwiseCall call{};
  call.input_count = static_cast<int>(inputs.size());
  Lying parts[kMostInputs];
  int64_t* strides[kMostInputs];
  for (int i = 0; i < kMostInputs; ++i) {
    strides[i] = call.inputs[i].stride;
    if (i >= call.input_count) continue;
    const Checked checked{kOp, kNames[i], inputs[i]};
    check_no_gradient({checked});
    checked.in_place();
    call.inputs[i].dtype = checked.dtype(kFloating);
    parts[i] = Lying::of(checked);
  }
  read_steps(arguments.steps.text(), &call);
  call.out_dtype =
      arguments.out_dtype ? parse_dtype(kOp, "out_dtype", *arguments.out_dtype, kFloating) : call.inputs[0].dtype;
  Dims order;
  const Dims sizes = broadcast_all(inputs, parts, &order);
  Tensor out = Tensor::empty_in_order(sizes.values, sizes.count, call.out_dtype, order.values);
  if (out.numel() == 0) return out;
  set_loops(parts, call.input_count, sizes, order, call.size, strides);
  for (int i = 0; i < call.input_count; ++i) call.inputs[i].data = inputs[i].data();
  call.out = out.mutable_data();
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    for (int i = 0; i < call.input_count; ++i) noted->reads(call.inputs[i].data, inputs[i]);
    noted->writes(call.out, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &pointwise);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("pointwise(Tensor[] inputs, str steps, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("pointwise", &boxed<pointwise>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("pointwise", &on_xpu<boxed<pointwise>, First::list>); }

}  // namespace xopt::ops
