#include "bindings/module_guard.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace py = pybind11;

namespace xopt {
namespace {

// Keys of a module's __dict__, made once and kept: they live as long as the interpreter.
struct Names {
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* training = PyUnicode_InternFromString("training");
  PyObject* forward = PyUnicode_InternFromString("forward");
  PyObject* epoch = PyUnicode_InternFromString(ModuleGuard::kEpoch);
  PyObject* hooks[4] = {PyUnicode_InternFromString("_forward_hooks"), PyUnicode_InternFromString("_forward_pre_hooks"),
                        PyUnicode_InternFromString("_backward_hooks"),
                        PyUnicode_InternFromString("_backward_pre_hooks")};
};

const Names& names() {
  static const Names all;
  return all;
}

bool has_epoch(PyObject* attributes, long long expected) {
  PyObject* epoch = find(attributes, names().epoch);
  return epoch == nullptr ? expected == 0 : PyLong_AsLongLong(epoch) == expected;
}

bool is_empty_dict(PyObject* value) { return value != nullptr && PyDict_Check(value) && PyDict_GET_SIZE(value) == 0; }

// A method of the module's own in the place of its class's forward (`self.forward = self.forward_fused`).
bool is_own_method(PyObject* forward, PyObject* module) {
  return PyMethod_Check(forward) && PyMethod_GET_SELF(forward) == module;
}

// The code of hooks that do nothing until somebody wakes them; kept as long as the interpreter lives.
PyObject* sleeping_codes() {
  static PyObject* const codes = PySet_New(nullptr);
  return codes;
}

bool are_all_asleep(PyObject* hooks) {
  if (hooks == nullptr || !PyDict_Check(hooks)) return false;
  PyObject* hook = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(hooks, &place, nullptr, &hook) != 0;) {
    if (!PyFunction_Check(hook) || PySet_Contains(sleeping_codes(), PyFunction_GET_CODE(hook)) != 1) return false;
  }
  return true;
}

bool has_sleeping_hooks(PyObject* attributes) {
  PyObject* hooks = find(attributes, names().hooks[0]);
  return !is_empty_dict(hooks) && are_all_asleep(hooks);
}

// Whether somebody wants to see, or change, what goes into a module with these attributes and what comes out of it.
bool is_hooked(PyObject* module, PyObject* attributes) {
  PyObject* forward = find(attributes, names().forward);
  if (forward != nullptr && !is_own_method(forward, module)) return true;
  for (PyObject* hooks : names().hooks) {
    PyObject* found = find(attributes, hooks);
    if (!is_empty_dict(found) && (hooks != names().hooks[0] || !are_all_asleep(found))) return true;
  }
  return false;
}

bool holds(const py::object& check, PyObject* owner) {
  const py::object answer = check(py::reinterpret_borrow<py::object>(owner));
  return answer.ptr() == Py_True;
}

bool has_items(const py::object& owner, const py::tuple& expected) {
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(owner.ptr(), "ModuleGuard: expected a sequence"));
  if (!items) throw py::error_already_set();
  if (PySequence_Fast_GET_SIZE(items.ptr()) != PyTuple_GET_SIZE(expected.ptr())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(expected.ptr()); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    PyObject* wanted = PyTuple_GET_ITEM(expected.ptr(), i);
    const bool is_weak = PyWeakref_CheckRef(wanted) != 0;
    const bool is_it = is_weak && refers_to(py::reinterpret_borrow<py::weakref>(wanted), item);
    if (!is_it && !is_same(item, wanted)) return false;
  }
  return true;
}

// Has Python's garbage collector look through guards: see `traverse`.
void make_collectable(PyHeapTypeObject* heap_type) {
  static const auto guard_of = [](PyObject* self) -> ModuleGuard* {
    auto* instance = reinterpret_cast<py::detail::instance*>(self);
    const py::detail::value_and_holder held = instance->get_value_and_holder();
    return held.holder_constructed() ? held.value_ptr<ModuleGuard>() : nullptr;
  };
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const ModuleGuard* guard = guard_of(self);
    return guard == nullptr ? 0 : guard->traverse(visit, arg);
  };
  type->tp_clear = [](PyObject* self) {
    ModuleGuard* guard = guard_of(self);
    if (guard != nullptr) guard->clear();
    return 0;
  };
}

}  // namespace

void ModuleGuard::add(size_t parent, py::str name, py::weakref module, long long epoch) {
  if (parent > steps_.size()) {
    throw std::invalid_argument("ModuleGuard.add: parent: expected an earlier module's place, below " +
                                std::to_string(steps_.size() + 1) + ", got " + std::to_string(parent));
  }
  const py::object own = module();
  const bool sleeps = !own.is_none() && has_sleeping_hooks(attributes_of(own.ptr()).ptr());
  steps_.push_back({parent, std::move(name), std::move(module), epoch, sleeps});
}

void ModuleGuard::add_container(size_t place, py::str name, py::object value) {
  containers_.push_back({place, std::move(name), std::move(value)});
}

