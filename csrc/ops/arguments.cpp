// See arguments.h.
#include "ops/arguments.h"

#include <cstring>
#include <new>
#include <stdexcept>

#include "runtime/arena.h"
#include "runtime/outputs.h"
#include "runtime/registry.h"
#include "runtime/trace.h"

namespace xopt::ops {
namespace {

constexpr int64_t kMaxDims = 64;

void require(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("xopt: torch failed to ") + what);
}

Offload* asynchronous_offload() {
  Offload* offload = current_offload();
  return offload != nullptr && offload->is_asynchronous() ? offload : nullptr;
}

}  // namespace

int64_t elements_spanned(const int64_t* sizes, const int64_t* strides, int64_t dims) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (sizes[dim] == 0) return 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  return last + 1;
}

std::string list_text(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  return text + "]";
}

std::optional<DType> dtype_from_torch(int32_t code) {
  const TorchCodes& codes = torch_codes();
  if (code == codes.f32) return DType::f32;
  if (code == codes.bf16) return DType::bf16;
  if (code == codes.f16) return DType::f16;
  if (code == codes.s8) return DType::s8;
  if (code == codes.u8) return DType::u8;
  if (code == codes.s32) return DType::s32;
  return std::nullopt;
}

int32_t dtype_to_torch(DType dtype) {
  const TorchCodes& codes = torch_codes();
  switch (dtype) {
    case DType::f32:
      return codes.f32;
    case DType::bf16:
      return codes.bf16;
    case DType::f16:
      return codes.f16;
    case DType::s8:
      return codes.s8;
    case DType::u8:
      return codes.u8;
    case DType::s32:
      break;
  }
  return codes.s32;
}

std::string torch_dtype_name(int32_t code) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
  };
  for (const auto& [known, name] : names) {
    if (known == code) return name;
  }
  return "torch's dtype number " + std::to_string(code);
}

Tensor::Tensor(AtenTensorHandle handle) : handle_(handle) {
  if (handle == nullptr) return;
  int64_t *sizes = nullptr, *strides = nullptr;
  // These only fail for what has no strides at all, such as nested tensors, which reach no CPU kernel.
  if (aoti_torch_get_dim(handle, &dims_) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_sizes(handle, &sizes) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_strides(handle, &strides) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_dtype(handle, &dtype_code_) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_device_type(handle, &device_) != AOTI_TORCH_SUCCESS ||
      (!on_cpu() && aoti_torch_get_device_index(handle, &device_index_) != AOTI_TORCH_SUCCESS)) {
    device_ = -1;
  }
  sizes_ = sizes;
  strides_ = strides;
}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(borrowed_, other.borrowed_);
  sizes_ = other.sizes_;
  strides_ = other.strides_;
  dims_ = other.dims_;
  dtype_code_ = other.dtype_code_;
  device_ = other.device_;
  device_index_ = other.device_index_;
  argument_ = other.argument_;
  return *this;
}

Tensor::~Tensor() {
  if (handle_ == nullptr || borrowed_) return;
  Offload* offload = asynchronous_offload();
  if (offload == nullptr) {
    aoti_torch_delete_tensor_object(handle_);
    return;
  }
  offload->hold(handle_, [](void* handle) { aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(handle)); });
}

AtenTensorHandle Tensor::share() const {
  AtenTensorHandle handle = nullptr;
  require(aoti_torch_new_tensor_handle(handle_, &handle), "share a tensor");
  return handle;
}

Tensor Tensor::borrow() const {
  Tensor same(*this);
  same.borrowed_ = true;
  return same;
}

AtenTensorHandle Tensor::release() {
  if (borrowed_) return share();
  if (handle_ != nullptr && asynchronous_offload() != nullptr) {
    // A reference of ours, since the caller may drop the result before it is there.
    const Tensor ours(share());
  }
  return std::exchange(handle_, nullptr);
}

Tensor Tensor::empty_in_order(const int64_t* sizes, int64_t dims, DType dtype, const int64_t* order, bool keep) {
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    const int64_t dim = order[i];
    strides[dim] = stride;
    const int64_t at_least_one = sizes[dim] > 1 ? sizes[dim] : 1;
    if (__builtin_mul_overflow(stride, at_least_one, &stride)) throw std::bad_alloc();
  }
  return empty_of(stride, sizes, strides, dims, dtype, keep);
}

Tensor Tensor::empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dims, DType dtype) {
  return empty_of(elements_spanned(sizes, strides, dims), sizes, strides, dims, dtype, true);
}

