// Images that a chain joins along their channels (concat), written by those that compute them to where they are joined,
// so that nothing is left to copy: features of DenseNet's layers, branches of Inception. Which ones can be is told by
// what a run before looked like.
#pragma once

#include <vector>

#include "ops/prepared.h"

namespace xopt::ops {

// Where a chain wants the calling thread's next image to be, for as long as this lives.
class WantedOutput {
 public:
  explicit WantedOutput(const Tensor* place);  // nullptr: anywhere
  ~WantedOutput();
  WantedOutput(const WantedOutput&) = delete;
  WantedOutput& operator=(const WantedOutput&) = delete;

  // An image whose channels are last and which an operator writes row by row: that place, once, if it is of these sizes
  // and this dtype, and else a new one.
  static Tensor take(const int64_t* sizes, int64_t dims, DType dtype);

 private:
  const Tensor* outer_;
};

class Joins {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  // None.
  Joins() = default;
  // `shapes`: of all results, as shape_of has them (replay.h). `apart`: results that are no parts, whatever they look like.
  Joins(const PreparedCalls& prepared, const Tensors& tensors, const std::vector<std::vector<int64_t>>& shapes,
        const std::vector<size_t>& apart);

  // Where a result is to be; nullptr: anywhere.
  const Tensor* place_of(size_t result) const;
  // The joined result that another one is a part of, be it as a part of a part; kNone: of none.
  size_t whole_of(size_t result) const { return wholes_.empty() ? kNone : wholes_[result]; }
  // Whether a result lies where it was wanted.
  bool is_part(size_t result, const Tensor& tensor) const;

 private:
  void join(const PreparedCalls& prepared, size_t call, const std::vector<bool>& may_be_part, const Tensors& tensors,
            const std::vector<std::vector<int64_t>>& shapes);

  std::vector<size_t> wholes_;
  std::vector<Tensor> places_;
};

}  // namespace xopt::ops
