// Where the tensors of a call lie: on the CPU, or on the device of torch's that its operator was called for. Outputs are
// allocated there, and arguments that lie elsewhere are refused.
//
// An operator is written once. Under the XPU key (Intel GPUs) it is registered as on_xpu<operator>, which has its kernels
// run on the queue that torch has current for the tensors' device. Packing and unpacking, which the host does, are
// registered as on_host<operator, kinds>; what is packed then lies on the device.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>

#include "runtime/xpu.h"

namespace xopt::ops {

struct Place {
  int32_t type, index;
  std::string problem;  // why nothing can be computed there; empty: it can

  bool is_cpu() const;
  std::string text() const;  // "the CPU", "xpu:0"
};
// Of the operator that the calling thread is in.
const Place& place();

// For as long as it lives, the calling thread's operator is in this place.
class InPlace {
 public:
  explicit InPlace(const Place& place);
  InPlace(const InPlace&) = delete;
  InPlace& operator=(const InPlace&) = delete;
  ~InPlace();

 private:
  const Place* outer_;
};

using BoxedOp = void(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// Whose device a call's is: the first argument, or the first item where that is a list.
enum class First : uint8_t { tensor, list };

// A call under the XPU key, whose place is the device of its first argument. An operator owns its arguments from its first
// line on, so what goes wrong here is left for it to say: Checked::in_place throws it.
class XpuCall {
 public:
  XpuCall(StableIValue first, First kind);
  XpuCall(const XpuCall&) = delete;
  XpuCall& operator=(const XpuCall&) = delete;
  ~XpuCall();

 private:
  Place here_;
  QueueKernels kernels_;
  InPlace in_place_;
  Offload* outer_offload_;
};

template <BoxedOp* op, First first = First::tensor>
void on_xpu(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  const XpuCall call(stack[0], first);
  op(stack, inputs, outputs);
}

// Runs a CPU operator on copies of its tensors, and moves its results to their device.
// `kinds`: for each argument 'T' a tensor, 'O' one that may be None, '.' something else.
void call_on_host(BoxedOp* op, const char* kinds, StableIValue* stack, uint64_t inputs, uint64_t outputs);

template <BoxedOp* op, char... kinds>
void on_host(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  constexpr char kKinds[] = {kinds..., '\0'};
  call_on_host(op, kKinds, stack, inputs, outputs);
}

}  // namespace xopt::ops
