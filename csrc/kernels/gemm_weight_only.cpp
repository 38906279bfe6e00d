// Products with weights of 8 and 4 bits on the CPU: some panels at a time become floats, which the GEMM then multiplies.
// See weight_only.h.
// isa: scalar
#include "kernels/weight_only.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kDecodedBytes = 512 * 1024;  // of a thread at once, which its L2 holds

Kernel<DecodeFn> decode_f32("decode_weight", "f32"), decode_bf16("decode_weight", "bf16"),
    decode_f16("decode_weight", "f16");
Kernel<GemmFn> gemm_f32("gemm", "f32"), gemm_bf16("gemm", "bf16"), gemm_f16("gemm", "f16");

void move_by(ColumnVector* vector, int64_t columns) {
  if (vector->data == nullptr) return;
  vector->data = static_cast<const uint8_t*>(vector->data) + columns * dtype_size(vector->dtype);
}

// That of the output columns from `first` on.
Epilogue columns_of(const Epilogue& whole, int64_t first) {
  Epilogue e = whole;
  move_by(&e.bias, first);
  move_by(&e.up_bias, first);
  if (e.other != nullptr) e.other = static_cast<const uint8_t*>(e.other) + first * dtype_size(e.other_dtype);
  e.out = static_cast<uint8_t*>(e.out) + first * dtype_size(e.out_dtype);
  return e;
}

void multiply(const WeightOnlyCall& call, Kernel<DecodeFn>& decode, Kernel<GemmFn>& gemm) {
  const PackedWeight& weight = call.gemm.weight;
  const int64_t width = weight.gated ? kTileColumns : kPanelColumns, bytes = weight.panel_bytes;
  const int64_t at_once = maximum<int64_t>(1, kDecodedBytes * max_threads() / maximum<int64_t>(1, bytes));
  const int64_t most = minimum(at_once, weight.panels);
  const Scratch panels(static_cast<size_t>(most * bytes));
  for (int64_t panel = 0; panel < weight.panels; panel += most) {
    const int64_t count = minimum(most, weight.panels - panel), first = panel * width;
    decode(DecodeCall{call.codes, panel, count, panels.as<void>()});
    GemmCall part = call.gemm;
    part.weight.n = minimum(count * width, weight.n - first);
    part.weight.panels = count;
    part.weight.panel_data = panels.as<uint8_t>();
    part.epilogue = columns_of(call.gemm.epilogue, first);
    if (part.tuning.level < 0) {
      gemm(part);
    } else {
      gemm.run_up_to(minimum(static_cast<Isa>(part.tuning.level), active_isa()), part);
    }
  }
}

void weight_only_f32(const WeightOnlyCall& call) { multiply(call, decode_f32, gemm_f32); }
void weight_only_bf16(const WeightOnlyCall& call) { multiply(call, decode_bf16, gemm_bf16); }
void weight_only_f16(const WeightOnlyCall& call) { multiply(call, decode_f16, gemm_f16); }

}  // namespace

XOPT_REGISTER_KERNEL(gemm_weight_only, f32, weight_only_f32);
XOPT_REGISTER_KERNEL(gemm_weight_only, bf16, weight_only_bf16);
XOPT_REGISTER_KERNEL(gemm_weight_only, f16, weight_only_f16);

}  // namespace xopt::XOPT_ISA
