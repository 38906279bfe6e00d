// What a recorded program takes for granted of the modules that it uses, asked before each of its calls.
//
// In Python the same questions took almost twice as long, 12 us for a layer of BERT. What has not changed since it last
// passed (`SeenDict`) is not asked again.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <vector>

#include "bindings/attributes.h"

namespace xopt {

class ModuleGuard {
 public:
  // In a block's __dict__: how often its attributes have been set.
  static constexpr const char* kEpoch = "_xopt_epoch";

  // The root's own number of changes; see `add`.
  explicit ModuleGuard(long long root_epoch) : root_epoch_(root_epoch) {}

  // The module by this name below an earlier one, by its place (the root's is 0), with its number of changes.
  void add(size_t parent, pybind11::str name, pybind11::weakref module, long long epoch);
  // An attribute of a module that has to compare equal to this value.
  void add_container(size_t place, pybind11::str name, pybind11::object value);
  // The same of any object, which has it in its __dict__ and is kept alive.
  void add_watched(pybind11::object holder, pybind11::str name, pybind11::object value);

  // The modules by their places; None where one was exchanged, is in training, has a hook or a forward of its own, or
  // was changed.
  pybind11::object operator()(const pybind11::object& root) const;

 private:
  struct Step {
    size_t parent;
    pybind11::str name;
    pybind11::weakref module;
    long long epoch;
  };
  struct Container {
    size_t place;
    pybind11::str name;
    pybind11::object value;
  };
  struct Watched {
    pybind11::object holder;
    pybind11::str name;
    pybind11::object value;
  };

  static constexpr size_t kHooks = 4;  // kinds of them

  // A module as it was when it last passed. Whatever holds a pointer here is known to live only while what holds it in
  // turn is unchanged.
  struct Seen {
    PyObject* module = nullptr;
    SeenDict attributes;
    SeenDict modules;
    std::array<SeenDict, kHooks> hooks;  // empty ones
    bool has_same_modules = false;       // as when it passed before

    void fetch() const;
  };

  // Whether a module passes, which is then the one seen. Of the root only the number of changes is asked.
  static bool passes(PyObject* module, long long epoch, bool is_root, Seen* seen);
  static bool passes_below(const Step& step, const Seen& parent, Seen* seen);

  long long root_epoch_;
  std::vector<Step> steps_;
  std::vector<Container> containers_;
  std::vector<Watched> watched_;
  mutable std::vector<Seen> seen_;  // by their places; empty after a call that found a change
};

void bind_module_guard(const pybind11::module_& m);

}  // namespace xopt
