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

// Whether somebody wants to see, or change, what goes into a module with these attributes and what comes out of it.
bool is_hooked(PyObject* attributes) {
  if (find(attributes, names().forward) != nullptr) return true;
  for (PyObject* hooks : names().hooks) {
    if (!is_empty_dict(find(attributes, hooks))) return true;
  }
  return false;
}

}  // namespace

void ModuleGuard::add(size_t parent, py::str name, py::weakref module, long long epoch) {
  if (parent > steps_.size()) {
    throw std::invalid_argument("ModuleGuard.add: parent: expected an earlier module's place, below " +
                                std::to_string(steps_.size() + 1) + ", got " + std::to_string(parent));
  }
  steps_.push_back({parent, std::move(name), std::move(module), epoch});
}

void ModuleGuard::add_container(size_t place, py::str name, py::object value) {
  containers_.push_back({place, std::move(name), std::move(value)});
}

void ModuleGuard::add_watched(py::object holder, py::str name, py::object value) {
  watched_.push_back({std::move(holder), std::move(name), std::move(value)});
}

bool ModuleGuard::passes(PyObject* module, long long epoch, bool is_root, Seen* seen) {
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
    if (find(own.ptr(), names().training) != Py_False || is_hooked(own.ptr())) return false;
    for (size_t i = 0; i < kHooks; ++i) found.hooks[i] = SeenDict(find(own.ptr(), names().hooks[i]));
  }
  PyObject* modules = find(own.ptr(), names().modules);
  found.module = module;
  found.has_same_modules = seen->module == module && seen->modules.is(modules);
  found.attributes = SeenDict(own.ptr());
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
  return passes(module, step.epoch, false, seen);
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
  seen_.clear();  // also where this ends early: a pointer is good only if all before it were looked at
  seen.resize(steps_.size() + 1);
  if (!passes(root.ptr(), root_epoch_, true, seen.data())) return py::none();
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
  for (const Watched& watched : watched_) {
    if (!has(attributes_of(watched.holder.ptr()).ptr(), watched.name, watched.value)) return py::none();
  }
  seen_ = std::move(seen);
  return modules;
}

void bind_module_guard(const py::module_& m) {
  py::class_<ModuleGuard> guard(m, "ModuleGuard");
  guard.attr("EPOCH") = ModuleGuard::kEpoch;
  guard.def_static(
      "is_hooked", [](const py::object& module) { return is_hooked(attributes_of(module.ptr()).ptr()); },
      py::arg("module"));
  guard.def(py::init<long long>(), py::arg("root_epoch"))
      .def("add", &ModuleGuard::add, py::arg("parent"), py::arg("name"), py::arg("module"), py::arg("epoch"))
      .def("add_container", &ModuleGuard::add_container, py::arg("place"), py::arg("name"), py::arg("value"))
      .def("add_watched", &ModuleGuard::add_watched, py::arg("holder"), py::arg("name"), py::arg("value"))
      .def("__call__", &ModuleGuard::operator(), py::arg("root"));
}

}  // namespace xopt
