// Tensors one after the other. See concat.h.
// isa: scalar
//
// Runs are copied by memcpy, which is written for each CPU. Long ones are cut, so that threads share them: a cache of a
// language model is a few runs, each as long as all that was said before. Where a part lies otherwise than the result, runs
// are single elements, and one after the other has to cost no more than a load and a store.
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

// Where a run lies.
struct Place {
  Place(const CopiedRuns& part, void* out, int64_t run)
      : from(static_cast<const uint8_t*>(part.from)), to(static_cast<uint8_t*>(out) + part.at) {
    for (int dim = CopiedRuns::kDims - 1; dim >= 0; --dim) {
      from += run % part.size[dim] * part.from_stride[dim];
      to += run % part.size[dim] * part.to_stride[dim];
      run /= part.size[dim];
    }
  }
  const uint8_t* from;
  uint8_t* to;
};

void copy_pieces(const CopiedRuns& part, void* to, int64_t begin, int64_t end) {
  const int64_t pieces = ceil_div(part.run_bytes, kPieceBytes);
  for (int64_t i = begin; i < end; ++i) {
    const Place place(part, to, i / pieces);
    const int64_t first = i % pieces * kPieceBytes;
    std::memcpy(place.to + first, place.from + first,
                static_cast<size_t>(minimum(kPieceBytes, part.run_bytes - first)));
  }
}

// Copies runs by one(from, to), those along the innermost dimension one after the other.
template <class One>
void copy_runs(const CopiedRuns& part, void* to, int64_t begin, int64_t end, const One& one) {
  constexpr int kInner = CopiedRuns::kDims - 1;
  for (int64_t run = begin; run < end;) {
    Place place(part, to, run);
    const int64_t line_end = minimum(end, run + part.size[kInner] - run % part.size[kInner]);
    for (; run < line_end; ++run, place.from += part.from_stride[kInner], place.to += part.to_stride[kInner]) {
      one(place.from, place.to);
    }
  }
}

template <size_t kBytes>
void copy_elements(const CopiedRuns& part, void* to, int64_t begin, int64_t end) {
  copy_runs(part, to, begin, end, [](const uint8_t* from, uint8_t* element) { std::memcpy(element, from, kBytes); });
}

// The thread's share of a part.
void copy(const CopiedRuns& part, void* to, int64_t thread, int64_t count) {
  const int64_t items = runs_of(part) * ceil_div(part.run_bytes, kPieceBytes);
  const int64_t begin = items * thread / count, end = items * (thread + 1) / count;
  switch (part.run_bytes) {
    case 1:
      return copy_elements<1>(part, to, begin, end);
    case 2:
      return copy_elements<2>(part, to, begin, end);
    case 4:
      return copy_elements<4>(part, to, begin, end);
    case 8:
      return copy_elements<8>(part, to, begin, end);
    default:
      break;
  }
  if (part.run_bytes > kPieceBytes) return copy_pieces(part, to, begin, end);
  const auto bytes = static_cast<size_t>(part.run_bytes);
  copy_runs(part, to, begin, end, [=](const uint8_t* from, uint8_t* run) { std::memcpy(run, from, bytes); });
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