void ModuleGuard::add_watched(py::object holder, py::str name, py::object value) {
  watched_.push_back({std::move(holder), std::move(name), std::move(value)});
}

void ModuleGuard::add_check(size_t place, py::object check) {
  if (place > steps_.size()) {
    throw std::invalid_argument("ModuleGuard.add_check: place: expected a module's, below " +
                                std::to_string(steps_.size() + 1) + ", got " + std::to_string(place));
  }
  (place == 0 ? root_check_ : steps_[place - 1].check) = std::move(check);
}

void ModuleGuard::add_dictionary(py::object owner, py::object check) {
  dictionaries_.push_back({std::move(owner), std::move(check)});
}

void ModuleGuard::add_items(py::object owner, py::tuple items) {
  items_.push_back({std::move(owner), std::move(items)});
}

void ModuleGuard::add_set(py::set owner, py::object items) { sets_.push_back({std::move(owner), std::move(items)}); }

void ModuleGuard::add_global(py::dict names, py::str name, py::object value) {
  globals_.push_back({std::move(names), std::move(name), std::move(value)});
}

bool ModuleGuard::Dictionary::passes() const {
  PyObject* object = owner.ptr();
  const bool is_class = PyType_Check(object) != 0;
  py::object own;  // keeps an object's attributes while they are asked for
  PyObject* dict = is_class ? reinterpret_cast<PyTypeObject*>(object)->tp_dict : object;
  if (!is_class && !PyDict_Check(object)) {
    if (_PyObject_GetDictPtr(object) == nullptr) return holds(check, object);  // slots alone
    if (seen.is(SeenDict::of(object))) return true;
    own = seen_attributes_of(object);
    dict = own.ptr();
  }
  if (seen.is(dict)) return true;
  const SeenDict now(dict);  // before it is asked for: another thread may change it meanwhile
  if (!holds(check, object)) return false;
  seen = now;
  return true;
}

bool ModuleGuard::is_rest_the_same() const {
  for (const Watched& watched : watched_) {
    if (!has(attributes_of(watched.holder.ptr()).ptr(), watched.name, watched.value)) return false;
  }
  for (const Dictionary& dictionary : dictionaries_) {
    if (!dictionary.passes()) return false;
  }
  for (const Items& each : items_) {
    if (!has_items(each.owner, each.items)) return false;
  }
  for (const Set& each : sets_) {
    const int equal = PyObject_RichCompareBool(each.owner.ptr(), each.items.ptr(), Py_EQ);
    if (equal < 0) throw py::error_already_set();
    if (equal == 0) return false;
  }
  return std::all_of(globals_.begin(), globals_.end(), [](const Global& global) {
    return is_same(find(global.names.ptr(), global.name.ptr()), global.value.ptr());
  });
}

bool ModuleGuard::passes(PyObject* module, long long epoch, const py::object& check, const Step* step, Seen* seen) {
  const bool is_root = step == nullptr;
  PyObject* attributes = SeenDict::of(module);
  const auto is_unhooked = [&] {
    const auto is_still_empty = [](const SeenDict& hooks) { return hooks.unchanged(); };
    return is_root || std::all_of(seen->hooks.begin(), seen->hooks.end(), is_still_empty);
  };
  if (seen->module == module && seen->attributes.is(attributes) && is_unhooked()) {
    seen->has_same_modules = seen->modules.unchanged();
    if (!seen->has_same_modules) seen->modules = SeenDict(find(attributes, names().modules));
    return true;
  }
  const py::object own = seen_attributes_of(module);
  if (!has_epoch(own.ptr(), epoch)) return false;
  Seen found;
  if (!is_root) {
    if (find(own.ptr(), names().training) != Py_False || is_hooked(module, own.ptr())) return false;
    if (has_sleeping_hooks(own.ptr()) != step->sleeps) return false;
    for (size_t i = 0; i < kHooks; ++i) found.hooks[i] = SeenDict(find(own.ptr(), names().hooks[i]));
  }
  found.attributes = SeenDict(own.ptr());  // before the rest: another thread may change them meanwhile
  if (check && !holds(check, module)) return false;
  PyObject* modules = find(own.ptr(), names().modules);
  found.module = module;
  found.has_same_modules = seen->module == module && seen->modules.is(modules);
  found.modules = SeenDict(modules);
  *seen = found;
  return true;
}

bool ModuleGuard::passes_below(const Step& step, const Seen& parent, Seen* seen) {
  PyObject* module = seen->module;
  if (!parent.has_same_modules) {
    PyObject* modules = find(attributes_of(parent.module).ptr(), names().modules);
    module = modules == nullptr ? nullptr : find(modules, step.name.ptr());
    if (module == nullptr || !refers_to(step.module, module)) return false;
  }
  return passes(module, step.epoch, step.check, &step, seen);
}

