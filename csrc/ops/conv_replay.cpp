// See conv_replay.h.
#include "ops/conv_replay.h"

#include <algorithm>
#include <cstring>

#include "ops/conv_bands.h"
#include "runtime/parallel.h"

namespace xopt::ops {
namespace {

// Places in conv's schema.
constexpr size_t kInput = 0, kPacked = 1, kBias = 3, kScale = 8, kOther = 13;

constexpr uintptr_t kAlignment = 64;  // of blocks' parts, and what kernels want of packed weights

const void* address(const Where& where, const ChainValues& values, const uint8_t* block) {
  switch (where.in) {
    case Where::In::nowhere:
      return nullptr;
    case Where::In::tensor:
      return static_cast<const uint8_t*>(values.tensors[static_cast<int64_t>(where.place)].data()) + where.bytes;
    case Where::In::result:
      return static_cast<const uint8_t*>(values.results[where.place].data()) + where.bytes;
    case Where::In::block:
      break;
  }
  return block + where.bytes;
}

// Whether an operand of a conv is its argument's tensor, and not a copy that was made of it; then `where` says which.
bool find(const PreparedCall& call, size_t argument, const void* data, const ChainValues& values, Where* where) {
  if (data == nullptr) return true;
  if (argument >= call.arguments.size()) return false;
  const PreparedArgument& given = call.arguments[argument];
  const bool is_result = given.kind == PreparedArgument::Kind::result;
  if (!is_result && given.kind != PreparedArgument::Kind::tensor) return false;
  const auto place = static_cast<size_t>(given.integer);
  *where = {is_result ? Where::In::result : Where::In::tensor, place, 0};
  if (given.is_part) {
    const Tensor& whole = values.tensors[given.integer];
    const std::optional<DType> dtype = dtype_from_torch(whole.dtype_code());
    where->bytes = dtype ? given.begin * whole.stride(0) * dtype_size(*dtype) : 0;
  }
  return address(*where, values, nullptr) == data;
}

int64_t result_bytes(const RecordedConv& recorded) {
  int64_t bytes = dtype_size(recorded.conv.call.epilogue.out_dtype);
  for (int64_t dim = 0; dim < recorded.dims; ++dim) bytes *= recorded.sizes[dim];
  return bytes;
}

// A result's place in the block, for the groups of convolutions while which somebody reads it.
struct Placed {
  size_t result, from, until;
  int64_t begin, end;
};

// The lowest place that is free all the time.
void place(std::vector<Placed>* all, size_t result, size_t from, size_t until, int64_t bytes) {
  std::vector<Placed> busy;
  for (const Placed& other : *all) {
    if (other.from <= until && from <= other.until) busy.push_back(other);
  }
  std::sort(busy.begin(), busy.end(), [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  int64_t begin = 0;
  for (const Placed& other : busy) {
    if (other.begin >= begin + bytes) break;
    begin = std::max(begin, other.end);
  }
  all->push_back({result, from, until, begin, begin + bytes});
}

}  // namespace

std::vector<int64_t> sizes_of(const Tensors& tensors, int64_t threads) {
  std::vector<int64_t> sizes;
  sizes.reserve(static_cast<size_t>(tensors.size()) * 8 + 1);
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

// ---- Recordings ------------------------------------------------------------------------------------------------------

std::shared_ptr<Recordings> new_recordings() { return std::make_shared<Recordings>(); }

std::shared_ptr<const Recording> Recordings::find(const std::vector<int64_t>& sizes, const Tensors& tensors) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::shared_ptr<const Recording>& recording : all_) {
    if (recording->sizes == sizes && recording->fits(tensors)) return recording;
  }
  return nullptr;
}

void Recordings::add(std::shared_ptr<const Recording> recording) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (all_.size() >= kMost) all_.clear();
  all_.push_back(std::move(recording));
}

// The kernels will have pushed all headers out of the caches; they come back together.
bool Recording::fits(const Tensors& tensors) const {
  for (const RecordedPart& part : parts) {
    for (const RecordedConv& recorded : part.convs) {
      if (recorded.conv.is_max_pool) continue;
      __builtin_prefetch(tensors[static_cast<int64_t>(recorded.packed.place)].data());
    }
  }
  for (const RecordedPart& part : parts) {
    for (const RecordedConv& recorded : part.convs) {
      if (recorded.conv.is_max_pool) continue;
      const void* packed = tensors[static_cast<int64_t>(recorded.packed.place)].data();
      if (reinterpret_cast<uintptr_t>(packed) % kAlignment != 0) return false;
      if (std::memcmp(packed, &recorded.header, sizeof(recorded.header)) != 0) return false;
    }
  }
  return true;
}

const RecordedPart* Recording::part_at(size_t begin) const {
  for (const RecordedPart& part : parts) {
    if (part.begin == begin) return &part;
  }
  return nullptr;
}

// ---- What is noted ---------------------------------------------------------------------------------------------------

void ConvRecorder::add(size_t begin, const std::vector<ReadyConv>& convs, const ChainValues& values) {
  const size_t last = begin + convs.size() - 1;
  for (size_t i = 0; i < convs.size(); ++i) {
    if (!note(begin + i, convs[i], i == 0, values)) return;
  }
  const Tensor& result = values.results[last * kMostResults];
  RecordedConv& recorded = *seen_[last].conv;
  recorded.out = {Where::In::result, last * kMostResults, 0};
  recorded.dims = result.dims();
  std::copy_n(result.sizes(), result.dims(), recorded.sizes);
  seen_[begin].together = convs.size();
}

bool ConvRecorder::note(size_t call, const ReadyConv& conv, bool reads_given, const ChainValues& values) {
  const PreparedCall& prepared = prepared_.calls[call];
  RecordedConv recorded{conv, {}, {}, {}, {}, {}, {}, {}};
  if (!conv.is_max_pool) {
    const PreparedArgument& packed = prepared.arguments[kPacked];
    if (packed.kind != PreparedArgument::Kind::tensor) return false;
    recorded.packed = {Where::In::tensor, static_cast<size_t>(packed.integer), 0};
    std::memcpy(&recorded.header, address(recorded.packed, values, nullptr), sizeof(recorded.header));
  }
  const auto found = [&](size_t argument, const void* data, Where* where) {
    return find(prepared, argument, data, values, where);
  };
  const Epilogue& e = conv.call.epilogue;
  const bool known = (!reads_given || found(kInput, conv.call.input.data, &recorded.input)) &&
                     found(kScale, e.scale.data, &recorded.scale) && found(kBias, e.bias.data, &recorded.bias) &&
                     found(kOther, e.other, &recorded.other);
  if (known) seen_[call].conv = std::make_unique<RecordedConv>(recorded);
  return known;
}

std::shared_ptr<const Recording> ConvRecorder::finish(std::vector<int64_t> sizes) const {
  auto recording = std::make_shared<Recording>();
  recording->sizes = std::move(sizes);
  for (size_t begin = 0, end = 0; begin < seen_.size(); begin = std::max(end, begin + 1)) {
    end = begin;
    while (end < seen_.size() && seen_[end].together > 0) end += seen_[end].together;
    if (end > begin) recording->parts.push_back(part_of(begin, end));
  }
  return recording;
}

RecordedPart ConvRecorder::part_of(size_t begin, size_t end) const {
  RecordedPart part;
  part.begin = begin;
  part.end = end;
  // For each call its group, and the last group that reads its result if nobody does after the part.
  std::vector<size_t> group_of, last_reader(end - begin, SIZE_MAX);
  for (size_t i = begin; i < end; ++i) {
    if (seen_[i].together > 0) part.ends.push_back(i - begin + seen_[i].together);
    part.convs.push_back(*seen_[i].conv);
    group_of.push_back(part.ends.size() - 1);
    for (const size_t result : prepared_.calls[i].unused_after) {
      const bool is_own = result >= begin * kMostResults && result % kMostResults == 0;
      if (is_own) last_reader[result / kMostResults - begin] = group_of.back();
    }
  }
  std::vector<Placed> placed;
  for (size_t group = 0; group < part.ends.size(); ++group) {
    const size_t last = part.ends[group] - 1;
    if (last_reader[last] == SIZE_MAX) continue;
    const int64_t bytes = round_up(result_bytes(part.convs[last]), static_cast<int64_t>(kAlignment));
    place(&placed, (begin + last) * kMostResults, group, last_reader[last], bytes);
  }
  for (const Placed& each : placed) {
    part.block_bytes = std::max(part.block_bytes, each.end);
    for (RecordedConv& conv : part.convs) {
      for (Where* where : {&conv.input, &conv.other, &conv.out}) {
        if (where->in == Where::In::result && where->place == each.result) *where = {Where::In::block, 0, each.begin};
      }
    }
  }
  return part;
}

// ---- Replay ----------------------------------------------------------------------------------------------------------

namespace {

ReadyConv ready(const RecordedConv& recorded, const ChainValues& values, const uint8_t* block) {
  ReadyConv conv = recorded.conv;
  const auto at = [&](const Where& where, const void* otherwise) {
    return where.in == Where::In::nowhere ? otherwise : address(where, values, block);
  };
  if (!conv.is_max_pool) conv.call.weight = PackedWeight(recorded.header, address(recorded.packed, values, block));
  conv.call.input.data = conv.rows.data = at(recorded.input, conv.call.input.data);
  Epilogue& e = conv.call.epilogue;
  e.scale.data = at(recorded.scale, nullptr);
  e.bias.data = at(recorded.bias, nullptr);
  e.other = at(recorded.other, nullptr);
  e.out = const_cast<void*>(at(recorded.out, e.out));
  return conv;
}

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

void run_group(const RecordedPart& part, size_t begin, size_t end, int64_t threads, const ChainValues& values,
               const uint8_t* block) {
  const RecordedConv& last = part.convs[end - 1];
  if (last.out.in == Where::In::result) {
    const DType dtype = last.conv.call.epilogue.out_dtype;
    values.results[last.out.place] = Tensor::empty_channels_last(last.sizes, last.dims, dtype);
  }
  if (end - begin == 1) return run_ready(ready(last, values, block));
  PlannedConvs together(threads);
  for (size_t i = begin; i < end; ++i) together.add(ready(part.convs[i], values, block));
  if (!together.run()) run_apart(together.convs());
}

}  // namespace

void replay(const RecordedPart& part, const PreparedCalls& prepared, int64_t threads, const ChainValues& values) {
  const Tensor memory = Tensor::empty(&part.block_bytes, 1, DType::u8);
  const auto* block = static_cast<const uint8_t*>(memory.data());
  const auto run = [&] {
    size_t begin = 0;
    for (const size_t end : part.ends) {
      run_group(part, begin, end, threads, values, block);
      for (; begin < end; ++begin) {
        for (const size_t unused : prepared.calls[part.begin + begin].unused_after) values.results[unused] = Tensor();
      }
    }
  };
  if (part.ends.size() > 1) return with_team(run);
  run();
}

}  // namespace xopt::ops
