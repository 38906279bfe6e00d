// xopt::upsample: nearest and linear interpolation over 1 to 3 spatial dimensions, with the channels last in memory.
//
// Places are found as torch finds them. For the nearest that means in fp32, where rounding decides which one it is; what
// is mixed linearly changes steadily with its place, so there more digits only are more exact.
#include "kernels/upsample.h"

#include <cmath>
#include <vector>

#include "ops/images.h"
#include "ops/joins.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "upsample";

enum class Mode : uint8_t { nearest, nearest_exact, linear };
constexpr NamedValue<Mode> kModes[] = {
    {"nearest", Mode::nearest}, {"nearest-exact", Mode::nearest_exact}, {"linear", Mode::linear}};

struct UpsampleArguments {
  explicit UpsampleArguments(Stack stack)
      : input(stack.tensor()),
        size(stack.integers()),
        mode(stack.string()),
        align_corners(stack.boolean()),
        scale{stack.optional_number(), stack.optional_number(), stack.optional_number()} {}

  Tensor input;
  Integers size;
  String mode;
  bool align_corners;
  std::optional<double> scale[3];
};

// Places along a dimension of `in` elements for `out` output positions.
using Places = std::vector<Between>;

// A dimension whose size stays, whatever the scale. (But torch goes by the scale in images of one dimension.)
Places same_places(int64_t size) {
  Places places(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) places[static_cast<size_t>(i)] = {{i, i}, {1.0F, 0.0F}};
  return places;
}

Places nearest_places(int64_t in, int64_t out, std::optional<double> scale, bool exact) {
  const float step = scale ? static_cast<float>(1.0 / *scale) : static_cast<float>(in) / static_cast<float>(out);
  Places places(static_cast<size_t>(out));
  for (int64_t i = 0; i < out; ++i) {
    const float place = exact ? static_cast<float>((static_cast<double>(i) + 0.5) * static_cast<double>(step))
                              : static_cast<float>(i) * step;
    const auto nearest = static_cast<int64_t>(std::floor(place));
    places[static_cast<size_t>(i)].place[0] = nearest < in ? nearest : in - 1;
  }
  return places;
}

Places linear_places(int64_t in, int64_t out, std::optional<double> scale, bool align_corners) {
  double step = scale ? 1.0 / *scale : static_cast<double>(in) / static_cast<double>(out);
  if (align_corners) step = out > 1 ? static_cast<double>(in - 1) / static_cast<double>(out - 1) : 0.0;
  Places places(static_cast<size_t>(out));
  for (int64_t i = 0; i < out; ++i) {
    const double at = static_cast<double>(i);
    const double place = std::fmax(0.0, align_corners ? step * at : step * (at + 0.5) - 0.5);
    const auto whole = static_cast<int64_t>(place);
    const int64_t first = whole < in ? whole : in - 1;
    const double weight = std::fmin(1.0, place - static_cast<double>(first));
    places[static_cast<size_t>(i)] = {{first, first + 1 < in ? first + 1 : first},
                                      {static_cast<float>(1.0 - weight), static_cast<float>(weight)}};
  }
  return places;
}

// A call whose places are still to be found.
struct ReadyUpsample {
  UpsampleCall call;
  Mode mode;
  bool align_corners;
  bool keeps_size[3];  // for places as well
  std::optional<double> scale[3];
};

void run(const ReadyUpsample& ready) {
  static Kernel<UpsampleFn> kernel("upsample", "f32");
  UpsampleCall call = ready.call;
  Places places[3];
  for (int i = 0; i < 3; ++i) {
    const int64_t in = call.input.in[i], out = call.input.out[i];
    if (ready.keeps_size[i]) {
      places[i] = same_places(in);
    } else if (ready.mode == Mode::linear) {
      places[i] = linear_places(in, out, ready.scale[i], ready.align_corners);
    } else {
      places[i] = nearest_places(in, out, ready.scale[i], ready.mode == Mode::nearest_exact);
    }
    call.places[i] = places[i].data();
  }
  kernel(call);
}

Tensor upsample(Stack stack) {
  UpsampleArguments arguments{stack};
  Tensor& input = arguments.input;
  const Checked checked{kOp, "input", input};
  check_no_gradient({checked});
  checked.in_place();
  const DType dtype = checked.dtype(kFloating);
  const int64_t dims = input.dims() - 2;
  if (dims < 1 || dims > 3) {
    checked.fail("expected 3 to 5 dimensions [images, channels, spatial...], got shape ", input.shape_text());
  }
  check_integers(kOp, "size", arguments.size, dims, 1);
  const Mode mode = parse_name(kOp, "mode", arguments.mode.text(), kModes);

  ReadyUpsample ready{{}, mode, arguments.align_corners, {true, true, true}, {}};
  UpsampleCall& call = ready.call;
  call.images = input.size(0);
  call.input.channels = input.size(1);
  int64_t sizes[5] = {call.images, call.input.channels};
  for (int64_t i = 0; i < 3; ++i) call.input.in[i] = call.input.out[i] = 1;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 3 - dims + i, in = input.size(2 + i), out = arguments.size[i];
    const std::optional<double> scale = ready.scale[at] = arguments.scale[at];
    if (in < 1) checked.fail("expected at least 1 element along spatial dimension ", i, ", got ", input.shape_text());
    if (scale && !(*scale > 0)) fail(kOp, "scale", "expected numbers above 0, got ", *scale);
    call.input.in[at] = in;
    call.input.out[at] = sizes[2 + i] = out;
    call.mixed[at] = mode == Mode::linear && in != out;
    ready.keeps_size[at] = in == out && (dims > 1 || mode == Mode::linear);
  }
  Tensor out = WantedOutput::take(sizes, input.dims(), dtype);
  if (out.numel() == 0) return out;
  call.out = out.mutable_data();
  call.out_row_stride = out.stride(out.dims() - 1);
  set_input(&input, &call.input);
  run(ready);
  if (NotedCall* noted = note_call(&run, ready)) {
    noted->reads(call.input.data, input);
    noted->writes(call.out, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &upsample);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "upsample(Tensor input, int[] size, str mode, *, bool align_corners=False, float? scale_d=None, "
      "float? scale_h=None, float? scale_w=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("upsample", &boxed<upsample>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("upsample", &on_xpu<boxed<upsample>>); }

}  // namespace xopt::ops
