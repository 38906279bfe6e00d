// One layer of an LSTM, GRU or plain recurrent network, in one or both directions, over all time steps.
//
// Of each step the input's product is one GEMM for many steps at once, the hidden state's a GEMM of its own; both write
// sums in the order of recurrent_gates.h, for which weights are packed with their rows so arranged:
// [block of 32 units][gate][32], padded with zeros. A projection's weight is packed as any linear layer's.
#pragma once

#include "kernels/gemm.h"
#include "kernels/recurrent_gates.h"

namespace xopt {

// What a direction has of its own. States are contiguous [batch, units or outputs].
struct RecurrentDirection {
  PackedWeight input_weight, hidden_weight;
  PackedWeight projection;                // only where the call says so
  ColumnVector input_bias, hidden_bias;   // [gates * units] as torch has them, or nothing
  const void *first_hidden, *first_cell;  // nullptr: zeros
  DType first_hidden_dtype, first_cell_dtype;
  void *last_hidden, *last_cell;  // in the dtype of `out`; last_cell of LSTMs only
};

struct RecurrentCall {
  RecurrentCell cell;
  bool projected;
  int64_t units, outputs;  // outputs: the projection's, or the units
  int64_t steps, batch;
  // Sequences of different lengths, the longest first, packed step after step: the first row of each step, and the
  // number of rows at the end. nullptr: all have all steps.
  const int64_t* first_row;

  const void* input;
  DType input_dtype;
  int64_t input_row_stride, input_step_stride;  // elements, between sequences and between steps (unused if packed)
  void* out;                                    // the backward direction's outputs beside the forward one's
  DType out_dtype;
  int64_t out_row_stride, out_step_stride;

  int directions;
  const RecurrentDirection* direction;
  void (*product)(const GemmCall&);  // the GEMM of whatever dtype the weight has
};

// All sizes at least 1.
void recurrent(const RecurrentCall& call);

}  // namespace xopt
