// A chain as it was run before with tensors of the same sizes. On its way to the kernel a call is looked up, checked and
// laid out, and its result is made a tensor, which together take as long as a small image's convolution. All that depends
// on sizes alone, so what operators call kernels with is noted once (ops/noted_call.h); a later run puts in where its
// tensors lie. Results that nobody but such calls reads share one block of memory, and views between them are nothing.
//
// Some sizes never come again: a language model's cache is longer each time. Where two runs differ in those of some
// tensors, the calls that read them, or results of other sizes in these two, are not noted; all others are.
#pragma once

#include <array>
#include <atomic>
#include <mutex>

#include "ops/conv_call.h"
#include "ops/joins.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"

namespace xopt::ops {

constexpr uintptr_t kReplayAlignment = 64;  // of what lies in the block, and what kernels want of packed weights

// A result that becomes a tensor.
struct RecordedResult {
  size_t place = 0;
  std::vector<int64_t> sizes, strides;
  DType dtype = DType::f32;
};

// What a run looked like: its tensors, as `sizes_of` tells, and its results by their places, which have dtype, sizes and
// strides, or nothing where there was none.
struct Shapes {
  std::vector<int64_t> tensors;
  std::vector<std::vector<int64_t>> results;
};
std::vector<int64_t> shape_of(const Tensor& result);

// Calls of a chain: convolutions that are run together, or one.
struct RecordedStep {
  // Into the caches, while the step before is run.
  void fetch() const;

  size_t begin = 0, end = 0;
  NotedCalls noted;      // none: it is run like for the first time
  bool is_view = false;  // that somebody wants as a tensor, and no copy
  std::vector<RecordedResult> results;
  std::vector<size_t> unused_after;  // results that are tensors and that nobody reads any more
  // Results that were alike in two runs, where nothing but that tells that they are so in all.
  std::vector<std::pair<size_t, std::vector<int64_t>>> expected;
};

// Steps [begin, end) that are done for some of their images at a time.
struct ImageGroup {
  size_t begin, end;
  int64_t images, at_once;
};

// Whether a recording's images are done some at a time, once both ways have been tried: it depends on how much of the last
// cache a process has, and how fast that is, which no size tells.
class ImagesChoice {
 public:
  bool apart() const;
  void took(bool apart, int64_t nanoseconds);

 private:
  static constexpr int64_t kTries = 4;  // of each; the first brings memory and code in
  std::atomic<int64_t> tries_{0};
  std::array<std::atomic<int64_t>, 2> least_{INT64_MAX, INT64_MAX};
};

struct Recording {
  bool is_of(const std::vector<int64_t>& sizes) const;
  // Whether packed weights are of the same kind.
  bool fits(const std::vector<const uint8_t*>& tensors) const;
  // Whether half of what computes was noted.
  bool is_worth_it() const;
  // The group that begins with a step, or nullptr.
  const ImageGroup* group_at(size_t step) const;

  std::vector<int64_t> sizes;  // what it is known by: everything of the chain's tensors but their values
  std::vector<bool> varies;    // the tensors that may have other sizes; none: no tensor may
  std::vector<RecordedStep> steps;
  std::vector<ImageGroup> image_groups;                 // in order
  mutable ImagesChoice images;                          // where there are any
  std::vector<std::pair<size_t, PackedHeader>> packed;  // which tensors are packed weights
  int64_t block_bytes = 0;
};
std::vector<int64_t> sizes_of(const Tensors& tensors, int64_t threads);
std::vector<const uint8_t*> data_of(const Tensors& tensors);
// Which tensors have other sizes or strides in two such lists; none: they differ in more.
std::vector<bool> varying(const std::vector<int64_t>& one, const std::vector<int64_t>& other);

// Those of a chain.
class Recordings {
 public:
  // nullptr where there is none for such tensors.
  std::shared_ptr<const Recording> find(const std::vector<int64_t>& sizes,
                                        const std::vector<const uint8_t*>& tensors) const;
  // Whether such sizes are worth a recording: they have been asked about before.
  bool come_again(const std::vector<int64_t>& sizes);
  // Where results are wanted, as far as the last run that was not recorded tells, if it was of such sizes.
  Joins joins(const PreparedCalls& prepared, const Tensors& tensors, const std::vector<int64_t>& sizes) const;
  // These results are no parts of others any more.
  void keep_apart(const std::vector<size_t>& results);
  // A run before with tensors of as many dimensions; nullptr where there was none, or recordings of what is alike have
  // come to little.
  std::shared_ptr<const Shapes> run_like(const std::vector<int64_t>& sizes);
  void ran(std::shared_ptr<const Shapes> run);
  // False: it is not worth being kept.
  bool add(std::shared_ptr<const Recording> recording);

 private:
  static constexpr size_t kMost = 32, kMostSkipped = 63;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Recording>> all_;
  std::array<uint64_t, kMost> seen_{};  // hashes of sizes, the oldest at next_
  size_t next_ = 0;
  std::shared_ptr<const Shapes> last_;
  std::vector<size_t> apart_;
  size_t skipped_ = 0, to_skip_ = 0;  // runs after a recording that was not worth it
};

// Runs a step that was noted; results that others read become tensors.
void replay(const RecordedStep& step, int64_t threads, const Addresses& at);
// The first part of that, and the second for convolutions: together, if they are several.
void make_results(const RecordedStep& step, const Addresses& at);
void run_again(std::vector<ReadyConv> convs, int64_t threads);

}  // namespace xopt::ops
