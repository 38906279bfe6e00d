// See joins.h.
#include "ops/joins.h"

#include <algorithm>
#include <string_view>

#include "ops/images.h"

namespace xopt::ops {
namespace {

const Tensor*& wanted() {
  static thread_local const Tensor* place = nullptr;
  return place;
}

// Operators that write rows of an image with a gap between, and those that read them.
constexpr std::string_view kMakers[] = {"conv", "batch_norm", "pool", "adaptive_pool", "upsample", "combine", "concat"};
constexpr std::string_view kReaders[] = {"conv",     "batch_norm", "pool",   "adaptive_pool",
                                         "upsample", "combine",    "concat", "pointwise"};

template <size_t N>
bool is_any_of(const std::string& name, const std::string_view (&names)[N]) {
  return std::find(names, names + N, name) != names + N;
}

// A shape as shape_of tells it: the dtype, sizes and strides.
struct Image {
  explicit Image(const std::vector<int64_t>& shape)
      : dims(static_cast<int64_t>(shape.size() / 2)), sizes(shape.data() + 1), strides(sizes + dims) {}

  bool has_channels_last() const {
    if (dims < 4 || strides[1] != 1) return false;
    int64_t stride = sizes[1];
    for (int64_t dim = dims - 1; dim >= 0; --dim) {
      if (dim == 1) continue;
      if (sizes[dim] == 0 || strides[dim] != stride) return false;
      stride *= sizes[dim];
    }
    return true;
  }

  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

// Results that nothing but calls reads which take rows of an image with a gap between as they are.
std::vector<bool> results_that_may_be_parts(const PreparedCalls& prepared) {
  std::vector<bool> may(prepared.calls.size() * kMostResults);
  for (size_t call = 0; call < prepared.calls.size(); ++call) {
    may[call * kMostResults] = is_any_of(prepared.calls[call].name, kMakers);
  }
  for (const size_t result : prepared.returned) may[result] = false;
  for (const PreparedCall& call : prepared.calls) {
    const bool reads_rows = is_any_of(call.name, kReaders);
    each_result(call, [&](size_t read) { may[read] = may[read] && reads_rows; });
  }
  return may;
}

}  // namespace

WantedOutput::WantedOutput(const Tensor* place) : outer_(std::exchange(wanted(), place)) {}
WantedOutput::~WantedOutput() { wanted() = outer_; }

Tensor WantedOutput::take(const int64_t* sizes, int64_t dims, DType dtype) {
  const Tensor* place = std::exchange(wanted(), nullptr);
  const bool fits = place != nullptr && place->dims() == dims && std::equal(sizes, sizes + dims, place->sizes()) &&
                    place->dtype_code() == dtype_to_torch(dtype);
  return fits ? Tensor(place->share()) : Tensor::empty_channels_last(sizes, dims, dtype);
}

// From the last one on: what is joined may be a part itself.
Joins::Joins(const PreparedCalls& prepared, const Tensors& tensors, const std::vector<std::vector<int64_t>>& shapes,
             const std::vector<size_t>& apart)
    : wholes_(shapes.size(), kNone), places_(shapes.size()) {
  std::vector<bool> may_be_part = results_that_may_be_parts(prepared);
  for (const size_t result : apart) may_be_part[result] = false;
  for (size_t call = prepared.calls.size(); call-- > 0;) {
    if (prepared.calls[call].name == "concat") join(prepared, call, may_be_part, tensors, shapes);
  }
}

// Parts without a place of their own get theirs.
void Joins::join(const PreparedCalls& prepared, size_t call, const std::vector<bool>& may_be_part,
                 const Tensors& tensors, const std::vector<std::vector<int64_t>>& shapes) {
  const std::vector<PreparedArgument>& arguments = prepared.calls[call].arguments;
  const size_t result = call * kMostResults;
  const Image whole(shapes[result]);
  const int64_t dim = arguments.back().integer;
  if (!whole.has_channels_last() || (dim != 1 && dim != 1 - whole.dims)) return;
  const std::optional<DType> dtype = dtype_from_torch(static_cast<int32_t>(shapes[result][0]));
  if (!dtype) return;
  int64_t channel = 0;
  for (size_t i = 1; i + 1 < arguments.size(); ++i) {
    const auto part = static_cast<size_t>(arguments[i].integer);
    if (arguments[i].kind != PreparedArgument::Kind::result) {
      channel += tensors[arguments[i].integer].size(1);
      continue;
    }
    const Image image(shapes[part]);
    const bool is_alike = image.has_channels_last() && shapes[part][0] == shapes[result][0];
    if (may_be_part[part] && is_alike && wholes_[part] == kNone) {
      if (!places_[result]) {
        places_[result] = Tensor::empty_strided(whole.sizes, whole.strides, whole.dims, *dtype);
      }
      places_[part] = places_[result].view(image.sizes, places_[result].strides(), image.dims, channel);
      wholes_[part] = wholes_[result] == kNone ? result : wholes_[result];
    }
    channel += image.sizes[1];
  }
}

const Tensor* Joins::place_of(size_t result) const {
  return places_.empty() || !places_[result] ? nullptr : &places_[result];
}

bool Joins::is_part(size_t result, const Tensor& tensor) const {
  return whole_of(result) != kNone && tensor && tensor.data() == places_[result].data() &&
         std::equal(tensor.strides(), tensor.strides() + tensor.dims(), places_[result].strides());
}

}  // namespace xopt::ops
