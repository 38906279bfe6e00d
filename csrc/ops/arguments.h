// The arguments of a boxed op, taken off torch's stack by their type and in the order of the schema.
//
// torch/csrc/stable/library.h has TORCH_BOX for this. It is not used because it costs a shared_ptr for each tensor,
// copies each output once more, and leaks a std::string for each `str` argument (torch 2.10 to 2.13). Here every
// argument is owned by a plain member of a struct, whose constructor reads them all before anything is checked, so that
// an error leaks nothing.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/place.h"
#include "tiles/types.h"

namespace xopt::ops {

// torch's numbers for dtypes and devices. They are no part of its ABI, so they are asked for once.
struct TorchCodes {
  int32_t f32 = aoti_torch_dtype_float32();
  int32_t bf16 = aoti_torch_dtype_bfloat16();
  int32_t f16 = aoti_torch_dtype_float16();
  int32_t s8 = aoti_torch_dtype_int8();
  int32_t u8 = aoti_torch_dtype_uint8();
  int32_t s32 = aoti_torch_dtype_int32();
  int32_t cpu = aoti_torch_device_type_cpu();
  int32_t xpu = aoti_torch_device_type_xpu();
};
inline const TorchCodes& torch_codes() {
  static const TorchCodes codes;
  return codes;
}

std::optional<DType> dtype_from_torch(int32_t code);
int32_t dtype_to_torch(DType dtype);
std::string torch_dtype_name(int32_t code);
std::string list_text(const int64_t* values, int64_t count);  // "[2, 3]"
// From a tensor's first element to its last in memory, of strides of 0 and more.
int64_t elements_spanned(const int64_t* sizes, const int64_t* strides, int64_t dims);

// Numbers that are somebody else's. Their text is made where an error wants it: it costs as much as a small product.
struct ListView {
  const int64_t* values;
  int64_t count;
  int64_t operator[](int64_t i) const { return values[i]; }
  std::string text() const { return list_text(values, count); }
};

// An owned tensor, or one that is borrowed of its owner. The sizes and strides are those of the tensor object and live as
// long as it.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle);
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept;
  ~Tensor();

  // A new tensor of this shape in contiguous layout, uninitialised, where the operator's tensors lie.
  static Tensor empty(const int64_t* sizes, int64_t dims, DType dtype);
  // The same for a weight: the memory of what is made once is not kept when it is freed.
  static Tensor empty_weight(const int64_t* sizes, int64_t dims, DType dtype);
  // The same with dimension 1 last in memory.
  static Tensor empty_channels_last(const int64_t* sizes, int64_t dims, DType dtype);
  // The same with dimensions in this order, from the outermost in memory to the innermost; `keep`: as of `empty`.
  static Tensor empty_in_order(const int64_t* sizes, int64_t dims, DType dtype, const int64_t* order, bool keep = true);
  // The same with any strides.
  static Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dims, DType dtype);
  // uint8 [bytes] in memory of weight_alloc, for a packed weight.
  static Tensor packed_bytes(int64_t bytes);
  // The same elements as `whole`, whose memory it keeps; when that is dropped, `dropped` is told where it was.
  static Tensor watched(Tensor whole, void (*dropped)(void* data));
  Tensor contiguous_copy() const;
  Tensor contiguous_copy(const int64_t* sizes, int64_t dims) const;  // broadcast to this shape
  Tensor channels_last_copy() const;
  Tensor copied_to(Tensor copy) const;  // which this one's shape broadcasts to, and which is returned
  // The same memory in other dimensions, from an element on.
  Tensor view(const int64_t* sizes, const int64_t* strides, int64_t dims, int64_t first_element) const;
  Tensor first(int64_t count) const;  // of one dimension: its first elements, in the same memory
  Tensor host_copy() const;           // on the CPU; waits where the tensor lies on another device
  Tensor placed_copy() const;         // contiguous, where the operator's tensors lie

  explicit operator bool() const { return handle_ != nullptr; }
  int64_t dims() const { return dims_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  const int64_t* sizes() const { return sizes_; }
  const int64_t* strides() const { return strides_; }
  int64_t numel() const;
  bool is_contiguous() const;
  int32_t dtype_code() const { return dtype_code_; }
  bool requires_grad() const;  // slow; to be asked under grad mode only
  Place device() const { return {device_, device_index_, {}}; }
  bool is_in(const Place& place) const { return device_ == place.type && (device_index_ == place.index || on_cpu()); }
  bool on_cpu() const { return device_ == torch_codes().cpu; }
  const void* data() const;
  void* mutable_data() const;
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle share() const;  // another reference
  Tensor borrow() const;           // the same one, for as long as this one lives
  AtenTensorHandle release();
  ListView shape() const { return {sizes_, dims_}; }
  // Which argument of a prepared call it is, counted from 0; -1: none, or a copy that was made of one.
  int argument() const { return argument_; }
  void set_argument(int argument) { argument_ = argument; }
  std::string shape_text() const { return shape().text(); }  // "[2, 3]"

 private:
  Tensor(const Tensor&) = default;  // a borrowed one's beginning: who owns the handle is not asked
  static Tensor adopt(void* data, const int64_t* sizes, const int64_t* strides, int64_t dims, int32_t dtype_code,
                      const Place& device, void (*deleter)(void* data, void* context), void* context = nullptr);
  static Tensor allocate(const int64_t* sizes, const int64_t* strides, int64_t dims, int32_t dtype_code,
                         const Place& device);
  Tensor copied_in_rows(const Place& device) const;
  static Tensor empty_in_rows(const int64_t* sizes, int64_t dims, DType dtype, bool keep);
  static Tensor empty_of(int64_t elements, const int64_t* sizes, const int64_t* strides, int64_t dims, DType dtype,
                         bool keep);
  DType copied_dtype() const;

  AtenTensorHandle handle_ = nullptr;
  bool borrowed_ = false;
  const int64_t* sizes_ = nullptr;
  const int64_t* strides_ = nullptr;
  int64_t dims_ = 0;
  int32_t dtype_code_ = 0;
  int32_t device_ = 0;
  int32_t device_index_ = -1;
  int argument_ = -1;
};

