// See prepared.h. Here is also how a stack takes its arguments from a prepared call.
#include "ops/prepared.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "ops/check.h"
#include "ops/text.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "chain";
constexpr size_t kMostTerms = 128;   // of a computed integer: twice as many as a forward may have
constexpr size_t kMostTexts = 1024;  // that are kept: far more than models have chains

// By their names, calls without arguments.
std::map<std::string, PreparedCall, std::less<>>& chainable_ops() {
  static std::map<std::string, PreparedCall, std::less<>> ops;
  return ops;
}

template <class... Parts>
[[noreturn]] void fail_calls(const Parts&... parts) {
  fail(kOp, "calls", parts...);
}

// ---- From text -----------------------------------------------------------------------------------------------------

size_t read_place(std::string_view token, size_t count, const char* what) {
  int64_t place = -1;
  if (token.empty() || !read(token.substr(1), &place) || place < 0 || place >= static_cast<int64_t>(count)) {
    fail_calls("expected ", what, " below ", count, ", got ", token);
  }
  return static_cast<size_t>(place);
}

// $2 or $2.1, as the result's place.
size_t read_result(std::string_view token, const std::vector<PreparedCall>& calls, const char* what) {
  const size_t point = token.find('.');
  const size_t call = read_place(token.substr(0, point), calls.size(), what);
  if (point == std::string_view::npos) return call * kMostResults;
  return call * kMostResults + read_place(token.substr(point), calls[call].results(), "which result of a call,");
}

int64_t dtype_code_of(std::string_view name) {
  for (const DType dtype : kEveryDType) {
    if (torch_dtype_name(dtype_to_torch(dtype)) == name) return dtype_to_torch(dtype);
  }
  return -1;
}

// As Python computes it: division rounds down, and what is left has the divisor's sign. None: it is no 64-bit integer.
std::optional<int64_t> computed_of(char sign, int64_t left, int64_t right) {
  int64_t result = 0;
  if (sign == '+') return __builtin_add_overflow(left, right, &result) ? std::nullopt : std::optional(result);
  if (sign == '-') return __builtin_sub_overflow(left, right, &result) ? std::nullopt : std::optional(result);
  if (sign == '*') return __builtin_mul_overflow(left, right, &result) ? std::nullopt : std::optional(result);
  if (right == 0 || (right == -1 && left == INT64_MIN)) return std::nullopt;
  const int64_t rest = left % right;
  const bool is_below = rest != 0 && (rest < 0) != (right < 0);
  if (sign == '%') return is_below ? rest + right : rest;
  return left / right - (is_below ? 1 : 0);
}

constexpr const char* kEarlier = "the number of an earlier call";
constexpr const char* kTensor = "the place of a tensor";

bool is_tensor(std::string_view token) { return !token.empty() && (token.front() == '%' || token.front() == '$'); }

// %2:0
TensorSize read_tensor_size(std::string_view token, const std::vector<PreparedCall>& calls) {
  const size_t colon = std::min(token.find(':'), token.size());
  const std::string_view of = token.substr(0, colon);
  TensorSize size;
  size.is_result = of.front() == '$';
  size.place = size.is_result ? read_result(of, calls, kEarlier) : read_place(of, INT32_MAX, kTensor);
  size.dim = static_cast<int64_t>(read_place(token.substr(colon), INT32_MAX, "a colon and a dimension"));
  return size;
}

// %2:0, or %2:0;8;//
ComputedInteger read_computed(std::string_view token, const std::vector<PreparedCall>& calls) {
  std::string_view terms = token;
  ComputedInteger computed;
  size_t operands = 0;
  while (!terms.empty()) {
    const std::string_view text = take(&terms, ';');
    ComputedInteger::Term term;
    if (text == "//" || (text.size() == 1 && std::string_view("+-*%").find(text) != std::string_view::npos)) {
      if (operands < 2) fail_calls("expected two numbers before the sign ", text, " in ", token);
      term.sign = text.front();
      --operands;
    } else {
      if (is_tensor(text)) {
        term.size = read_tensor_size(text, calls);
      } else if (!read(text, &term.number)) {
        fail_calls("expected a size, an integer or a sign in ", token, ", got '", text, "'");
      }
      ++operands;
    }
    computed.terms.push_back(term);
  }
  if (operands != 1 || computed.terms.size() > kMostTerms) {
    fail_calls("expected one number of at most ", kMostTerms, " terms, got ", token);
  }
  return computed;
}

