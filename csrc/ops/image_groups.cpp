// See image_groups.h.
#include "ops/image_groups.h"

#include <algorithm>
#include <map>

#include "runtime/cpu.h"

namespace xopt::ops {
namespace {

const ReadyConv* as_conv(const NotedCall& noted) {
  const auto* call = dynamic_cast<const NotedCallOf<ReadyConv>*>(&noted);
  return call == nullptr ? nullptr : &call->noted();
}

// Whether a field of the call is the one that lies so far from its beginning.
template <class T>
bool is_field(const ReadyConv& conv, T* const& of_call, size_t field) {
  return reinterpret_cast<const uint8_t*>(&of_call) == reinterpret_cast<const uint8_t*>(&conv) + field;
}
bool is_out(const ReadyConv& conv, size_t field) { return is_field(conv, conv.call.epilogue.out, field); }

// Of an image, in the memory that a field of the call points to.
int64_t image_bytes(const ReadyConv& conv, size_t field) {
  const ConvCall& call = conv.call;
  const Epilogue& e = call.epilogue;
  const auto is = [&](const auto& of_call) { return is_field(conv, of_call, field); };
  if (is(call.input.data) || is(conv.rows.data)) return call.input.image_stride * dtype_size(call.input.dtype);
  if (is(e.out)) return output_positions(call.input) * e.out_row_stride * dtype_size(e.out_dtype);
  if (is(e.other)) return output_positions(call.input) * e.other_row_stride * dtype_size(e.other_dtype);
  return 0;
}

// Some images of a call; data that moves with them does so.
ReadyConv some_images(const NotedCallOf<ReadyConv>& noted, const Addresses& at, int64_t first, int64_t count) {
  ReadyConv conv = noted.with(at);
  for (const NotedCall::Pointer& pointer : noted.pointers) {
    if (pointer.where.in == Where::In::nowhere || pointer.stays) continue;
    const int64_t bytes = image_bytes(noted.noted(), pointer.offset) * first;
    const auto address = reinterpret_cast<uintptr_t>(at.of(pointer.apart) + bytes);
    std::memcpy(reinterpret_cast<uint8_t*>(&conv) + pointer.offset, &address, sizeof(address));
  }
  const int64_t positions = conv.call.input.in[0] * conv.call.input.in[1] * conv.call.input.in[2];
  if (conv.rows.inner_rows == conv.call.images * positions) conv.rows.inner_rows = count * positions;
  conv.call.images = count;
  return conv;
}

// Results that steps so far have written, by bytes of an image.
class WrittenResults {
 public:
  // Whether all that the step reads of them lies there image by image; then what it writes is one of them.
  bool add(const RecordedStep& step) {
    for (const bool writes : {false, true}) {
      for (const auto& noted : step.noted) {
        const ReadyConv& conv = *as_conv(*noted);
        for (const NotedCall::Pointer& pointer : noted->pointers) {
          if (pointer.where.in != Where::In::result || is_out(conv, pointer.offset) != writes) continue;
          const int64_t bytes = image_bytes(conv, pointer.offset);
          if (writes) of_.emplace(pointer.where.place, bytes);
          const auto found = of_.find(pointer.where.place);
          if (found != of_.end() && (found->second != bytes || pointer.where.bytes >= bytes)) return false;
        }
      }
    }
    return true;
  }

 private:
  std::map<size_t, int64_t> of_;
};

// Whether a step is nothing but convolutions, or pooling among them, of as many images; how many bytes it reads and writes,
// and those of its weights. 0 images: it is not, or they cannot be done apart.
struct ImagesOfStep {
  explicit ImagesOfStep(const RecordedStep& step) {
    for (const std::unique_ptr<NotedCall>& noted : step.noted) {
      const ReadyConv* conv = as_conv(*noted);
      if (conv == nullptr || !can_be_parted(*conv) || (images != 0 && images != conv->call.images)) {
        images = 0;
        return;
      }
      images = conv->call.images;
      weight_bytes += conv->call.weight.panels * conv->call.weight.panel_bytes;
      for (const NotedCall::Pointer& pointer : noted->pointers) {
        const bool is_input_again = is_field(*conv, conv->rows.data, pointer.offset);
        if (pointer.where.in == Where::In::nowhere || is_input_again) continue;
        bytes += images * image_bytes(*conv, pointer.offset);
      }
    }
  }

  int64_t images = 0, bytes = 0, weight_bytes = 0;

 private:
  static bool can_be_parted(const ReadyConv& conv) {
    const Epilogue& e = conv.call.epilogue;
    return e.positions == nullptr && !e.row_scale_per_row && !e.row_zero_point_per_row;
  }
};

// From a step on, up to the last that moves enough to be worth it, as far as all can be done apart and weights, which are
// read anew each time, come to little. In units of the L2 of all threads: what such a step moves, and what one moves of some
// images at most (of ResNet-50's stages 1 and 2 on two Granite Rapids cores, which move 77 and 39 MB a step of 16 images, 4
// images take the least time each; 2 take 1.15 times as long, 8 and 16 1.1).
ImageGroup group_from(const std::vector<RecordedStep>& steps, size_t begin, int64_t caches) {
  constexpr int64_t kWorthIt = 6, kAtOnce = 4, kWeightsShare = 4;
  ImageGroup group{begin, begin, ImagesOfStep(steps[begin]).images, 0};
  WrittenResults written;
  int64_t most = 0, moved = 0, weights = 0;
  for (size_t i = begin; i < steps.size(); ++i) {
    const ImagesOfStep step(steps[i]);
    if (step.images < 2 || step.images != group.images || !written.add(steps[i])) break;
    most = std::max(most, step.bytes);
    moved += step.bytes;
    weights += step.weight_bytes;
    const int64_t parts = std::min(group.images, ceil_div(most, kAtOnce * caches));
    if (step.bytes < kWorthIt * caches || weights * parts * kWeightsShare > moved) continue;
    group.end = i + 1;
    group.at_once = ceil_div(group.images, parts);
  }
  return group;
}

}  // namespace

std::vector<ImageGroup> image_groups(const std::vector<RecordedStep>& steps, int64_t threads) {
  std::vector<ImageGroup> groups;
  for (size_t begin = 0; begin < steps.size(); ++begin) {
    const ImageGroup group = group_from(steps, begin, l2_bytes() * threads);
    if (group.end < group.begin + 2) continue;
    groups.push_back(group);
    begin = group.end - 1;
  }
  return groups;
}

void replay_images(const RecordedStep& step, int64_t threads, const Addresses& at, int64_t first, int64_t count) {
  std::vector<ReadyConv> convs;
  for (const std::unique_ptr<NotedCall>& noted : step.noted) {
    convs.push_back(some_images(static_cast<const NotedCallOf<ReadyConv>&>(*noted), at, first, count));
  }
  run_again(std::move(convs), threads);
}

}  // namespace xopt::ops
