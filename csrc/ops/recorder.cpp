// See recorder.h.
#include "ops/recorder.h"

#include <algorithm>
#include <utility>

#include "ops/image_groups.h"
#include "runtime/parallel.h"

namespace xopt::ops {
namespace {

// From its first element to its last; 0 of dtypes that kernels know nothing of.
int64_t bytes_spanned(const Tensor& tensor) {
  const std::optional<DType> dtype = dtype_from_torch(tensor.dtype_code());
  return dtype ? elements_spanned(tensor.sizes(), tensor.strides(), tensor.dims()) * dtype_size(*dtype) : 0;
}

// A result's place in the block, for the steps while which somebody reads it.
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

Recorder::Recorder(const PreparedCalls& prepared, const Tensors& tensors, std::vector<int64_t> sizes,
                   std::shared_ptr<const Shapes> earlier, Joins joins)
    : prepared_(prepared),
      sizes_(std::move(sizes)),
      earlier_(std::move(earlier)),
      joins_(std::move(joins)),
      varies_(earlier_ ? varying(earlier_->tensors, sizes_) : std::vector<bool>()),
      seen_(prepared.calls.size()),
      results_(prepared.calls.size() * kMostResults),
      is_tensor_(results_.size()) {
  for (int64_t i = 0; i < tensors.size(); ++i) {
    tensors_.push_back({static_cast<const uint8_t*>(tensors[i].data()), bytes_spanned(tensors[i])});
  }
}

void Recorder::ran(size_t call, NotedCalls noted, const std::vector<Tensor>& results) {
  const PreparedCall& prepared = prepared_.calls[call];
  SeenCall seen{std::move(noted), !reads_what_varies(prepared), 1};
  for (size_t own = 0; own < prepared.results(); ++own) {
    const size_t place = call * kMostResults + own;
    seen.is_known &= see_result(place, results[place]);
  }
  if (prepared.is_view) {
    seen.is_known = seen.is_known && see_through(call);
  } else {
    seen.is_known &= !seen.noted.empty();
    for (const std::unique_ptr<NotedCall>& each : seen.noted) {
      for (NotedCall::Pointer& pointer : each->pointers) seen.is_known &= find(call, &pointer);
      for (NotedCall::Packed& packed : each->packed) seen.is_known &= find(call, &packed);
    }
  }
  seen_[call] = std::move(seen);
}

bool Recorder::reads_what_varies(const PreparedCall& call) const {
  if (!earlier_) return false;
  bool reads = false;
  each_value(call, [&](bool is_result, size_t place) {
    reads |= is_result ? results_[place].varies : static_cast<bool>(varies_[place]);
  });
  return reads;
}

bool Recorder::see_result(size_t place, const Tensor& result) {
  results_[place].varies = earlier_ && earlier_->results[place] != shape_of(result);
  if (!result) return false;
  SeenResult& seen = results_[place];
  seen.root = {Where::In::result, place, 0};
  seen.memory = {static_cast<const uint8_t*>(result.data()), bytes_spanned(result)};
  const std::optional<DType> dtype = dtype_from_torch(result.dtype_code());
  if (!dtype) return false;  // a view of a mask of booleans: each run gives it, for others to read
  seen.is_part = joins_.is_part(place, result);
  if (seen.is_part) {
    const size_t whole = joins_.whole_of(place);
    seen.root = {
        Where::In::result, whole,
        static_cast<const uint8_t*>(result.data()) - static_cast<const uint8_t*>(joins_.place_of(whole)->data())};
  }
  seen.like = {place,
               {result.sizes(), result.sizes() + result.dims()},
               {result.strides(), result.strides() + result.dims()},
               *dtype};
  return true;
}

// Of a call that gives a view, or a copy where there is no such view, which lies elsewhere.
bool Recorder::see_through(size_t call) {
  SeenResult& seen = results_[call * kMostResults];
  const PreparedArgument& given = prepared_.calls[call].arguments.front();
  const auto place = static_cast<size_t>(given.integer);
  const Memory& whole = given.kind == PreparedArgument::Kind::result ? results_[place].memory : tensors_[place];
  const Memory& part = seen.memory;
  if (part.bytes == 0 || part.data < whole.data || part.data + part.bytes > whole.data + whole.bytes) return false;
  seen.root = root_of(given, part.data);
  return true;
}

// Of a tensor or a result that is an argument: where something in it is.
Where Recorder::root_of(const PreparedArgument& argument, const uint8_t* data) const {
  const auto place = static_cast<size_t>(argument.integer);
  if (argument.kind == PreparedArgument::Kind::tensor) {
    return {Where::In::tensor, place, data - tensors_[place].data};
  }
  Where where = results_[place].root;
  where.bytes += data - results_[place].memory.data;
  return where;
}

bool Recorder::find(size_t call, NotedCall::Pointer* pointer) const {
  const auto* value = static_cast<const uint8_t*>(pointer->value);
  if (pointer->result >= 0) {
    const SeenResult& own = results_[call * kMostResults + static_cast<size_t>(pointer->result)];
    pointer->where = own.root;
    pointer->where.bytes += value - own.memory.data;
    return true;
  }
  if (pointer->argument < 0) return false;  // a copy that was made of an argument
  pointer->where = root_of(prepared_.calls[call].arguments[static_cast<size_t>(pointer->argument)], value);
  return true;
}

bool Recorder::find(size_t call, NotedCall::Packed* packed) const {
  if (packed->argument < 0) return false;
  const PreparedArgument& given = prepared_.calls[call].arguments[static_cast<size_t>(packed->argument)];
  packed->tensor = static_cast<size_t>(given.integer);
  return given.kind == PreparedArgument::Kind::tensor;
}

// ---- What becomes of it ----------------------------------------------------------------------------------------------

bool Recorder::is_known(size_t begin, size_t end) const {
  return std::all_of(seen_.begin() + static_cast<std::ptrdiff_t>(begin),
                     seen_.begin() + static_cast<std::ptrdiff_t>(end),
                     [](const SeenCall& seen) { return seen.is_known; });
}

// From the last on: a view that nobody needs as a tensor is none, and results are tensors where somebody does.
std::vector<RecordedStep> Recorder::steps() {
  std::vector<RecordedStep> steps;
  for (size_t begin = 0; begin < seen_.size(); begin += seen_[begin].together) {
    steps.emplace_back();
    steps.back().begin = begin;
    steps.back().end = begin + seen_[begin].together;
  }
  for (const size_t result : prepared_.returned) is_tensor_[result] = true;
  for (size_t i = steps.size(); i-- > 0;) {
    RecordedStep& step = steps[i];
    const bool is_view = prepared_.calls[step.begin].is_view;
    const bool is_known = this->is_known(step.begin, step.end);
    if (is_known && is_view && !is_tensor_[step.begin * kMostResults]) {
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
    } else if (is_known && !is_view) {
      take_noted(&step);
    } else {
      step.is_view = is_known && is_view;
      if (!step.is_view) expect_results(&step);
      for (size_t call = step.begin; call < step.end; ++call) {
        each_result(prepared_.calls[call], [&](size_t read) { is_tensor_[read] = true; });
      }
    }
  }
  return steps;
}

// Of a step that is run anew, in a recording for other sizes as well.
void Recorder::expect_results(RecordedStep* step) const {
  if (!earlier_) return;
  for (size_t place = step->begin * kMostResults; place < step->end * kMostResults; ++place) {
    const std::vector<int64_t>& shape = earlier_->results[place];
    if (!results_[place].varies && !shape.empty()) step->expected.emplace_back(place, shape);
  }
}

void Recorder::take_noted(RecordedStep* step) {
  const size_t first_own = step->begin * kMostResults, last_own = (step->end - 1) * kMostResults;
  for (size_t call = step->begin; call < step->end; ++call) {
    for (std::unique_ptr<NotedCall>& noted : seen_[call].noted) {
      // What lies between convolutions that are run together is theirs.
      for (NotedCall::Pointer& pointer : noted->pointers) {
        const Where& where = pointer.where;
        if (where.in == Where::In::result && where.place >= first_own && where.place < last_own) pointer.where = {};
      }
      step->noted.push_back(std::move(noted));
    }
  }
  for (size_t own = 0; own < kMostResults; ++own) {
    if (is_tensor_[last_own + own]) step->results.push_back(results_[last_own + own].like);
  }
}

std::shared_ptr<const Recording> Recorder::finish() {
  auto recording = std::make_shared<Recording>();
  recording->sizes = sizes_;
  recording->varies = varies_;
  recording->steps = steps();
  if (!parts_to_keep_apart().empty()) return nullptr;
  make_wholes_first(&recording->steps);
  for (const RecordedStep& step : recording->steps) {
    for (const std::unique_ptr<NotedCall>& noted : step.noted) {
      for (const NotedCall::Packed& packed : noted->packed)
        recording->packed.emplace_back(packed.tensor, packed.header);
    }
  }
  place_results(recording.get());
  return recording;
}

std::vector<size_t> Recorder::parts_to_keep_apart() const {
  std::vector<size_t> found;
  for (size_t result = 0; result < results_.size(); ++result) {
    if (!results_[result].is_part) continue;
    const size_t call = result / kMostResults, whole = joins_.whole_of(result) / kMostResults;
    if (is_tensor_[result] || !seen_[call].is_known || !seen_[whole].is_known) found.push_back(result);
  }
  return found;
}

// What is joined is a tensor before its first part is written.
void Recorder::make_wholes_first(std::vector<RecordedStep>* steps) {
  const auto writes = [](const RecordedStep& step, size_t result) {
    for (const std::unique_ptr<NotedCall>& noted : step.noted) {
      for (const NotedCall::Pointer& pointer : noted->pointers) {
        if (pointer.where.in == Where::In::result && pointer.where.place == result) return true;
      }
    }
    return false;
  };
  for (auto step = steps->begin(); step != steps->end(); ++step) {
    for (RecordedResult& made : std::exchange(step->results, {})) {
      const auto first =
          std::find_if(steps->begin(), step, [&](const RecordedStep& each) { return writes(each, made.place); });
      first->results.push_back(std::move(made));
    }
  }
}

// Of results that nobody reads before or after a group of steps, there is room for as many images as are done at a time.
// All others are wanted from the group's first step to its last.
void Recorder::keep_for_images(const ImageGroup& group, std::vector<RecordedStep>* steps, Lifetimes* lives) {
  const auto is_within = [&](const Life& life) {
    return !life.is_tensor && life.made >= group.begin && life.last < group.end;
  };
  std::vector<size_t> others;
  for (size_t i = group.begin; i < group.end; ++i) {
    for (const std::unique_ptr<NotedCall>& noted : (*steps)[i].noted) {
      for (NotedCall::Pointer& pointer : noted->pointers) {
        if (pointer.where.in != Where::In::result) continue;
        Life& life = (*lives)[pointer.where.place];
        pointer.stays = is_within(life);
        if (pointer.stays) {
          life.parts = group.images / group.at_once;
        } else {
          others.push_back(pointer.where.place);
        }
      }
    }
  }
  for (const size_t result : others) {
    (*lives)[result].made = std::min((*lives)[result].made, group.begin);
    (*lives)[result].last = std::max((*lives)[result].last, group.end - 1);
  }
}

Recorder::Lifetimes Recorder::lifetimes(const std::vector<RecordedStep>& steps) const {
  const size_t none = steps.size();
  Lifetimes lives(results_.size(), Life{none, none});
  const auto use = [&](size_t result, size_t step) {
    lives[result].made = std::min(lives[result].made, step);
    lives[result].last = step;
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const RecordedResult& result : steps[i].results) {
      lives[result.place].is_tensor = true;
      use(result.place, i);
    }
    for (const std::unique_ptr<NotedCall>& noted : steps[i].noted) {
      for (const NotedCall::Pointer& pointer : noted->pointers) {
        if (pointer.where.in == Where::In::result) use(pointer.where.place, i);
      }
    }
    for (size_t call = steps[i].begin; steps[i].noted.empty() && call < steps[i].end; ++call) {
      each_result(prepared_.calls[call], [&](size_t read) { use(read, i); });
      for (size_t own = 0; own < prepared_.calls[call].results(); ++own) {
        lives[call * kMostResults + own].is_tensor = true;
        use(call * kMostResults + own, i);
      }
    }
  }
  for (const size_t result : prepared_.returned) lives[result].last = none;
  return lives;
}

// In the block: those that are made, and no tensors.
std::vector<int64_t> Recorder::places(const Lifetimes& lives, size_t steps, int64_t* block_bytes) const {
  std::vector<Placed> placed;
  std::vector<int64_t> begins(results_.size());
  for (size_t result = 0; result < results_.size(); ++result) {
    const Life& life = lives[result];
    if (life.is_tensor || life.made == steps) continue;
    const int64_t bytes =
        round_up(ceil_div(results_[result].memory.bytes, life.parts), static_cast<int64_t>(kReplayAlignment));
    place(&placed, result, life.made, life.last, bytes);
    begins[result] = placed.back().begin;
    *block_bytes = std::max(*block_bytes, placed.back().end);
  }
  return begins;
}

void Recorder::place_results(Recording* recording) const {
  std::vector<RecordedStep>& steps = recording->steps;
  const Lifetimes lives = lifetimes(steps);
  for (size_t result = 0; result < results_.size(); ++result) {
    const Life& life = lives[result];
    if (life.is_tensor && life.last != steps.size()) steps[life.last].unused_after.push_back(result);
  }
  Lifetimes apart_lives = lives;
  recording->image_groups = image_groups(steps, max_threads());
  for (const ImageGroup& group : recording->image_groups) keep_for_images(group, &steps, &apart_lives);
  const std::vector<int64_t> begins = places(lives, steps.size(), &recording->block_bytes);
  const std::vector<int64_t> apart_begins =
      recording->image_groups.empty() ? begins : places(apart_lives, steps.size(), &recording->block_bytes);
  for (RecordedStep& step : steps) {
    for (const std::unique_ptr<NotedCall>& noted : step.noted) {
      for (NotedCall::Pointer& pointer : noted->pointers) {
        pointer.apart = pointer.where;
        const Where where = pointer.where;
        if (where.in != Where::In::result || lives[where.place].is_tensor) continue;
        pointer.where = {Where::In::block, 0, begins[where.place] + where.bytes};
        pointer.apart = {Where::In::block, 0, apart_begins[where.place] + where.bytes};
      }
    }
  }
}

}  // namespace xopt::ops
