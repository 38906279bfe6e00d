// Calls of kernels, which operators note while a chain records what it runs (ops/replay.h): to be made again with tensors
// that lie elsewhere.
//
// An operator that computes nothing but by such calls notes each of them, with every pointer in it:
//   kernel(call);
//   if (NotedCall* noted = note_call(&run_kernel, call)) {
//     noted->reads(call.input.data, input);
//     noted->writes(call.out, 0);
//   }
// A pointer that is left out would be the recorded run's for ever, into memory that is somebody else's by then.
#pragma once

#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels/packed.h"
#include "ops/arguments.h"

namespace xopt::ops {

// Where something lies: so many bytes behind the beginning of one of the chain's tensors, of a result, or of the block of
// memory that results share.
struct Where {
  enum class In : uint8_t { nowhere, tensor, result, block };
  In in = In::nowhere;
  size_t place = 0;
  int64_t bytes = 0;
};

// The tensors of a run, and its results so far.
struct Addresses {
  const uint8_t* of(const Where& where) const {
    if (where.in == Where::In::block) return block + where.bytes;
    return (where.in == Where::In::tensor ? tensors[where.place]
                                          : static_cast<const uint8_t*>(results[where.place].data())) +
           where.bytes;
  }

  std::vector<const uint8_t*> tensors;
  std::vector<Tensor>& results;
  const uint8_t* block = nullptr;
  bool apart = false;  // images are done some at a time
};

class NotedCall {
 public:
  // In the call; what it points into is an argument of the operator (counted from 0) or a result.
  struct Pointer {
    size_t offset;
    const void* value;
    int argument, result;  // -1: it is none
    Where where;           // for the one who records to fill in; nowhere: it stays as it is
    Where apart;           // the same for a run that does images some at a time (image_groups.h)
    bool stays = false;    // there, all of them at the same place
  };
  // A packed weight, whose header says what the call was made for.
  struct Packed {
    int argument;
    PackedHeader header;
    size_t tensor;  // of the chain's, for the one who records to fill in
  };

  virtual ~NotedCall() = default;
  NotedCall(const NotedCall&) = delete;
  NotedCall& operator=(const NotedCall&) = delete;

  // A field of the call that points into a tensor, or nowhere.
  template <class T>
  void reads(T* const& field, const Tensor& tensor) {
    if (field != nullptr) add(reinterpret_cast<const uint8_t*>(&field), field, tensor.argument(), -1);
  }
  template <class T>
  void writes(T* const& field, int result) {
    if (field != nullptr) add(reinterpret_cast<const uint8_t*>(&field), field, -1, result);
  }
  void reads(const PackedWeight& weight, const Tensor& packed);

  virtual void run(const Addresses& at) const = 0;

  std::vector<Pointer> pointers;
  std::vector<Packed> packed;

 protected:
  explicit NotedCall(const void* call) : noted_(static_cast<const uint8_t*>(call)) {}

  void put(const Addresses& at, void* call) const {
    for (const Pointer& pointer : pointers) {
      if (pointer.where.in == Where::In::nowhere) continue;
      const auto address = reinterpret_cast<uintptr_t>(at.of(at.apart ? pointer.apart : pointer.where));
      std::memcpy(static_cast<uint8_t*>(call) + pointer.offset, &address, sizeof(address));
    }
  }

 private:
  void add(const uint8_t* field, const void* value, int argument, int result);

  const uint8_t* const noted_;  // the call that was noted: nothing but the place that fields are counted from
};

template <class Call>
class NotedCallOf final : public NotedCall {
  static_assert(std::is_trivially_copyable_v<Call>);

 public:
  using Run = void (*)(const Call& call);
  NotedCallOf(Run run, const Call& call) : NotedCall(&call), run_(run), call_(call) {}

  Call with(const Addresses& at) const {
    Call call = call_;
    put(at, &call);
    return call;
  }
  void run(const Addresses& at) const override { run_(with(at)); }
  const Call& noted() const { return call_; }

 private:
  const Run run_;
  const Call call_;
};

using NotedCalls = std::vector<std::unique_ptr<NotedCall>>;

// While one stands, what this thread's operators note comes to it.
class CallNotes {
 public:
  CallNotes() : outer_(std::exchange(standing(), this)) {}
  ~CallNotes() { standing() = outer_; }
  CallNotes(const CallNotes&) = delete;
  CallNotes& operator=(const CallNotes&) = delete;

  static CallNotes*& standing();
  void add(std::unique_ptr<NotedCall> call) { calls_.push_back(std::move(call)); }
  NotedCalls take() { return std::exchange(calls_, {}); }

 private:
  CallNotes* const outer_;
  NotedCalls calls_;
};

// nullptr: nobody wants to know.
template <class Call>
NotedCall* note_call(void (*run)(const Call& call), const Call& call) {
  CallNotes* notes = CallNotes::standing();
  if (notes == nullptr) return nullptr;
  auto noted = std::make_unique<NotedCallOf<Call>>(run, call);
  NotedCall* given = noted.get();
  notes->add(std::move(noted));
  return given;
}

}  // namespace xopt::ops
