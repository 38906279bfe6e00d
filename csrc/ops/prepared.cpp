// See prepared.h. Here is also how a stack takes its arguments from a prepared call.
#include "ops/prepared.h"

#include <charconv>
#include <map>
#include <mutex>
#include <system_error>
#include <unordered_map>

#include "ops/check.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "chain";
constexpr size_t kMostTexts = 1024;  // that are kept: far more than models have chains

std::map<std::string, Chainable*, std::less<>>& chainable_ops() {
  static std::map<std::string, Chainable*, std::less<>> ops;
  return ops;
}

template <class... Parts>
[[noreturn]] void fail_calls(const Parts&... parts) {
  fail(kOp, "calls", parts...);
}

// ---- From text -----------------------------------------------------------------------------------------------------

// What stands before the next separator, which is taken off as well.
std::string_view take(std::string_view* text, char separator) {
  const size_t end = text->find(separator);
  const std::string_view taken = text->substr(0, end);
  *text = end == std::string_view::npos ? std::string_view() : text->substr(end + 1);
  return taken;
}

// False where the text is no such number, or more than one. By std::from_chars, to which the locale is nothing.
template <class Number>
bool read(std::string_view text, Number* value) {
  const char* begin = text.data();
  const char* end = begin + text.size();
  const std::from_chars_result found = std::from_chars(begin, end, *value);
  return found.ec == std::errc() && found.ptr == end;
}

size_t read_place(std::string_view token, size_t count, const char* what) {
  int64_t place = -1;
  if (!read(token.substr(1), &place) || place < 0 || place >= static_cast<int64_t>(count)) {
    fail_calls("expected ", what, " below ", count, ", got ", token);
  }
  return static_cast<size_t>(place);
}

int64_t dtype_code_of(std::string_view name) {
  for (const DType dtype : kEveryDType) {
    if (torch_dtype_name(dtype_to_torch(dtype)) == name) return dtype_to_torch(dtype);
  }
  return -1;
}

void read_integers(std::string_view token, Integers* integers) {
  std::string_view items = token.substr(1, token.size() - 1);
  bool good = !items.empty() && items.back() == ']';
  if (good) items.remove_suffix(1);
  while (good && !items.empty()) {
    int64_t value = 0;
    good = read(take(&items, ','), &value);
    integers->add(value);
  }
  if (!good) fail_calls("expected a list of integers, got ", token);
}

PreparedArgument read_argument(std::string_view token, size_t results) {
  using Kind = PreparedArgument::Kind;
  PreparedArgument argument;
  argument.word = token;
  if (token == "-") {
    argument.kind = Kind::none;
  } else if (token.front() == '%') {
    argument.kind = Kind::tensor;
    argument.integer = static_cast<int64_t>(read_place(token, INT32_MAX, "the place of a tensor"));
  } else if (token.front() == '$') {
    argument.kind = Kind::result;
    argument.integer = static_cast<int64_t>(read_place(token, results, "the number of an earlier call"));
  } else if (token.front() == '[') {
    argument.kind = Kind::integers;
    read_integers(token, &argument.integers);
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

PreparedCall read_call(std::string_view line, size_t results) {
  const std::string_view name = take(&line, ' ');
  const auto found = chainable_ops().find(name);
  if (found == chainable_ops().end()) fail_calls("expected the name of an operator for chains, got '", name, "'");
  PreparedCall call{found->first, found->second, {}, {}};
  while (!line.empty()) {
    const std::string_view token = take(&line, ' ');
    if (token.empty()) fail_calls("expected one space between the arguments of ", name);
    call.arguments.push_back(read_argument(token, results));
  }
  return call;
}

// A result is needed until the last call that reads it, or by the caller.
void find_last_uses(PreparedCalls* prepared) {
  std::vector<size_t> last(prepared->calls.size());
  for (size_t i = 0; i < prepared->calls.size(); ++i) {
    last[i] = i;
    for (const PreparedArgument& argument : prepared->calls[i].arguments) {
      if (argument.kind == PreparedArgument::Kind::result) last[static_cast<size_t>(argument.integer)] = i;
    }
  }
  for (const size_t result : prepared->returned) last[result] = prepared->calls.size();
  for (size_t result = 0; result < last.size(); ++result) {
    if (last[result] < prepared->calls.size()) prepared->calls[last[result]].unused_after.push_back(result);
  }
}

PreparedCalls read_calls(std::string_view text) {
  PreparedCalls prepared;
  while (text.substr(0, 7) != "return ") {
    if (text.empty()) fail_calls("expected a last line 'return $0' with what the chain returns");
    prepared.calls.push_back(read_call(take(&text, '\n'), prepared.calls.size()));
  }
  text.remove_prefix(7);
  while (!text.empty()) {
    const std::string_view token = take(&text, ' ');
    if (token.empty() || token.front() != '$') fail_calls("expected results to return, as in 'return $0', got ", token);
    prepared.returned.push_back(read_place(token, prepared.calls.size(), "the number of a call"));
  }
  find_last_uses(&prepared);
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

}  // namespace

ChainableOp::ChainableOp(const char* name, Chainable* op) { chainable_ops().emplace(name, op); }

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

Tensor Stack::prepared_tensor() {
  const PreparedArgument& argument = prepared(Kind::tensor);
  if (argument.kind == Kind::result) return prepared_->results[static_cast<size_t>(argument.integer)].borrow();
  if (argument.integer >= prepared_->tensors.size()) {
    fail_calls("expected places of the ", prepared_->tensors.size(), " tensors, got ", argument.word);
  }
  return prepared_->tensors[argument.integer].borrow();
}

int32_t Stack::prepared_dtype() {
  const PreparedArgument& argument = prepared(Kind::word);
  if (argument.integer < 0) fail_calls("expected the name of a dtype of ", prepared_->op, ", got ", argument.word);
  return static_cast<int32_t>(argument.integer);
}

}  // namespace xopt::ops
