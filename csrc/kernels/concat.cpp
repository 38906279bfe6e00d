// Tensors one after the other. See concat.h.
// isa: scalar
//
// Runs are copied by memcpy, which is written for each CPU. Long ones are cut, so that threads share them: a cache of a
// language model is a few runs, each as long as all that was said before.
#include "kernels/concat.h"

#include <cstring>

#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kBytesOfAThread = 32768;  // fewer are not worth waking another thread
constexpr int64_t kPieceBytes = 16384;

int64_t runs_of(const CopiedRuns& part) { return part.size[0] * part.size[1] * part.size[2]; }

// The thread's share of a part.
void copy(const CopiedRuns& part, void* to, int64_t thread, int64_t count) {
  const int64_t pieces = ceil_div(part.run_bytes, kPieceBytes), items = runs_of(part) * pieces;
  const int64_t end = items * (thread + 1) / count;
  for (int64_t i = items * thread / count; i < end; ++i) {
    const int64_t begin = i % pieces * kPieceBytes;
    int64_t run = i / pieces, from_at = begin, to_at = part.at + begin;
    for (int dim = CopiedRuns::kDims - 1; dim >= 0; --dim) {
      from_at += run % part.size[dim] * part.from_stride[dim];
      to_at += run % part.size[dim] * part.to_stride[dim];
      run /= part.size[dim];
    }
    std::memcpy(static_cast<uint8_t*>(to) + to_at, static_cast<const uint8_t*>(part.from) + from_at,
                static_cast<size_t>(minimum(kPieceBytes, part.run_bytes - begin)));
  }
}

void concat(const ConcatCall& call) {
  int64_t bytes = 0;
  for (int i = 0; i < call.count; ++i) bytes += runs_of(call.parts[i]) * call.parts[i].run_bytes;
  const int64_t threads = minimum<int64_t>(max_threads(), bytes / kBytesOfAThread + 1);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    for (int i = 0; i < call.count; ++i) copy(call.parts[i], call.to, thread, count);
  });
}

}  // namespace

XOPT_REGISTER_KERNEL(concat, f32, concat);

}  // namespace xopt::XOPT_ISA
