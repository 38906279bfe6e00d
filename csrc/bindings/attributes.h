// Attributes of modules, as native code reads them: straight from the dictionaries, since nobody is to be asked.
#pragma once

#include <pybind11/pybind11.h>

namespace xopt {

// A dictionary's value, borrowed; null where there is none.
PyObject* find(PyObject* dictionary, PyObject* key);

pybind11::object attributes_of(PyObject* object);

bool refers_to(const pybind11::weakref& reference, PyObject* object);

// Whether a dictionary has a value that compares equal.
bool has(PyObject* attributes, const pybind11::str& name, const pybind11::object& expected);

}  // namespace xopt
