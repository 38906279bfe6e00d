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
  // `check(module)` has to be true. It is asked when one of the module's attributes has been set since it passed.
  void add_check(size_t place, pybind11::object check);
  // The same of a dictionary, a class's or an object's attributes: `check(owner)`. The owner is kept alive.
  void add_dictionary(pybind11::object owner, pybind11::object check);
  // A list, or what can be iterated like one, has to have these items; for some there are weak references.
  void add_items(pybind11::object owner, pybind11::tuple items);
  // A set has to be equal to this one.
  void add_set(pybind11::set owner, pybind11::object items);
  // A name in a dictionary that changes all the time, a script's own, has to stand for this.
  void add_global(pybind11::dict names, pybind11::str name, pybind11::object value);

  // The modules by their places; None where one was exchanged, is in training, has a hook or a forward of its own, or
  // was changed.
  pybind11::object operator()(const pybind11::object& root) const;

  // For Python's garbage collector: an object that is kept alive may lead to the module whose program this guards.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  struct Step {
    size_t parent;
    pybind11::str name;
    pybind11::weakref module;
    long long epoch;
    bool sleeps;  // whether it has hooks that nobody has woken, which are part of a recording
    pybind11::object check = {};
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

  struct Dictionary {
    pybind11::object owner;
    pybind11::object check;
    mutable SeenDict seen = {};  // as it was when it last passed

    bool passes() const;
  };
  struct Items {
    pybind11::object owner;
    pybind11::tuple items;
  };
  struct Set {
    pybind11::set owner;
    pybind11::object items;
  };
  struct Global {
    pybind11::dict names;
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

  // Whether a module passes, which is then the one seen. Of the root, which has no step, only its attributes are asked
  // for.
  static bool passes(PyObject* module, long long epoch, const pybind11::object& check, const Step* step, Seen* seen);
  static bool passes_below(const Step& step, const Seen& parent, Seen* seen);
  bool is_rest_the_same() const;

  long long root_epoch_;
  pybind11::object root_check_;
  std::vector<Step> steps_;
  std::vector<Container> containers_;
  std::vector<Watched> watched_;
  std::vector<Dictionary> dictionaries_;
  std::vector<Items> items_;
  std::vector<Set> sets_;
  std::vector<Global> globals_;
  mutable std::vector<Seen> seen_;  // by their places; empty after a call that found a change
};

void bind_module_guard(const pybind11::module_& m);

}  // namespace xopt
