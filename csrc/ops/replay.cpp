// See replay.h.
#include "ops/replay.h"

#include <algorithm>
#include <cstring>

#include "ops/conv_bands.h"
#include "runtime/replays.h"

namespace xopt::ops {
namespace {

// What sizes_of says of a tensor: its dimensions, dtype and device, then sizes and strides.
constexpr size_t kFixed = 3;
size_t length_of(int64_t dims) { return kFixed + 2 * static_cast<size_t>(dims); }

// Calls same(tensor, begin, end) for each tensor's part of two lists that sizes_of has made; false where that says so, or
// where they are of other threads or tensors.
template <class Same>
bool compare_tensors(const std::vector<int64_t>& one, const std::vector<int64_t>& other, const Same& same) {
  if (one.size() != other.size() || one[0] != other[0]) return false;
  size_t tensor = 0;
  for (size_t begin = 1; begin < one.size(); ++tensor) {
    if (!std::equal(&one[begin], &one[begin] + kFixed, &other[begin])) return false;
    const size_t end = begin + length_of(one[begin]);
    if (!same(tensor, begin + kFixed, end)) return false;
    begin = end;
  }
  return true;
}

}  // namespace

std::vector<bool> varying(const std::vector<int64_t>& one, const std::vector<int64_t>& other) {
  std::vector<bool> varies;
  const auto note = [&](size_t, size_t begin, size_t end) {
    varies.push_back(!std::equal(one.begin() + static_cast<std::ptrdiff_t>(begin),
                                 one.begin() + static_cast<std::ptrdiff_t>(end),
                                 other.begin() + static_cast<std::ptrdiff_t>(begin)));
    return true;
  };
  return compare_tensors(one, other, note) ? varies : std::vector<bool>();
}

std::vector<int64_t> shape_of(const Tensor& result) {
  if (!result) return {};
  std::vector<int64_t> shape{result.dtype_code()};
  shape.insert(shape.end(), result.sizes(), result.sizes() + result.dims());
  shape.insert(shape.end(), result.strides(), result.strides() + result.dims());
  return shape;
}

std::vector<int64_t> sizes_of(const Tensors& tensors, int64_t threads) {
  std::vector<int64_t> sizes;
  sizes.reserve(static_cast<size_t>(tensors.size()) * length_of(4) + 1);
  sizes.push_back(threads);
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    sizes.push_back(tensor.dims());
    sizes.push_back(tensor.dtype_code());
    sizes.push_back(tensor.on_cpu() ? 1 : 0);
    for (int64_t dim = 0; dim < tensor.dims(); ++dim) {
      sizes.push_back(tensor.size(dim));
      sizes.push_back(tensor.stride(dim));
    }
  }
  return sizes;
}

std::vector<const uint8_t*> data_of(const Tensors& tensors) {
  std::vector<const uint8_t*> data(static_cast<size_t>(tensors.size()));
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<const uint8_t*>(tensors[static_cast<int64_t>(i)].data());
  }
  return data;
}

// ---- Recordings ------------------------------------------------------------------------------------------------------

std::shared_ptr<Recordings> new_recordings() { return std::make_shared<Recordings>(); }

std::shared_ptr<const Recording> Recordings::find(const std::vector<int64_t>& sizes,
                                                  const std::vector<const uint8_t*>& tensors) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::shared_ptr<const Recording>& recording : all_) {
    if (recording->is_of(sizes) && recording->fits(tensors)) return recording;
  }
  return nullptr;
}

bool Recordings::come_again(const std::vector<int64_t>& sizes) {
  uint64_t hash = 14695981039346656037U;
  for (const int64_t size : sizes) hash = (hash ^ static_cast<uint64_t>(size)) * 1099511628211U;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(seen_.begin(), seen_.end(), hash) != seen_.end()) return true;
  seen_[next_] = hash;
  next_ = (next_ + 1) % seen_.size();
  return false;
}

std::shared_ptr<const Shapes> Recordings::run_like(const std::vector<int64_t>& sizes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!last_ || varying(last_->tensors, sizes).empty() || skipped_++ < to_skip_) return nullptr;
  skipped_ = 0;
  return last_;
}

Joins Recordings::joins(const PreparedCalls& prepared, const Tensors& tensors,
                        const std::vector<int64_t>& sizes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_known = last_ && last_->tensors == sizes;
  return is_known ? Joins(prepared, tensors, last_->results, apart_) : Joins();
}

void Recordings::keep_apart(const std::vector<size_t>& results) {
  const std::lock_guard<std::mutex> lock(mutex_);
  apart_.insert(apart_.end(), results.begin(), results.end());
}

void Recordings::ran(std::shared_ptr<const Shapes> run) {
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = std::move(run);
}

