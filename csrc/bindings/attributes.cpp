#include "bindings/attributes.h"

#include <utility>

namespace py = pybind11;

namespace xopt {

PyObject* find(PyObject* dictionary, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dictionary, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

py::object attributes_of(PyObject* module) {
  auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) throw py::error_already_set();
  return attributes;
}

// CPython 3.13 keeps the attributes of most objects within them, also where they have a dictionary, and does not tell its
// watchers when one of them is set. So the object gets a dictionary that does hold them.
py::object seen_attributes_of(PyObject* object) {
  py::object attributes = attributes_of(object);
#if PY_VERSION_HEX >= 0x030D0000
  if (reinterpret_cast<PyDictObject*>(attributes.ptr())->ma_values != nullptr) {
    py::dict own;
    const py::str name("__dict__");
    const bool copied = PyDict_Update(own.ptr(), attributes.ptr()) == 0;
    // Not by PyObject_GenericSetDict, which leaves the values within the object in use.
    if (!copied || PyObject_GenericSetAttr(object, name.ptr(), own.ptr()) != 0) throw py::error_already_set();
    return std::move(own);
  }
#endif
  return attributes;
}

bool refers_to(const py::weakref& reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference.ptr(), &found) < 0) throw py::error_already_set();
  Py_XDECREF(found);  // alive at any rate where it is that object
  return found == object;
#else
  return PyWeakref_GetObject(reference.ptr()) == object;
#endif
}

bool is_constant(PyObject* value) {
  if (PyTuple_CheckExact(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      if (!is_constant(PyTuple_GET_ITEM(value, i))) return false;
    }
    return true;
  }
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

bool is_same(PyObject* value, PyObject* expected) {
  if (value == expected) return true;
  if (value == nullptr || Py_TYPE(value) != Py_TYPE(expected) || !is_constant(value) || !is_constant(expected)) {
    return false;
  }
  const int equal = PyObject_RichCompareBool(value, expected, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

bool has(PyObject* attributes, const py::str& name, const py::object& expected) {
  PyObject* value = find(attributes, name.ptr());
  if (value == nullptr) return false;
  const int equal = PyObject_RichCompareBool(value, expected.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

PyObject* SeenDict::of(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? nullptr : *dict;
}

#if PY_VERSION_HEX >= 0x030C0000
bool SeenDict::watch(PyObject* dict) {
  static const int watcher = PyDict_AddWatcher([](PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++changes_;
    return 0;
  });
  if (watcher >= 0 && PyDict_Watch(watcher, dict) == 0) return true;
  PyErr_Clear();
  return false;
}
#endif

}  // namespace xopt