// `elements`: from the first to the last in memory.
Tensor Tensor::empty_of(int64_t elements, const int64_t* sizes, const int64_t* strides, int64_t dims, DType dtype,
                        bool keep) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, dtype_size(dtype), &bytes)) throw std::bad_alloc();
  const Place& device = place();
  if (void* kept = keep && device.is_cpu() ? output_alloc(static_cast<size_t>(bytes)) : nullptr) {
    return adopt(kept, sizes, strides, dims, dtype_to_torch(dtype), device,
                 [](void* data, void*) { output_free(data); });
  }
  return allocate(sizes, strides, dims, dtype_to_torch(dtype), device);
}

Tensor Tensor::allocate(const int64_t* sizes, const int64_t* strides, int64_t dims, int32_t dtype_code,
                        const Place& device) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dims, sizes, strides, dtype_code, device.type, device.index, &handle) !=
      AOTI_TORCH_SUCCESS) {
    if (device.is_cpu()) throw std::bad_alloc();
    throw std::runtime_error("xopt: torch has no memory left on " + device.text() + " for a tensor of shape " +
                             list_text(sizes, dims) + " and dtype " + torch_dtype_name(dtype_code));
  }
  return Tensor(handle);
}

Tensor Tensor::empty_in_rows(const int64_t* sizes, int64_t dims, DType dtype, bool keep) {
  int64_t order[kMaxDims];
  if (dims > kMaxDims) throw std::runtime_error("xopt: tensors have at most 64 dimensions");
  for (int64_t i = 0; i < dims; ++i) order[i] = i;
  return empty_in_order(sizes, dims, dtype, order, keep);
}

Tensor Tensor::empty(const int64_t* sizes, int64_t dims, DType dtype) {
  return empty_in_rows(sizes, dims, dtype, true);
}
Tensor Tensor::empty_weight(const int64_t* sizes, int64_t dims, DType dtype) {
  return empty_in_rows(sizes, dims, dtype, false);
}

Tensor Tensor::empty_channels_last(const int64_t* sizes, int64_t dims, DType dtype) {
  int64_t order[kMaxDims] = {0};
  if (dims < 2 || dims > kMaxDims) throw std::runtime_error("xopt: channels_last needs 2 to 64 dimensions");
  for (int64_t i = 1; i + 1 < dims; ++i) order[i] = i + 1;
  order[dims - 1] = 1;
  return empty_in_order(sizes, dims, dtype, order);
}

Tensor Tensor::packed_bytes(int64_t bytes) {
  const int64_t stride = 1;
  return adopt(weight_alloc(static_cast<size_t>(bytes)), &bytes, &stride, 1, torch_codes().u8, place(),
               [](void* data, void*) { weight_free(data); });
}

Tensor Tensor::adopt(void* data, const int64_t* sizes, const int64_t* strides, int64_t dims, int32_t dtype_code,
                     const Place& device, void (*deleter)(void*, void*), void* context) {
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status = torch_from_blob(data, dims, sizes, strides, 0, dtype_code, device.type, device.index,
                                                &handle, aoti_torch_layout_strided(), nullptr, 0, deleter, context);
  if (status != AOTI_TORCH_SUCCESS) {
    deleter(data, context);
    throw std::bad_alloc();
  }
  return Tensor(handle);
}

namespace {

struct Watched {
  AtenTensorHandle whole;
  void (*dropped)(void* data);
};

void drop_watched(void* data, void* context) {
  const auto* watched = static_cast<Watched*>(context);
  watched->dropped(data);
  aoti_torch_delete_tensor_object(watched->whole);
  delete watched;
}

}  // namespace

Tensor Tensor::watched(Tensor whole, void (*dropped)(void* data)) {
  const int64_t *sizes = whole.sizes_, *strides = whole.strides_;
  void* data = whole.mutable_data();
  auto* context = new Watched{std::exchange(whole.handle_, nullptr), dropped};
  return adopt(data, sizes, strides, whole.dims_, whole.dtype_code_, whole.device(), &drop_watched, context);
}

Tensor Tensor::copied_to(Tensor copy) const {
  if (Offload* offload = asynchronous_offload()) offload->wait();  // torch copies on the host
  require(aoti_torch_copy_(copy.handle_, handle_, 0), "copy a tensor");
  return copy;
}

Tensor Tensor::copied_in_rows(const Place& device) const {
  int64_t strides[kMaxDims] = {1};
  int64_t stride = 1;
  for (int64_t dim = dims_ - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes_[dim] > 1 ? sizes_[dim] : 1;
  }
  return copied_to(allocate(sizes_, strides, dims_, dtype_code_, device));
}

