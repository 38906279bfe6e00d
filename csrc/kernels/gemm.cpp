// See gemm.h.
#include "kernels/gemm.h"

#include <type_traits>

namespace xopt {
namespace {

template <class Data>
void advance(Data** data, int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const uint8_t, uint8_t>;
  if (*data != nullptr) *data = static_cast<Byte*>(*data) + elements * dtype_size(dtype);
}

}  // namespace

Epilogue Epilogue::from_column(int64_t first) const {
  Epilogue rest = *this;
  advance(&rest.scale.data, first, scale.dtype);
  advance(&rest.bias.data, first, bias.dtype);
  advance(&rest.up_bias.data, first, up_bias.dtype);
  advance(&rest.other, first, other_dtype);
  advance(&rest.out, first, out_dtype);
  return rest;
}

}  // namespace xopt
