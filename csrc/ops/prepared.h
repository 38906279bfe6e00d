// Calls of operators whose arguments are read from text, once: what a chain runs.
//
// One call a line: the operator's name, then its arguments in the order of its schema. %2 is the third of the chain's
// tensors, $2 the third call's result, - is None. The last line says which results the chain returns.
//   conv %0 %1 [16,32,1,1] %2 [1,1] [0,0,0,0] [1,1] 1 - relu 0.0 0.0 none - false float32
//   conv $0 %3 [32,16,1,1] %4 [1,1] [0,0,0,0] [1,1] 1 - relu 0.0 0.0 add %0 true float32
//   return $1
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/arguments.h"

namespace xopt::ops {

// An operator that a chain can call: it takes its arguments off the stack, and returns the one result that it has.
using Chainable = Tensor(Stack stack);

// Beside the operator, as a static object.
class ChainableOp {
 public:
  ChainableOp(const char* name, Chainable* op);
};

// The same operator as torch calls it.
template <Chainable* op>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  return_tensor(stack, 0, op(Stack(stack)));
}

struct PreparedCall {
  std::string name;
  Chainable* op;
  std::vector<PreparedArgument> arguments;
  std::vector<size_t> unused_after;  // the results, by their numbers, that neither a later call nor the caller reads
};

struct PreparedCalls {
  std::vector<PreparedCall> calls;
  std::vector<size_t> returned;  // results by their numbers
};

// Of this text, which is read when it is first met.
std::shared_ptr<const PreparedCalls> prepared_calls(std::string_view text);

}  // namespace xopt::ops
