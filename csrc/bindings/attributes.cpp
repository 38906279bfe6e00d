#include "bindings/attributes.h"

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

bool has(PyObject* attributes, const py::str& name, const py::object& expected) {
  PyObject* value = find(attributes, name.ptr());
  if (value == nullptr) return false;
  const int equal = PyObject_RichCompareBool(value, expected.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

PyObject* SeenDict::of(PyObject* object) {
#if PY_VERSION_HEX < 0x030D0000
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? nullptr : *dict;
#else
  static_cast<void>(object);
  return nullptr;
#endif
}

}  // namespace xopt
