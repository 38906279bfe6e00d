// What follows the products of one time step of a recurrent layer: the contract of the kernel "recurrent_gates", and of
// "recurrent_rows", which moves states in and out.
#pragma once

#include "tiles/layout.h"
#include "tiles/types.h"

namespace xopt {

enum class RecurrentCell : uint8_t { lstm, gru, rnn_tanh, rnn_relu };

constexpr int64_t recurrent_gate_count(RecurrentCell cell) {
  return cell == RecurrentCell::lstm ? 4 : (cell == RecurrentCell::gru ? 3 : 1);
}

// Units go by blocks of a panel's columns: rows of sums are [block][gate][32], gates in torch's order (LSTM: input,
// forget, cell, output; GRU: reset, update, new), so that a block's gates lie side by side and a thread that has some
// blocks has neighbouring panels. Columns past the last unit are padding.
inline constexpr int64_t kRecurrentBlock = kPanelColumns;

struct RecurrentGatesCall {
  RecurrentCell cell;
  int64_t rows, units;
  const float *input_sums, *hidden_sums;  // of the input and of the last hidden state, biases included
  int64_t input_sums_stride, hidden_sums_stride;
  float* state;  // LSTM: the cell, GRU: the hidden state, as floats and padded to whole blocks; else nullptr
  int64_t state_stride;
  void* hidden;  // what the next product reads
  DType hidden_dtype;
  int64_t hidden_stride;
  void* out;  // the same again for the caller; may be nullptr
  DType out_dtype;
  int64_t out_stride;
};
using RecurrentGatesFn = void(const RecurrentGatesCall&);

// Rows of floating-point values from one dtype and stride to another.
struct RecurrentRowsCall {
  const void* from;
  DType from_dtype;
  int64_t from_stride;
  void* to;
  DType to_dtype;
  int64_t to_stride;
  int64_t rows, columns;
};
using RecurrentRowsFn = void(const RecurrentRowsCall&);

}  // namespace xopt