// An owned `str` argument, or the word of a prepared call.
class String {
 public:
  explicit String(StringHandle handle) : handle_(handle) {}
  explicit String(const std::string* word) : word_(word) {}
  String(const String&) = delete;
  String& operator=(const String&) = delete;
  ~String() {
    if (handle_ != nullptr) torch_delete_string(handle_);
  }
  std::string_view text() const;

 private:
  StringHandle handle_ = nullptr;
  const std::string* word_ = nullptr;
};

// An `int[]` argument of at most kMost items.
class Integers {
 public:
  static constexpr int64_t kMost = 8;
  Integers() = default;
  explicit Integers(StableListHandle list);
  void add(int64_t value);
  void set(int64_t i, int64_t value) {
    if (i < kMost) values_[i] = value;
  }
  int64_t size() const { return size_; }  // as given, also where that is more than kMost
  int64_t operator[](int64_t i) const { return values_[i]; }
  const int64_t* data() const { return values_; }  // zeros after the last
  ListView view() const { return {values_, size_ < kMost ? size_ : kMost}; }
  std::string text() const { return view().text(); }  // "[2, 3]"

 private:
  int64_t size_ = 0;
  int64_t values_[kMost] = {};
};

// A `Tensor[]` argument.
class Tensors {
 public:
  explicit Tensors(StableListHandle list);
  explicit Tensors(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}
  ~Tensors();
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;
  int64_t size() const { return static_cast<int64_t>(tensors_.size()); }
  Tensor& operator[](int64_t i) { return tensors_[static_cast<size_t>(i)]; }
  const Tensor& operator[](int64_t i) const { return tensors_[static_cast<size_t>(i)]; }

 private:
  std::vector<Tensor> tensors_;
};

// The size of a tensor along a dimension.
struct TensorSize {
  bool is_result = false;
  size_t place = 0;  // of the tensor, or of the result
  int64_t dim = 0;
};

// Among the integers of a prepared call one that is made of sizes: numbers, sizes and signs, each of which is behind the
// two that it takes.
struct ComputedInteger {
  struct Term {
    char sign = 0;                   // one of + - * / (down to the next integer) % as Python has them; 0: it is
    int64_t number = 0;              // a number, unless it is
    std::optional<TensorSize> size;  // a size
  };
  std::vector<Term> terms;
  int64_t item = 0;  // which of the integers it is
};