bool Recordings::add(std::shared_ptr<const Recording> recording) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!recording->varies.empty()) {
    const bool is_worth_it = recording->is_worth_it();
    to_skip_ = is_worth_it ? 0 : std::min(2 * to_skip_ + 1, kMostSkipped);
    if (!is_worth_it) return false;
  }
  if (all_.size() >= kMost) all_.clear();
  all_.push_back(std::move(recording));
  return true;
}

bool Recording::is_of(const std::vector<int64_t>& given) const {
  if (varies.empty()) return sizes == given;
  return compare_tensors(sizes, given, [&](size_t tensor, size_t begin, size_t end) {
    return varies[tensor] || std::equal(&sizes[begin], &sizes[begin] + (end - begin), &given[begin]);
  });
}

bool ImagesChoice::apart() const {
  const int64_t tries = tries_.load(std::memory_order_relaxed);
  if (tries < 2 * kTries) return tries % 2 != 0;
  return least_[1].load(std::memory_order_relaxed) < least_[0].load(std::memory_order_relaxed);
}

void ImagesChoice::took(bool apart, int64_t nanoseconds) {
  if (tries_.load(std::memory_order_relaxed) >= 2 * kTries) return;
  std::atomic<int64_t>& least = least_[apart ? 1 : 0];
  int64_t before = least.load(std::memory_order_relaxed);
  while (nanoseconds < before && !least.compare_exchange_weak(before, nanoseconds, std::memory_order_relaxed)) {
  }
  tries_.fetch_add(1, std::memory_order_relaxed);
}

const ImageGroup* Recording::group_at(size_t step) const {
  for (const ImageGroup& group : image_groups) {
    if (group.begin == step) return &group;
  }
  return nullptr;
}

bool Recording::is_worth_it() const {
  size_t noted = 0, others = 0;
  for (const RecordedStep& step : steps) {
    noted += step.noted.size();
    others += step.noted.empty() && !step.is_view ? step.end - step.begin : 0;
  }
  return noted >= others;
}

// The kernels will have pushed all headers out of the caches; they come back together.
bool Recording::fits(const std::vector<const uint8_t*>& tensors) const {
  for (const auto& [tensor, header] : packed) __builtin_prefetch(tensors[tensor]);
  for (const auto& [tensor, header] : packed) {
    if (reinterpret_cast<uintptr_t>(tensors[tensor]) % kReplayAlignment != 0) return false;
    if (std::memcmp(tensors[tensor], &header, sizeof(header)) != 0) return false;
  }
  return true;
}

// ---- Replay ----------------------------------------------------------------------------------------------------------

namespace {

// One after the other, where they are not run together any more: what one of them adds is the first one's input now, or
// is that no longer.
void run_apart(std::vector<ReadyConv> convs) {
  std::vector<Tensor> between;
  for (size_t i = 0; i < convs.size(); ++i) {
    ConvCall& call = convs[i].call;
    if (i > 0) call.input.data = convs[i].rows.data = between.back().data();
    if (i + 1 < convs.size()) {
      const Epilogue& e = call.epilogue;
      const int64_t bytes = call.images * output_positions(call.input) * e.out_row_stride * dtype_size(e.out_dtype);
      between.push_back(Tensor::empty(&bytes, 1, DType::u8));
      call.epilogue.out = between.back().mutable_data();
    }
    run_ready(convs[i]);
  }
}

}  // namespace

void run_again(std::vector<ReadyConv> convs, int64_t threads) {
  count_replayed_calls(static_cast<int64_t>(convs.size()));
  if (convs.size() == 1) {
    run_ready(convs.front());
  } else {
    PlannedConvs together(threads);
    for (const ReadyConv& conv : convs) together.add(conv);
    if (!together.run()) run_apart(std::move(convs));
  }
}

void RecordedStep::fetch() const {
  constexpr size_t kLine = 64, kLines = 16;
  for (const std::unique_ptr<NotedCall>& each : noted) {
    const char* call = reinterpret_cast<const char*>(each.get());
    for (size_t line = 0; line < kLines; ++line) __builtin_prefetch(call + line * kLine);
  }
}

void make_results(const RecordedStep& step, const Addresses& at) {
  for (const RecordedResult& made : step.results) {
    at.results[made.place] = Tensor::empty_strided(made.sizes.data(), made.strides.data(),
                                                   static_cast<int64_t>(made.sizes.size()), made.dtype);
  }
}

void replay(const RecordedStep& step, int64_t threads, const Addresses& at) {
  make_results(step, at);
  if (step.end - step.begin > 1) {
    std::vector<ReadyConv> convs;
    for (const std::unique_ptr<NotedCall>& noted : step.noted) {
      convs.push_back(static_cast<const NotedCallOf<ReadyConv>&>(*noted).with(at));
    }
    return run_again(std::move(convs), threads);
  }
  for (const std::unique_ptr<NotedCall>& noted : step.noted) noted->run(at);
  count_replayed_calls(static_cast<int64_t>(step.noted.size()));
}

}  // namespace xopt::ops