void ModuleGuard::Seen::fetch() const {
  constexpr size_t kBeforeObject = 4 * sizeof(void*);  // where CPython 3.11 and later have an object's dictionary
  ::xopt::fetch(reinterpret_cast<const char*>(module) - kBeforeObject, kBeforeObject + sizeof(PyObject));
  attributes.fetch();
  modules.fetch();
  for (const SeenDict& each : hooks) each.fetch();
}

py::object ModuleGuard::operator()(const py::object& root) const {
  std::vector<Seen> seen = std::move(seen_);
  for (const Seen& each : seen) each.fetch();
  for (const Dictionary& each : dictionaries_) each.seen.fetch();
  seen_.clear();  // also where this ends early: a pointer is good only if all before it were looked at
  seen.resize(steps_.size() + 1);
  if (!passes(root.ptr(), root_epoch_, root_check_, nullptr, seen.data())) return py::none();
  py::list modules(seen.size());
  const auto put = [&](size_t place, PyObject* module) {
    Py_INCREF(module);
    PyList_SET_ITEM(modules.ptr(), static_cast<Py_ssize_t>(place), module);
  };
  put(0, root.ptr());
  for (size_t i = 0; i < steps_.size(); ++i) {
    Seen* own = &seen[i + 1];
    if (!passes_below(steps_[i], seen[steps_[i].parent], own)) return py::none();
    put(i + 1, own->module);
  }
  for (const Container& container : containers_) {
    if (container.place >= seen.size()) throw py::index_error("ModuleGuard: a container of no module");
    const py::object attributes =
        attributes_of(PyList_GET_ITEM(modules.ptr(), static_cast<Py_ssize_t>(container.place)));
    if (!has(attributes.ptr(), container.name, container.value)) return py::none();
  }
  if (!is_rest_the_same()) return py::none();
  seen_ = std::move(seen);
  return modules;
}

int ModuleGuard::traverse(visitproc visit, void* arg) const {  // by the names that Py_VISIT wants
  Py_VISIT(root_check_.ptr());
  for (const Step& step : steps_) Py_VISIT(step.check.ptr());
  for (const Container& each : containers_) Py_VISIT(each.value.ptr());
  for (const Watched& each : watched_) {
    Py_VISIT(each.holder.ptr());
    Py_VISIT(each.value.ptr());
  }
  for (const Dictionary& each : dictionaries_) {
    Py_VISIT(each.owner.ptr());
    Py_VISIT(each.check.ptr());
  }
  for (const Items& each : items_) {
    Py_VISIT(each.owner.ptr());
    Py_VISIT(each.items.ptr());
  }
  for (const Set& each : sets_) {
    Py_VISIT(each.owner.ptr());
    Py_VISIT(each.items.ptr());
  }
  for (const Global& each : globals_) {
    Py_VISIT(each.names.ptr());
    Py_VISIT(each.value.ptr());
  }
  return 0;
}

void ModuleGuard::clear() {
  // Out of reach before they are let go of: what runs then must find nothing half gone.
  const ModuleGuard gone = std::move(*this);
  *this = ModuleGuard(0);
}

void bind_module_guard(const py::module_& m) {
  py::class_<ModuleGuard> guard(m, "ModuleGuard", py::custom_type_setup(make_collectable));
  guard.attr("EPOCH") = ModuleGuard::kEpoch;
  guard.def_static(
      "is_hooked", [](const py::object& module) { return is_hooked(module.ptr(), attributes_of(module.ptr()).ptr()); },
      py::arg("module"));
  guard.def_static(
      "has_sleeping_hooks",
      [](const py::object& module) { return has_sleeping_hooks(attributes_of(module.ptr()).ptr()); },
      py::arg("module"));
  guard.def_static(
      "let_sleep",
      [](const py::object& code) {
        if (PySet_Add(sleeping_codes(), code.ptr()) != 0) throw py::error_already_set();
      },
      py::arg("code"));
  guard.def(py::init<long long>(), py::arg("root_epoch"))
      .def("add", &ModuleGuard::add, py::arg("parent"), py::arg("name"), py::arg("module"), py::arg("epoch"))
      .def("add_container", &ModuleGuard::add_container, py::arg("place"), py::arg("name"), py::arg("value"))
      .def("add_watched", &ModuleGuard::add_watched, py::arg("holder"), py::arg("name"), py::arg("value"))
      .def("add_check", &ModuleGuard::add_check, py::arg("place"), py::arg("check"))
      .def("add_dictionary", &ModuleGuard::add_dictionary, py::arg("owner"), py::arg("check"))
      .def("add_items", &ModuleGuard::add_items, py::arg("owner"), py::arg("items"))
      .def("add_set", &ModuleGuard::add_set, py::arg("owner"), py::arg("items"))
      .def("add_global", &ModuleGuard::add_global, py::arg("names"), py::arg("name"), py::arg("value"))
      .def("__call__", &ModuleGuard::operator(), py::arg("root"));
}

}  // namespace xopt