void read_integers(std::string_view token, const std::vector<PreparedCall>& calls, PreparedArgument* argument) {
  Integers* integers = &argument->integers;
  std::string_view items = token.substr(1, token.size() - 1);
  bool good = !items.empty() && items.back() == ']';
  if (good) items.remove_suffix(1);
  while (good && !items.empty()) {
    const std::string_view item = take(&items, ',');
    int64_t value = 0;
    if (is_tensor(item) || item.find(';') != std::string_view::npos) {
      argument->computed.push_back(read_computed(item, calls));
      argument->computed.back().item = integers->size();
    } else {
      good = read(item, &value);
    }
    integers->add(value);
  }
  if (!good) fail_calls("expected a list of integers, got ", token);
}

// %2[32:48], elements of a tensor.
void read_part(std::string_view token, PreparedArgument* argument) {
  std::string_view range = token;
  argument->integer = static_cast<int64_t>(read_place(take(&range, '['), INT32_MAX, kTensor));
  argument->is_part = true;
  const bool read_both = !range.empty() && range.back() == ']' && read(take(&range, ':'), &argument->begin) &&
                         read(range.substr(0, range.size() - 1), &argument->end);
  if (!read_both || argument->begin < 0 || argument->end < argument->begin) {
    fail_calls("expected elements of a tensor, as in %0[16:32], got ", token);
  }
}

PreparedArgument read_argument(std::string_view token, const std::vector<PreparedCall>& calls) {
  using Kind = PreparedArgument::Kind;
  PreparedArgument argument;
  argument.word = token;
  if (token == "-") {
    argument.kind = Kind::none;
  } else if (token.front() == '%') {
    argument.kind = Kind::tensor;
    if (token.back() == ']') {
      read_part(token, &argument);
    } else {
      argument.integer = static_cast<int64_t>(read_place(token, INT32_MAX, kTensor));
    }
  } else if (token.front() == '$') {
    argument.kind = Kind::result;
    argument.integer = static_cast<int64_t>(read_result(token, calls, kEarlier));
  } else if (token.front() == '[') {
    argument.kind = Kind::integers;
    read_integers(token, calls, &argument);
  } else if (token == "true" || token == "false") {
    argument.kind = Kind::boolean;
    argument.integer = token == "true" ? 1 : 0;
  } else if (read(token, &argument.integer)) {
    argument.kind = Kind::integer;
  } else if (read(token, &argument.number)) {
    argument.kind = Kind::number;
  } else {
    argument.kind = Kind::word;
    argument.integer = dtype_code_of(token);
  }
  return argument;
}

// (%2,$0), as the number of tensors and then each.
void read_tensors(std::string_view token, const std::vector<PreparedCall>& calls,
                  std::vector<PreparedArgument>* arguments) {
  std::string_view items = token.substr(1);
  bool good = items.size() > 1 && items.back() == ')';
  if (good) items.remove_suffix(1);
  const size_t number = arguments->size();
  arguments->emplace_back();
  while (good && !items.empty()) {
    const std::string_view item = take(&items, ',');
    good = is_tensor(item);
    if (good) arguments->push_back(read_argument(item, calls));
  }
  if (!good) fail_calls("expected a list of tensors, as in (%0,$1), got ", token);
  (*arguments)[number].kind = PreparedArgument::Kind::integer;
  (*arguments)[number].word = token;
  (*arguments)[number].integer = static_cast<int64_t>(arguments->size() - number - 1);
}

PreparedCall read_call(std::string_view line, const std::vector<PreparedCall>& calls) {
  const std::string_view name = take(&line, ' ');
  const auto found = chainable_ops().find(name);
  if (found == chainable_ops().end()) fail_calls("expected the name of an operator for chains, got '", name, "'");
  PreparedCall call = found->second;
  while (!line.empty()) {
    const std::string_view token = take(&line, ' ');
    if (token.empty()) fail_calls("expected one space between the arguments of ", name);
    if (token.front() == '(') {
      read_tensors(token, calls, &call.arguments);
    } else {
      call.arguments.push_back(read_argument(token, calls));
    }
  }
  return call;
}

// A result is needed until the last call that reads it, or by the caller.
void find_last_uses(PreparedCalls* prepared) {
  std::vector<size_t> last(prepared->calls.size() * kMostResults);
  for (size_t i = 0; i < prepared->calls.size(); ++i) {
    for (size_t own = 0; own < kMostResults; ++own) last[i * kMostResults + own] = i;
    each_result(prepared->calls[i], [&](size_t result) { last[result] = i; });
  }
  for (const size_t result : prepared->returned) last[result] = prepared->calls.size();
  for (size_t result = 0; result < last.size(); ++result) {
    if (last[result] < prepared->calls.size()) prepared->calls[last[result]].unused_after.push_back(result);
  }
}

