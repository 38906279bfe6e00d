// A chain's convolutions as they were run the last time with tensors of the same sizes. On its way to the kernel a call
// is looked up, checked and laid out, and its result is made a tensor, which together take as long as a small image's
// convolution. All that depends on sizes alone, so it is noted once; a later run puts in where its tensors lie. Results
// that nobody but these convolutions reads share one block of memory.
#pragma once

#include <mutex>

#include "kernels/packed.h"
#include "ops/conv_call.h"
#include "ops/prepared.h"

namespace xopt::ops {

// What a run is about: the tensors that were given to the chain, and its results so far.
struct ChainValues {
  const Tensors& tensors;
  std::vector<Tensor>& results;
};

// Where an operand lies: so many bytes behind the beginning of a tensor, a result, or the block of memory.
struct Where {
  enum class In : uint8_t { nowhere, tensor, result, block };
  In in = In::nowhere;
  size_t place = 0;
  int64_t bytes = 0;
};

struct RecordedConv {
  ReadyConv conv;  // whose pointers stand for those below; between convolutions that are run together they are nowhere
  PackedHeader header;
  Where packed, input, scale, bias, other, out;
  int64_t sizes[5] = {};  // of the result; not between those that are run together
  int64_t dims = 0;
};

// Convolutions that follow each other.
struct RecordedPart {
  size_t begin = 0, end = 0;        // which calls of the chain
  std::vector<RecordedConv> convs;  // of each
  std::vector<size_t> ends;         // of those that are run together
  int64_t block_bytes = 0;
};

struct Recording {
  // Whether packed weights are of the same kind.
  bool fits(const Tensors& tensors) const;
  // The part that begins with this call, or nullptr.
  const RecordedPart* part_at(size_t begin) const;

  std::vector<int64_t> sizes;  // what it is known by: everything of the chain's tensors but their values
  std::vector<RecordedPart> parts;
};
std::vector<int64_t> sizes_of(const Tensors& tensors, int64_t threads);

// Those of a chain.
class Recordings {
 public:
  // nullptr where there is none for such tensors.
  std::shared_ptr<const Recording> find(const std::vector<int64_t>& sizes, const Tensors& tensors) const;
  void add(std::shared_ptr<const Recording> recording);

 private:
  static constexpr size_t kMost = 16;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Recording>> all_;
};

// Notes what is run.
class ConvRecorder {
 public:
  explicit ConvRecorder(const PreparedCalls& prepared) : prepared_(prepared), seen_(prepared.calls.size()) {}

  // Calls from `begin` on were run together as these; the tensors that they read and the last one's result are there.
  void add(size_t begin, const std::vector<ReadyConv>& convs, const ChainValues& values);
  std::shared_ptr<const Recording> finish(std::vector<int64_t> sizes) const;

 private:
  // A call that was run, and how many were run together from it on; 0: none, or the group begins before it.
  struct Seen {
    std::unique_ptr<RecordedConv> conv;
    size_t together = 0;
  };

  bool note(size_t call, const ReadyConv& conv, bool reads_given, const ChainValues& values);
  RecordedPart part_of(size_t begin, size_t end) const;

  const PreparedCalls& prepared_;
  std::vector<Seen> seen_;
};

// Runs them; results that others read become tensors.
void replay(const RecordedPart& part, const PreparedCalls& prepared, int64_t threads, const ChainValues& values);

}  // namespace xopt::ops
