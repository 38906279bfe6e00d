// Convolutions that follow each other, some lines of the image at a time: what one computes then is still in L2 when the
// next reads it, and is never written to memory. Results are those of one convolution after the other, bit by bit.
#pragma once

#include <vector>

#include "ops/conv_call.h"

namespace xopt::ops {

// While one stands, this thread's convolutions are planned in it and not run; run() does it, and it has to be called.
// The first one's input, and whatever the others take but the results of those before them, has to be computed.
class PlannedConvs {
 public:
  PlannedConvs();
  ~PlannedConvs();
  PlannedConvs(const PlannedConvs&) = delete;
  PlannedConvs& operator=(const PlannedConvs&) = delete;

  // The one that stands on this thread, or nullptr.
  static PlannedConvs* current();

  static constexpr size_t kMost = 6;  // convolutions in one
  // Autotuning and other devices have each convolution on its own.
  static bool could_pay();

  void add(const ReadyConv& conv) { convs_.push_back(conv); }
  void keep(Tensor tensor) { kept_.push_back(std::move(tensor)); }  // that a planned convolution reads
  size_t size() const { return convs_.size(); }
  const void* last_input() const { return convs_.back().call.input.data; }
  void drop_last() { convs_.pop_back(); }
  void run();  // each reads what the one before has written, but the first

 private:
  void run_some(size_t begin, size_t end) const;

  PlannedConvs* const outer_;
  std::vector<ReadyConv> convs_;
  std::vector<Tensor> kept_;
};

}  // namespace xopt::ops
