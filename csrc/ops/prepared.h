// Calls of operators whose arguments are read from text, once: what a chain runs.
//
// One call a line: the operator's name, then its arguments in the order of its schema. %2 is the third of the chain's
// tensors, %2[32:48] some elements of it, $2 the third call's result and $2.1 its second one, - is None. In a list of
// integers, %2:0 is the first size of that tensor, and %2:0;8;// an eighth of it: signs are behind what they take. (%2,$0)
// is a list of tensors, which are that many arguments, behind their number. The last line says which results the chain
// returns.
//   conv %0 %1 [16,32,1,1] %2 [1,1] [0,0,0,0] [1,1] 1 - relu 0.0 0.0 none - false float32
//   conv $0 %3 [32,16,1,1] %4 [1,1] [0,0,0,0] [1,1] 1 - relu 0.0 0.0 add %0 true float32
//   return $1
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/arguments.h"

namespace xopt::ops {

// An operator that a chain can call: it takes its arguments off the stack, and returns the one result that it has, or two.
using Chainable = Tensor(Stack stack);
using Pair = std::pair<Tensor, Tensor>;
using ChainablePair = Pair(Stack stack);
constexpr size_t kMostResults = 2;

// How an operator reads its first argument: as any tensor, or row by row, so that rows may have anything between them.
enum class Reads : uint8_t { any, rows };

// Beside the operator, as a static object.
class ChainableOp {
 public:
  ChainableOp(const char* name, Chainable* op, Reads reads = Reads::any);
  ChainableOp(const char* name, ChainablePair* op, Reads reads = Reads::any);
};

// The same of a call that gives a view of its first argument wherever there is one.
class ChainableView {
 public:
  ChainableView(const char* name, Chainable* op);
};

// The same operator as torch calls it.
template <auto* op>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  if constexpr (std::is_same_v<decltype(op), ChainablePair*>) {
    Pair results = op(Stack(stack));
    return_tensor(stack, 0, std::move(results.first));
    return_tensor(stack, 1, std::move(results.second));
  } else {
    return_tensor(stack, 0, op(Stack(stack)));
  }
}

struct PreparedCall {
  void run(const Stack& stack, Tensor* results) const;  // puts its results, kMostResults at most, where it is told
  size_t results() const { return pair != nullptr ? 2 : 1; }

  std::string name;
  Chainable* op = nullptr;        // one of
  ChainablePair* pair = nullptr;  // the two
  Reads reads = Reads::any;
  bool is_view = false;
  std::vector<PreparedArgument> arguments;
  std::vector<size_t> unused_after;  // the results, by their places, that neither a later call nor the caller reads
  // How many calls that may be done in bands begin with this one, of which each has the one before's result for its first
  // argument, and nothing else reads that.
  size_t run_length = 1;
  // Whether its first result is read by nothing but operators that read rows.
  bool read_by_rows = false;
};

class Recordings;  // ops/replay.h
std::shared_ptr<Recordings> new_recordings();

// A result's place: kMostResults for each call before its own, and one for each of its call's before it.
struct PreparedCalls {
  std::vector<PreparedCall> calls;
  std::vector<size_t> returned;  // results by their places
  // For each call what its run found out last, for the next one; 0 at first (ops/chain.cpp).
  std::unique_ptr<std::atomic<uint64_t>[]> notes;
  // How it was run before.
  std::shared_ptr<Recordings> recordings;
};

// Calls read(is_result, place) for each tensor and result that a call takes, or takes a size of.
template <class Read>
void each_value(const PreparedCall& call, const Read& read) {
  using Kind = PreparedArgument::Kind;
  for (const PreparedArgument& argument : call.arguments) {
    const bool is_result = argument.kind == Kind::result;
    if (is_result || argument.kind == Kind::tensor) read(is_result, static_cast<size_t>(argument.integer));
    for (const ComputedInteger& computed : argument.computed) {
      for (const ComputedInteger::Term& term : computed.terms) {
        if (term.size) read(term.size->is_result, term.size->place);
      }
    }
  }
}

// The same of results alone.
template <class Read>
void each_result(const PreparedCall& call, const Read& read) {
  each_value(call, [&](bool is_result, size_t place) {
    if (is_result) read(place);
  });
}

// Of this text, which is read when it is first met.
std::shared_ptr<const PreparedCalls> prepared_calls(std::string_view text);

}  // namespace xopt::ops