// An argument of a call whose text was read before (ops/prepared.h): a tensor by its place, one or several numbers, a word.
struct PreparedArgument {
  enum class Kind : uint8_t { none, tensor, result, integer, number, boolean, integers, word };

  Kind kind = Kind::none;
  std::string word;      // as it was written
  int64_t integer = 0;   // of tensors and results their place, of booleans 0 or 1, of words a dtype's number or -1
  bool is_part = false;  // only elements [begin, end) of a tensor with one dimension
  int64_t begin = 0, end = 0;
  double number = 0.;
  Integers integers;
  std::vector<ComputedInteger> computed;  // those of the integers that are made of sizes
};

// Where the arguments of a prepared call are, and the tensors that they speak of.
struct PreparedArguments {
  const std::string& op;
  const std::vector<PreparedArgument>& arguments;
  const Tensors& tensors;
  const std::vector<Tensor>& results;
  bool read_by_rows = false;  // the first result (PreparedCall)
};

// Reads a call's arguments from the first on: those on torch's stack, or those of a prepared call. Members of an argument
// struct are initialised in the order of their declaration, which therefore is the order of the schema.
class Stack {
 public:
  explicit Stack(const StableIValue* values) : next_(values) {}
  explicit Stack(const PreparedArguments* prepared) : prepared_(prepared) {}

  Tensor tensor() { return prepared_ != nullptr ? prepared_tensor() : Tensor(pop<AtenTensorHandle>()); }
  Tensor optional_tensor() {
    if (prepared_ != nullptr) return is_none() ? Tensor() : prepared_tensor();
    return Tensor(pop<std::optional<AtenTensorHandle>>().value_or(nullptr));
  }
  Integers integers() { return prepared_ != nullptr ? prepared_integers() : Integers(pop<StableListHandle>()); }
  Tensors tensors() { return prepared_ != nullptr ? prepared_tensors() : Tensors(pop<StableListHandle>()); }
  String string() { return prepared_ != nullptr ? String(&prepared(Kind::word).word) : String(pop<StringHandle>()); }
  int64_t integer() { return prepared_ != nullptr ? prepared(Kind::integer).integer : pop<int64_t>(); }
  double number() { return prepared_ != nullptr ? prepared(Kind::number).number : pop<double>(); }
  std::optional<double> optional_number() {
    if (prepared_ != nullptr) return is_none() ? std::nullopt : std::optional(prepared(Kind::number).number);
    return pop<std::optional<double>>();
  }
  bool boolean() { return prepared_ != nullptr ? prepared(Kind::boolean).integer != 0 : pop<bool>(); }
  int32_t dtype_code() { return prepared_ != nullptr ? prepared_dtype() : pop<int32_t>(); }
  std::optional<int32_t> optional_dtype_code() {
    if (prepared_ != nullptr) return is_none() ? std::nullopt : std::optional(prepared_dtype());
    return pop<std::optional<int32_t>>();
  }
  // Whether rows of the first result may have anything between them: nobody sees it but operators that read rows.
  bool may_space_rows() const { return prepared_ != nullptr && prepared_->read_by_rows; }

 private:
  using Kind = PreparedArgument::Kind;

  template <class T>
  T pop() {
    return torch::stable::detail::to<T>(*next_++);
  }
  const PreparedArgument& prepared(Kind expected);  // the next one
  bool is_none();                                   // whether the next one is, and then it is taken
  Tensor prepared_tensor();
  Tensors prepared_tensors();
  Tensor as_argument(Tensor tensor) const;  // the one taken last
  const Tensor& prepared_tensor(bool is_result, size_t place, std::string_view word) const;
  Integers prepared_integers();
  int64_t prepared_size(const TensorSize& size, std::string_view word) const;
  int64_t prepared_integer(const ComputedInteger& computed, std::string_view word) const;
  int32_t prepared_dtype();

  const StableIValue* next_ = nullptr;
  const PreparedArguments* prepared_ = nullptr;
  size_t taken_ = 0;
};

inline void return_tensor(StableIValue* stack, int index, Tensor&& tensor) {
  stack[index] = torch::stable::detail::from(tensor.release());
}

}  // namespace xopt::ops
