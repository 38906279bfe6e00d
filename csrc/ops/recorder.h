// What a chain runs, noted while it runs it, to be made again (ops/replay.h).
#pragma once

#include "ops/replay.h"

namespace xopt::ops {

class Recorder {
 public:
  // `sizes`: of the tensors. `earlier`: a run with other ones, if what differs from it is not to be noted. `joins`: which
  // results are wanted where.
  Recorder(const PreparedCalls& prepared, const Tensors& tensors, std::vector<int64_t> sizes,
           std::shared_ptr<const Shapes> earlier, Joins joins);
  const Joins& joins() const { return joins_; }

  // A call, and what its operator noted; its results are there, and so is what it read. What is said last about a call
  // holds: convolutions are planned, maybe several times, before they are run.
  void ran(size_t call, NotedCalls noted, const std::vector<Tensor>& results);
  // Calls that have been run together, of which nobody else reads but the last one's result.
  void ran_together(size_t begin, size_t end) { seen_[begin].together = end - begin; }

  // nullptr: there are parts of others that must not be: they are wanted as tensors, or computed by what was not noted.
  std::shared_ptr<const Recording> finish();
  std::vector<size_t> parts_to_keep_apart() const;

 private:
  struct Memory {
    const uint8_t* data = nullptr;
    int64_t bytes = 0;
  };
  struct SeenResult {
    Where root;  // a tensor, or the result whose memory this is
    Memory memory;
    RecordedResult like;
    bool varies = false, is_part = false;
  };
  struct SeenCall {
    NotedCalls noted;
    bool is_known = false;  // by what it noted, or as a view
    size_t together = 1;
  };

  bool see_result(size_t place, const Tensor& result);
  bool reads_what_varies(const PreparedCall& call) const;
  bool see_through(size_t call);
  bool find(size_t call, NotedCall::Pointer* pointer) const;
  bool find(size_t call, NotedCall::Packed* packed) const;
  Where root_of(const PreparedArgument& argument, const uint8_t* data) const;
  bool is_known(size_t begin, size_t end) const;
  std::vector<RecordedStep> steps();
  static void make_wholes_first(std::vector<RecordedStep>* steps);
  void expect_results(RecordedStep* step) const;
  void take_noted(RecordedStep* step);
  // Of a result: the first step that writes it, and the last that reads it; the number of steps: none, or somebody behind.
  struct Life {
    size_t made, last;
    bool is_tensor = false;
    int64_t parts = 1;  // of its images, for one of which there is room
  };
  using Lifetimes = std::vector<Life>;
  Lifetimes lifetimes(const std::vector<RecordedStep>& steps) const;
  static void keep_for_images(const ImageGroup& group, std::vector<RecordedStep>* steps, Lifetimes* lives);
  std::vector<int64_t> places(const Lifetimes& lives, size_t steps, int64_t* block_bytes) const;
  void place_results(Recording* recording) const;

  const PreparedCalls& prepared_;
  const std::vector<int64_t> sizes_;
  const std::shared_ptr<const Shapes> earlier_;
  const Joins joins_;
  const std::vector<bool> varies_;  // tensors
  std::vector<Memory> tensors_;
  std::vector<SeenCall> seen_;
  std::vector<SeenResult> results_;
  std::vector<bool> is_tensor_;  // results that somebody wants as such
};

}  // namespace xopt::ops
