#include "bindings/module_guard.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/attributes.h"

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

bool is_empty_dict(PyObject* value) { return value != nullptr && PyDict_Check(value) && PyDict_Size(value) == 0; }

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

py::object ModuleGuard::operator()(const py::object& root) const {
  std::vector<py::object> attributes;
  attributes.reserve(steps_.size() + 1);
  attributes.push_back(attributes_of(root.ptr()));
  if (!has_epoch(attributes[0].ptr(), root_epoch_)) return py::none();
  py::list modules;
  modules.append(root);
  for (const Step& step : steps_) {
    PyObject* below = find(attributes[step.parent].ptr(), names().modules);
    PyObject* module = below == nullptr ? nullptr : find(below, step.name.ptr());
    if (module == nullptr || !refers_to(step.module, module)) return py::none();
    attributes.push_back(attributes_of(module));
    PyObject* own = attributes.back().ptr();
    const bool plain = find(own, names().training) == Py_False && !is_hooked(own);
    if (!plain || !has_epoch(own, step.epoch)) return py::none();
    modules.append(py::handle(module));
  }
  for (const Container& container : containers_) {
    if (container.place >= attributes.size()) throw py::index_error("ModuleGuard: a container of no module");
    if (!has(attributes[container.place].ptr(), container.name, container.value)) return py::none();
  }
  for (const Watched& watched : watched_) {
    if (!has(attributes_of(watched.holder.ptr()).ptr(), watched.name, watched.value)) return py::none();
  }
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
