// The tensors that prepared calls take from modules, gathered for each call of theirs, as long as nothing that the calls
// were prepared for has changed.
//
// Tensors are referred to weakly: who replaces a weight gets the old one's memory back at once.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

#include "bindings/attributes.h"

namespace xopt {

class Operands {
 public:
  // An attribute of a module, by the module's place in the list that `gather` is given, has to compare equal to this.
  void expect_attribute(size_t place, pybind11::str name, pybind11::object value);
  // A module's parameter or buffer has to be this very tensor, with this number of changes; None: there has to be none.
  void expect_tensor(size_t place, pybind11::str name, const pybind11::object& tensor, long long version);
  // The next operand is a module's parameter, which has to be this very tensor.
  void take_tensor(size_t place, pybind11::str name, const pybind11::object& tensor);
  // The next operand is what a module's packed parameter lies in, which has to be this very tensor.
  void take_packed(size_t place, pybind11::str name, const pybind11::object& packed);
  // The next operand is this tensor.
  void take(pybind11::object tensor);

  // The given tensors and after them the operands; None where something has changed.
  pybind11::object gather(const pybind11::list& modules, const pybind11::tuple& tensors) const;

 private:
  enum class Kind { attribute, tensor, packed, own };
  // How a class's `_version` is asked for where nobody has put something of his own in its place: without the look-up of
  // an attribute, which for the 212 tensors of MobileNetV2's norms took a sixth of the time of the questions.
  struct VersionGetter {
    PyTypeObject* type = nullptr;
    getter read = nullptr;
    void* closure = nullptr;

    static VersionGetter of(PyObject* tensor);
    bool operator==(const VersionGetter& other) const {
      return type == other.type && read == other.read && closure == other.closure;
    }
    pybind11::object operator()(PyObject* tensor) const;
  };
  struct Entry {
    Kind kind;
    size_t place;
    pybind11::str name;
    pybind11::object expected;  // of tensors of a module a weak reference
    long long version;          // -1: any
    bool is_taken;
    bool is_constant = false;  // an attribute's value, which thus need not be compared while the module is unchanged
    VersionGetter version_of = {};
  };

  // A module as it was in the last call, for entries of one place that follow each other.
  struct SeenModule {
    size_t place = 0;
    SeenDict attributes, parameters, buffers;
  };
  // What an entry has led to in the last call: a parameter or buffer, and what a packed one lies in.
  struct Found {
    PyObject* tensor = nullptr;
    PyObject* packed = nullptr;
    const void* torchs = nullptr;  // torch's own part of the tensor that is looked at or taken
    SeenDict attributes;           // of the packed one
  };
  // What has to be asked as long as no module has changed, close together: in all entries lie five times as many lines of
  // the caches as in the answers.
  struct Version {
    PyObject* tensor;
    const void* torchs;
    const void* counter;  // of changes, which torch has an object of its own for
    size_t getter;        // among those that tensors have
    long long expected;
  };
  struct Packed {
    PyObject* parameter;
    SeenDict attributes;
  };
  struct Taken {
    PyObject* tensor;
    const void* torchs;
  };
  struct Seen {
    std::vector<SeenModule> modules;       // in the order of the entries
    std::vector<Found> found;              // by entries
    std::vector<const Entry*> changeable;  // attributes that may change within
    std::vector<Version> versions;
    std::vector<VersionGetter> getters;
    std::vector<Packed> packed;
    std::vector<Taken> taken;

    void fetch() const;
    void note(const Entry& entry, const Found& found);
    bool holds(const pybind11::list& modules) const;
  };

  void add(Entry entry);
  void add_tensor(Kind kind, size_t place, pybind11::str name, const pybind11::object& tensor, long long version,
                  bool is_taken);
  bool look_up_all(const pybind11::list& modules, Seen* seen) const;
  static bool is_unchanged(PyObject* module, SeenModule* seen);
  static bool look_up(const Entry& entry, PyObject* module, Found* found);
  static bool look_into_packed(const Entry& entry, bool is_unchanged, Found* found);
  static bool passes(const Entry& entry, PyObject* module, bool is_unchanged, Found* found);

  std::vector<Entry> entries_;
  size_t taken_ = 0;
  mutable Seen seen_;  // empty after a call that found a change
};

void bind_operands(const pybind11::module_& m);

}  // namespace xopt
