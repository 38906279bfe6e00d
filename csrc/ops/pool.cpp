// xopt::pool and xopt::adaptive_pool: the largest value, the mean or the Euclidean norm of windows over 1 to 3 spatial
// dimensions, with the channels last in memory. The latter's windows are as many as the caller wants.
#include "kernels/pool.h"

#include "ops/conv_bands.h"
#include "ops/images.h"
#include "ops/joins.h"
#include "ops/prepared.h"
#include "runtime/registry.h"
#include "tiles/layout.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "pool";
constexpr const char* kAdaptive = "adaptive_pool";
constexpr NamedValue<Pool> kKinds[] = {{"max", Pool::max}, {"average", Pool::average}, {"norm", Pool::norm}};

void run(const PoolCall& call) {
  static Kernel<PoolFn> kernel("pool", "f32");
  kernel(call);
}

struct PoolArguments {
  explicit PoolArguments(Stack stack)
      : input(stack.tensor()),
        kind(stack.string()),
        kernel(stack.integers()),
        stride(stack.integers()),
        padding(stack.integers()),
        dilation(stack.integers()),
        ceil_mode(stack.boolean()),
        count_include_pad(stack.boolean()),
        divisor(stack.integer()) {}

  Tensor input;
  String kind;
  Integers kernel, stride, padding, dilation;
  bool ceil_mode, count_include_pad;
  int64_t divisor;
};

// As torch counts them: with ceil_mode also a last window that hangs over, if it begins inside or in the padding before.
int64_t output_size(const PoolArguments& arguments, int64_t i, int64_t size) {
  const int64_t padding = arguments.padding[i], stride = arguments.stride[i];
  int64_t extent = 0;
  if (__builtin_mul_overflow(arguments.dilation[i], arguments.kernel[i] - 1, &extent)) extent = INT64_MAX;
  const int64_t free = size + 2 * padding - extent - 1;
  int64_t out = free >= 0 ? free / stride + 1 : 0;
  if (arguments.ceil_mode && free > -stride) {
    out = (free + stride - 1) / stride + 1;
    if ((out - 1) * stride >= size + padding) --out;
  }
  if (out < 1 || size < 1) {
    fail(kOp, "input", "expected at least ", extent + 1, " elements, what the window spans, along spatial dimension ",
         i, ", got ", size + 2 * padding, " with padding");
  }
  return out;
}

PoolCall pool_call(const PoolArguments& arguments) {
  const Tensor& input = arguments.input;
  const int64_t dims = input.dims() - 2;
  check_integers(kOp, "kernel_size", arguments.kernel, dims, 1);
  check_integers(kOp, "stride", arguments.stride, dims, 1);
  check_integers(kOp, "padding", arguments.padding, dims, 0);
  check_integers(kOp, "dilation", arguments.dilation, dims, 1);
  PoolCall call{};
  call.kind = parse_name(kOp, "kind", arguments.kind.text(), kKinds);
  call.images = input.size(0);
  call.input.channels = input.size(1);
  call.counts_padding = arguments.count_include_pad;
  call.divisor = arguments.divisor;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 3 - dims + i;
    int64_t span = 0;
    const bool fits = !__builtin_mul_overflow(arguments.dilation[i], arguments.kernel[i] - 1, &span);
    if (fits && 2 * arguments.padding[i] > span + 1) {
      fail(kOp, "padding", "expected at most half of what the window spans, ", span + 1, ", got ",
           arguments.padding.text());
    }
    if (call.kind != Pool::max && arguments.dilation[i] != 1) {
      fail(kOp, "dilation", "expected 1 for an average or a norm, got ", arguments.dilation.text());
    }
    call.input.in[at] = input.size(2 + i);
    call.input.kernel[at] = arguments.kernel[i];
    call.input.stride[at] = arguments.stride[i];
    call.input.padding[at] = call.padding_after[at] = arguments.padding[i];
    call.input.dilation[at] = arguments.dilation[i];
    call.input.out[at] = output_size(arguments, i, input.size(2 + i));
  }
  return call;
}