// Whether a call takes a result for its first argument, and for nothing else.
bool takes_first(const PreparedCall& call, size_t result) {
  if (call.arguments.empty()) return false;
  size_t uses = 0;
  each_result(call, [&](size_t read) { uses += read == result ? 1 : 0; });
  const PreparedArgument& first = call.arguments.front();
  return first.kind == PreparedArgument::Kind::result && static_cast<size_t>(first.integer) == result && uses == 1;
}

// Convolutions, and pooling that is like one (conv_bands.h).
bool may_band(const PreparedCall& call) {
  constexpr size_t kKind = 1;  // in pool's schema
  const bool is_max_pool = call.name == "pool" && call.arguments.size() > kKind && call.arguments[kKind].word == "max";
  return call.name == "conv" || is_max_pool;
}

bool goes_on(const PreparedCall& before, size_t result, const PreparedCall& call) {
  const bool is_last = std::find(call.unused_after.begin(), call.unused_after.end(), result) != call.unused_after.end();
  return may_band(before) && may_band(call) && is_last && takes_first(call, result);
}

void find_runs(PreparedCalls* prepared) {
  std::vector<PreparedCall>& calls = prepared->calls;
  for (size_t i = calls.size(); i-- > 1;) {
    if (goes_on(calls[i - 1], (i - 1) * kMostResults, calls[i])) calls[i - 1].run_length = calls[i].run_length + 1;
  }
}

void find_rows(PreparedCalls* prepared) {
  std::vector<PreparedCall>& calls = prepared->calls;
  std::vector<bool> by_rows(calls.size() * kMostResults, true);
  for (const size_t result : prepared->returned) by_rows[result] = false;
  for (const PreparedCall& call : calls) {
    each_result(call, [&](size_t read) {
      if (call.reads != Reads::rows || !takes_first(call, read)) by_rows[read] = false;
    });
  }
  for (size_t i = 0; i < calls.size(); ++i) calls[i].read_by_rows = by_rows[i * kMostResults];
}

PreparedCalls read_calls(std::string_view text) {
  PreparedCalls prepared;
  while (text.substr(0, 7) != "return ") {
    if (text.empty()) fail_calls("expected a last line 'return $0' with what the chain returns");
    prepared.calls.push_back(read_call(take(&text, '\n'), prepared.calls));
  }
  text.remove_prefix(7);
  while (!text.empty()) {
    const std::string_view token = take(&text, ' ');
    if (token.empty() || token.front() != '$') fail_calls("expected results to return, as in 'return $0', got ", token);
    prepared.returned.push_back(read_result(token, prepared.calls, "the number of a call"));
  }
  find_last_uses(&prepared);
  find_runs(&prepared);
  find_rows(&prepared);
  prepared.notes = std::make_unique<std::atomic<uint64_t>[]>(prepared.calls.size());
  prepared.recordings = new_recordings();
  return prepared;
}

// Texts are long, and differ in their lengths or soon before their ends.
struct ShortHash {
  size_t operator()(const std::string& text) const {
    constexpr size_t kRead = 64;
    const std::string_view whole(text);
    return std::hash<std::string_view>()(whole.substr(whole.size() < kRead ? 0 : whole.size() - kRead)) + whole.size();
  }
};

PreparedCall* add_chainable(const char* name, Reads reads) {
  PreparedCall& call = chainable_ops()[name];
  call.name = name;
  call.reads = reads;
  return &call;
}

}  // namespace

ChainableOp::ChainableOp(const char* name, Chainable* op, Reads reads) { add_chainable(name, reads)->op = op; }
ChainableOp::ChainableOp(const char* name, ChainablePair* op, Reads reads) { add_chainable(name, reads)->pair = op; }
ChainableView::ChainableView(const char* name, Chainable* op) {
  PreparedCall* call = add_chainable(name, Reads::any);
  call->op = op;
  call->is_view = true;
}

void PreparedCall::run(const Stack& stack, Tensor* results) const {
  if (pair == nullptr) {
    results[0] = op(stack);
    return;
  }
  Pair both = pair(stack);
  results[0] = std::move(both.first);
  results[1] = std::move(both.second);
}