Tensor Tensor::first(int64_t count) const {
  return adopt(mutable_data(), &count, strides_, 1, dtype_code_, device(), [](void*, void*) {});
}
Tensor Tensor::view(const int64_t* sizes, const int64_t* strides, int64_t dims, int64_t first_element) const {
  AtenTensorHandle handle = nullptr;
  require(
      aoti_torch__reinterpret_tensor(handle_, dims, sizes, strides, first_element, &handle),  // from its own first on
      "give a view of a tensor");
  return Tensor(handle);
}
Tensor Tensor::host_copy() const { return copied_in_rows({torch_codes().cpu, -1, {}}); }
Tensor Tensor::placed_copy() const { return copied_in_rows(place()); }
Tensor Tensor::contiguous_copy() const { return contiguous_copy(sizes_, dims_); }
Tensor Tensor::contiguous_copy(const int64_t* sizes, int64_t dims) const {
  return copied_to(empty(sizes, dims, copied_dtype()));
}
Tensor Tensor::channels_last_copy() const { return copied_to(empty_channels_last(sizes_, dims_, copied_dtype())); }

DType Tensor::copied_dtype() const {
  const std::optional<DType> dtype = dtype_from_torch(dtype_code_);
  if (!dtype) throw std::runtime_error("xopt: cannot copy a tensor of " + torch_dtype_name(dtype_code_));
  return *dtype;
}

// The stable ABI cannot ask a tensor whether it requires a gradient, but a view of it under grad mode is a leaf of the
// autograd graph exactly if it does not.
bool Tensor::requires_grad() const {
  StableIValue stack[1];
  stack[0] = torch::stable::detail::from(share());
  require(torch_call_dispatcher("aten::alias", "", stack, TORCH_ABI_VERSION), "make an alias of a tensor");
  require(torch_call_dispatcher("aten::is_leaf", "", stack, TORCH_ABI_VERSION), "ask a tensor for is_leaf");
  return !torch::stable::detail::to<bool>(stack[0]);
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (int64_t dim = 0; dim < dims_; ++dim) count *= sizes_[dim];
  return count;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  bool contiguous = true;
  for (int64_t dim = dims_ - 1; dim >= 0; --dim) {
    contiguous &= sizes_[dim] <= 1 || strides_[dim] == expected;
    expected *= sizes_[dim];
  }
  return contiguous;
}

const void* Tensor::data() const {
  const void* data = nullptr;
  require(torch_get_const_data_ptr(handle_, &data), "give the data of a tensor");
  return data;
}

void* Tensor::mutable_data() const {
  void* data = nullptr;
  require(torch_get_mutable_data_ptr(handle_, &data), "give the data of a tensor");
  return data;
}

Integers::Integers(StableListHandle list) {
  size_t size = 0;
  const bool read = torch_list_size(list, &size) == AOTI_TORCH_SUCCESS;
  size_ = static_cast<int64_t>(size);
  for (size_t i = 0; read && i < size && i < static_cast<size_t>(kMost); ++i) {
    StableIValue item = 0;
    if (torch_list_get_item(list, i, &item) == AOTI_TORCH_SUCCESS)
      values_[i] = torch::stable::detail::to<int64_t>(item);
  }
  torch_delete_list(list);
}

void Integers::add(int64_t value) {
  if (size_ < kMost) values_[size_] = value;
  ++size_;
}

Tensors::Tensors(StableListHandle list) {
  size_t size = 0;
  const bool read = torch_list_size(list, &size) == AOTI_TORCH_SUCCESS;
  tensors_.reserve(size);
  for (size_t i = 0; read && i < size; ++i) {
    StableIValue item = 0;
    // Each item is a handle of its own, and this list's to delete.
    if (torch_list_get_item(list, i, &item) == AOTI_TORCH_SUCCESS)
      tensors_.emplace_back(torch::stable::detail::to<AtenTensorHandle>(item));
  }
  torch_delete_list(list);
}

// Kernels will have pushed out of the caches what references are counted in, and each count would wait for its own: it all
// comes back together (BERT-base's 163 tensors 121 to 90 us). A handle is the address of torch's tensor, and the first word
// there that of its counts; were it something else, nothing would come of it.
Tensors::~Tensors() {
  constexpr uintptr_t kLine = 64;
  for (const Tensor& tensor : tensors_) __builtin_prefetch(tensor.get());
  for (const Tensor& tensor : tensors_) {
    if (!tensor) continue;
    uintptr_t counts = 0;
    std::memcpy(&counts, static_cast<const void*>(tensor.get()), sizeof(counts));
    for (const uintptr_t line : {counts, counts + kLine}) __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

std::string_view String::text() const {
  if (word_ != nullptr) return *word_;
  const char* text = "";
  size_t length = 0;
  if (torch_string_c_str(handle_, &text) != AOTI_TORCH_SUCCESS) return "";
  torch_string_length(handle_, &length);
  if (tracing()) trace_name(text, length);
  return {text, length};
}

}  // namespace xopt::ops