DType check_input(const Checked& input) {
  check_no_gradient({input});
  input.in_place();
  const DType dtype = input.dtype(kFloating);
  if (input.tensor.dims() < 3 || input.tensor.dims() > 5) {
    input.fail("expected 3 to 5 dimensions [images, channels, spatial...], got shape ", input.tensor.shape_text());
  }
  return dtype;
}

// As a call without weights, for bands.
ReadyConv as_conv(const PoolCall& pool) {
  PackedHeader header;
  packed_header_init(&header, DType::f32, 0, 0, false, false);
  Epilogue epilogue;
  epilogue.out = pool.out;
  epilogue.out_dtype = pool.input.dtype;
  epilogue.out_row_stride = pool.out_row_stride;
  ReadyConv conv{{pool.input, pool.images, 1, pool.input.channels, PackedWeight(header, nullptr), epilogue}};
  conv.is_max_pool = true;
  return conv;
}

void note(NotedCall* noted, const void* const& from, void* const& to, const Tensor& input) {
  if (noted == nullptr) return;
  noted->reads(from, input);
  noted->writes(to, 0);
}

// The output of a call whose output positions are known.
Tensor pooled(Tensor* input, DType dtype, PoolCall* call) {
  int64_t sizes[5] = {call->images, call->input.channels};
  for (int64_t i = 2; i < input->dims(); ++i) sizes[i] = call->input.out[5 - input->dims() + i - 2];
  Tensor out = WantedOutput::take(sizes, input->dims(), dtype);
  call->out = out.mutable_data();
  call->out_row_stride = out.stride(out.dims() - 1);
  if (out.numel() > 0) {
    set_input(input, &call->input);
    if (PlannedConvs* planned = PlannedConvs::current()) {
      const ReadyConv conv = as_conv(*call);  // nothing but max pooling is planned (may_band in prepared.cpp)
      note(note_call(&run_ready, conv), conv.call.input.data, conv.call.epilogue.out, *input);
      planned->add(conv);
      planned->keep(std::move(*input));
    } else {
      run(*call);
      note(note_call(&run, *call), call->input.data, call->out, *input);
    }
  }
  return out;
}

Tensor pool(Stack stack) {
  PoolArguments arguments{stack};
  const DType dtype = check_input({kOp, "input", arguments.input});
  PoolCall call = pool_call(arguments);
  return pooled(&arguments.input, dtype, &call);
}

const ChainableOp chainable("pool", &pool);

struct AdaptiveArguments {
  explicit AdaptiveArguments(Stack stack)
      : input(stack.tensor()), kind(stack.string()), output_size(stack.integers()) {}

  Tensor input;
  String kind;
  Integers output_size;
};

Tensor adaptive_pool(Stack stack) {
  AdaptiveArguments arguments{stack};
  Tensor& input = arguments.input;
  const DType dtype = check_input({kAdaptive, "input", input});
  const int64_t dims = input.dims() - 2;
  check_integers(kAdaptive, "output_size", arguments.output_size, dims, 1);
  PoolCall call{};
  call.kind = parse_name(kAdaptive, "kind", arguments.kind.text(), kKinds);
  call.images = input.size(0);
  call.input.channels = input.size(1);
  call.adaptive = true;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 3 - dims + i, size = input.size(2 + i), out = arguments.output_size[i];
    if (size < 1) {
      fail(kAdaptive, "input", "expected elements along spatial dimension ", i, ", got shape ", input.shape_text());
    }
    call.input.in[at] = size;
    call.input.out[at] = out;
    call.input.kernel[at] = ceil_div(size, out);
  }
  return pooled(&input, dtype, &call);
}

const ChainableOp chainable_adaptive("adaptive_pool", &adaptive_pool);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "pool(Tensor input, str kind, *, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
      "bool ceil_mode=False, bool count_include_pad=True, int divisor=0) -> Tensor");
  library.def("adaptive_pool(Tensor input, str kind, int[] output_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("pool", &boxed<pool>);
  library.impl("adaptive_pool", &boxed<adaptive_pool>);
}

STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) {
  library.impl("pool", &on_xpu<boxed<pool>>);
  library.impl("adaptive_pool", &on_xpu<boxed<adaptive_pool>>);
}

}  // namespace xopt::ops