std::shared_ptr<const PreparedCalls> prepared_calls(std::string_view text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const PreparedCalls>, ShortHash> known;
  const std::string key(text);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  auto prepared = std::make_shared<const PreparedCalls>(read_calls(text));
  if (known.size() >= kMostTexts) known.clear();
  known.emplace(key, prepared);
  return prepared;
}

// ---- As a stack ----------------------------------------------------------------------------------------------------

namespace {

std::string_view name_of(PreparedArgument::Kind kind) {
  constexpr std::string_view kNames[] = {"None",     "a tensor",  "a tensor",           "an integer",
                                         "a number", "a boolean", "a list of integers", "a word"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace

const PreparedArgument& Stack::prepared(Kind expected) {
  const std::vector<PreparedArgument>& arguments = prepared_->arguments;
  if (taken_ >= arguments.size()) {
    fail_calls("expected more than ", arguments.size(), " arguments of ", prepared_->op);
  }
  const PreparedArgument& argument = arguments[taken_++];
  const bool is_tensor = expected == Kind::tensor && argument.kind == Kind::result;
  if (argument.kind != expected && !is_tensor) {
    fail_calls("expected ", name_of(expected), " for argument ", taken_, " of ", prepared_->op, ", got ",
               argument.word);
  }
  return argument;
}

bool Stack::is_none() {
  const std::vector<PreparedArgument>& arguments = prepared_->arguments;
  const bool none = taken_ < arguments.size() && arguments[taken_].kind == Kind::none;
  taken_ += none ? 1 : 0;
  return none;
}

const Tensor& Stack::prepared_tensor(bool is_result, size_t place, std::string_view word) const {
  if (is_result) return prepared_->results[place];
  if (place >= static_cast<size_t>(prepared_->tensors.size())) {
    fail_calls("expected places of the ", prepared_->tensors.size(), " tensors, got ", word);
  }
  return prepared_->tensors[static_cast<int64_t>(place)];
}

Tensor Stack::prepared_tensor() {
  const PreparedArgument& argument = prepared(Kind::tensor);
  const bool is_result = argument.kind == Kind::result;
  const Tensor& tensor = prepared_tensor(is_result, static_cast<size_t>(argument.integer), argument.word);
  if (!argument.is_part) return as_argument(tensor.borrow());
  if (tensor.dims() != 1 || tensor.size(0) < argument.end) {
    fail_calls("expected elements of a tensor in ", argument.word, ", got one of shape ", tensor.shape_text());
  }
  const int64_t count = argument.end - argument.begin;
  return as_argument(tensor.view(&count, tensor.strides(), 1, argument.begin * tensor.stride(0)));
}

Tensors Stack::prepared_tensors() {
  const int64_t count = prepared(Kind::integer).integer;
  std::vector<Tensor> tensors;
  tensors.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) tensors.push_back(prepared_tensor());
  return Tensors(std::move(tensors));
}

Tensor Stack::as_argument(Tensor tensor) const {
  tensor.set_argument(static_cast<int>(taken_) - 1);
  return tensor;
}

int64_t Stack::prepared_size(const TensorSize& size, std::string_view word) const {
  const Tensor& tensor = prepared_tensor(size.is_result, size.place, word);
  if (size.dim >= tensor.dims()) {
    fail_calls("expected dimensions of tensors in ", word, ", got ", size.dim, " of shape ", tensor.shape_text());
  }
  return tensor.size(size.dim);
}

int64_t Stack::prepared_integer(const ComputedInteger& computed, std::string_view word) const {
  int64_t operands[kMostTerms];
  size_t count = 0;
  for (const ComputedInteger::Term& term : computed.terms) {
    if (term.sign == 0) {
      operands[count++] = term.size ? prepared_size(*term.size, word) : term.number;
      continue;
    }
    const int64_t right = operands[--count];
    const std::optional<int64_t> result = computed_of(term.sign, operands[count - 1], right);
    if (!result) fail_calls("expected numbers that can be computed in ", word);
    operands[count - 1] = *result;
  }
  return operands[0];
}

Integers Stack::prepared_integers() {
  const PreparedArgument& argument = prepared(Kind::integers);
  Integers integers = argument.integers;
  for (const ComputedInteger& computed : argument.computed) {
    integers.set(computed.item, prepared_integer(computed, argument.word));
  }
  return integers;
}

int32_t Stack::prepared_dtype() {
  const PreparedArgument& argument = prepared(Kind::word);
  if (argument.integer < 0) fail_calls("expected the name of a dtype of ", prepared_->op, ", got ", argument.word);
  return static_cast<int32_t>(argument.integer);
}

}  // namespace xopt::ops
