// Convolutions that follow each other, some lines of the image at a time: what one computes is still in L2 when the next
// reads it, and is never written to memory. Results are those of one convolution after the other, bit by bit.
#pragma once

#include <vector>

#include "ops/conv_call.h"

namespace xopt::ops {

// While one stands, this thread's convolutions are planned in it and not run. Each reads the result of the one before,
// which need not live on, and nothing else that has not been computed.
class PlannedConvs {
 public:
  static constexpr size_t kMost = 6;      // convolutions in one
  static constexpr size_t kTogether = 3;  // at most, of those: more need narrow bands (MobileNetV2: a tenth slower)

  explicit PlannedConvs(int64_t threads);
  ~PlannedConvs();
  PlannedConvs(const PlannedConvs&) = delete;
  PlannedConvs& operator=(const PlannedConvs&) = delete;

  // The one that stands on this thread, or nullptr.
  static PlannedConvs* current();

  void add(const ReadyConv& conv);
  void keep(Tensor tensor) { kept_.push_back(std::move(tensor)); }  // that a planned convolution reads
  size_t size() const { return convs_.size(); }
  const std::vector<ReadyConv>& convs() const { return convs_; }
  // Whether results of the last one's size are worth planning what reads them.
  bool may_go_on() const;

  // How they are best done: the ends of those that are done together.
  std::vector<size_t> parts() const;
  // All together, into the memory of the last one's result; false where that cannot be, and nothing was done.
  bool run() const;

 private:
  void find_parts(size_t begin, size_t end, std::vector<size_t>* ends) const;

  PlannedConvs* const outer_;
  const int64_t threads_;
  std::vector<ReadyConv> convs_;
  std::vector<Tensor> kept_;
};

}  // namespace xopt::ops
