// Checks of arguments. Every error names the op, the argument, what was expected and what came.
#pragma once

#include <charconv>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "ops/arguments.h"

namespace xopt::ops {

// A part of a message. Not by streams: they find their facets in tables of the C++ library, and where a process holds
// two of it (a compiler that links it statically, beside torch's), to print a number ends in the wrong one's code.
template <class Part>
void append(std::string* message, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    static_assert(!std::is_same_v<Part, char> && !std::is_same_v<Part, bool>);
    char digits[32];
    const std::to_chars_result end = std::to_chars(digits, digits + sizeof(digits), part);
    message->append(digits, end.ptr);
  } else {
    *message += part;
  }
}

// Throws "xopt::<op>: <argument>: <parts...>".
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const char* op, const char* argument, const Parts&... parts) {
  std::string message = std::string("xopt::") + op + ": " + argument + ": ";
  (append(&message, parts), ...);
  throw std::runtime_error(message);
}

// An argument of a call, with the names that its errors need.
struct Checked {
  const char* op;
  const char* name;
  const Tensor& tensor;

  template <class... Parts>
  [[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) const {
    ops::fail(op, name, parts...);
  }
  // That it lies where the call's first tensor does.
  void in_place() const {
    const Place& here = place();
    if (!here.problem.empty()) fail(here.problem);
    if (tensor.is_in(here)) return;
    fail("expected a tensor on ", here.text(), ", got one on ", tensor.device().text());
  }
  // The same, of operators that compute on the CPU only.
  void cpu() const { in_place(); }
  // The dtype, which must be one of `allowed`.
  DType dtype(std::initializer_list<DType> allowed) const {
    for (const DType candidate : allowed) {
      if (dtype_to_torch(candidate) == tensor.dtype_code()) return candidate;
    }
    std::string expected;
    for (const DType candidate : allowed) {
      expected += (expected.empty() ? "" : " or ") + torch_dtype_name(dtype_to_torch(candidate));
    }
    fail("expected dtype ", expected, ", got ", torch_dtype_name(tensor.dtype_code()));
  }
  void shape(std::initializer_list<int64_t> expected) const {
    bool same = tensor.dims() == static_cast<int64_t>(expected.size());
    for (int64_t dim = 0; same && dim < tensor.dims(); ++dim) same = tensor.size(dim) == expected.begin()[dim];
    if (same) return;
    std::string text;
    for (const int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
    fail("expected shape [", text, "], got ", tensor.shape_text());
  }
};

// A dimension as it was given, counted from the end where it is negative, of so many that there are.
inline int64_t dim_of(const char* op, const char* name, int64_t given, int64_t count) {
  const int64_t dim = given < 0 ? given + count : given;
  if (dim < 0 || dim >= count) fail(op, name, "expected one of ", count, " dimensions, got ", given);
  return dim;
}

// A name out of a table of {name, value}.
template <class Value>
struct NamedValue {
  std::string_view name;
  Value value;
};

template <class Value, size_t count>
Value parse_name(const char* op, const char* argument, std::string_view text, const NamedValue<Value> (&known)[count]) {
  for (const NamedValue<Value>& candidate : known) {
    if (candidate.name == text) return candidate.value;
  }
  std::string names;
  for (const NamedValue<Value>& candidate : known) names += (names.empty() ? "" : ", ") + std::string(candidate.name);
  fail(op, argument, "expected one of ", names, ", got '", text, "'");
}

inline constexpr std::initializer_list<DType> kFloating = {DType::f32, DType::bf16, DType::f16};
inline constexpr std::initializer_list<DType> kEveryDType = {DType::f32, DType::bf16, DType::f16,
                                                             DType::s8,  DType::u8,   DType::s32};

// A dtype argument, which must be one of `allowed`.
inline DType parse_dtype(const char* op, const char* argument, int32_t code, std::initializer_list<DType> allowed) {
  for (const DType candidate : allowed) {
    if (dtype_to_torch(candidate) == code) return candidate;
  }
  std::string names;
  for (const DType candidate : allowed) {
    names += (names.empty() ? "" : ", ") + torch_dtype_name(dtype_to_torch(candidate));
  }
  fail(op, argument, "expected one of ", names, ", got ", torch_dtype_name(code));
}

// These ops have no gradient. Under grad mode, an argument that wants one is an error: the result would silently be
// cut off from the graph. Costs nothing under no_grad and inference_mode.
inline void check_no_gradient(std::initializer_list<Checked> arguments) {
  if (!aoti_torch_grad_mode_is_enabled()) return;
  for (const Checked& argument : arguments) {
    if (!argument.tensor || !argument.tensor.requires_grad()) continue;
    argument.fail(
        "requires a gradient, but this op has none: call it under torch.no_grad() or torch.inference_mode(), "
        "or pass the argument's detach()");
  }
}

}  // namespace xopt::ops
