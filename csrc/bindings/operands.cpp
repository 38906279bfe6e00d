#include "bindings/operands.h"

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace xopt {
namespace {

constexpr long long kAnyVersion = -1;

// Keys of dictionaries, made once and kept: they live as long as the interpreter.
struct Names {
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* buffers = PyUnicode_InternFromString("_buffers");
  PyObject* place = PyUnicode_InternFromString("place");
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* cdata = PyUnicode_InternFromString("_cdata");
};

const Names& names() {
  static const Names all;
  return all;
}

// A module's parameter or buffer, borrowed; null where there is none, and None where it is that.
PyObject* tensor_of(PyObject* attributes, const py::str& name) {
  for (PyObject* kind : {names().parameters, names().buffers}) {
    PyObject* stored = find(attributes, kind);
    PyObject* tensor = stored == nullptr ? nullptr : find(stored, name.ptr());
    if (tensor != nullptr) return tensor;
  }
  return nullptr;
}

py::object get(PyObject* object, PyObject* name) {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
  if (!value) throw py::error_already_set();
  return value;
}

const void* torchs_part_of(PyObject* tensor) {
  if (tensor == nullptr || tensor == Py_None) return nullptr;
  return PyLong_AsVoidPtr(get(tensor, names().cdata).ptr());
}

// What a packed parameter lies in: its `place` is a tuple that begins with it. Null for other parameters.
PyObject* packed_of(PyObject* parameter) {
  if (parameter == nullptr || parameter == Py_None) return nullptr;
  PyObject* place = find(attributes_of(parameter).ptr(), names().place);
  return place != nullptr && PyTuple_Check(place) && PyTuple_GET_SIZE(place) > 0 ? PyTuple_GET_ITEM(place, 0) : nullptr;
}

bool is_expected(const py::object& expected, PyObject* found) {
  const bool is_none = found == nullptr || found == Py_None;  // which is what a reference to something gone gives, too
  if (expected.is_none() || is_none) return expected.is_none() && is_none;
  return refers_to(py::reinterpret_borrow<py::weakref>(expected), found);
}

}  // namespace

Operands::VersionGetter Operands::VersionGetter::of(PyObject* tensor) {
  auto* type = Py_TYPE(tensor);
  const py::object found = get(reinterpret_cast<PyObject*>(type), names().version);
  if (Py_TYPE(found.ptr()) != &PyGetSetDescr_Type) return {};
  const PyGetSetDef* defined = reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset;
  return {type, defined->get, defined->closure};
}

py::object Operands::VersionGetter::operator()(PyObject* tensor) const {
  if (Py_TYPE(tensor) != type || read == nullptr) return get(tensor, names().version);
  auto version = py::reinterpret_steal<py::object>(read(tensor, closure));
  if (!version) throw py::error_already_set();
  return version;
}

void Operands::expect_attribute(size_t place, py::str name, py::object value) {
  const bool constant = is_constant(value.ptr());
  add({Kind::attribute, place, std::move(name), std::move(value), kAnyVersion, false, constant});
}

void Operands::expect_tensor(size_t place, py::str name, const py::object& tensor, long long version) {
  add_tensor(Kind::tensor, place, std::move(name), tensor, version, false);
}

void Operands::take_tensor(size_t place, py::str name, const py::object& tensor) {
  add_tensor(Kind::tensor, place, std::move(name), tensor, kAnyVersion, true);
}

void Operands::take_packed(size_t place, py::str name, const py::object& packed) {
  add_tensor(Kind::packed, place, std::move(name), packed, kAnyVersion, true);
}

void Operands::take(py::object tensor) { add({Kind::own, 0, py::str(), std::move(tensor), kAnyVersion, true}); }

void Operands::add_tensor(Kind kind, size_t place, py::str name, const py::object& tensor, long long version,
                          bool is_taken) {
  py::object expected = py::none();
  if (!tensor.is_none()) expected = py::weakref(tensor);
  Entry entry{kind, place, std::move(name), std::move(expected), version, is_taken};
  if (version != kAnyVersion && !tensor.is_none()) entry.version_of = VersionGetter::of(tensor.ptr());
  add(std::move(entry));
}

void Operands::add(Entry entry) {
  taken_ += entry.is_taken ? 1 : 0;
  entries_.push_back(std::move(entry));
  seen_ = {};  // which refers to entries
}

// Whether it has the attributes, parameters and buffers of the last call; if not, what it has now is the one seen.
bool Operands::is_unchanged(PyObject* module, SeenModule* seen) {
  if (seen->attributes.is(SeenDict::of(module)) && seen->parameters.unchanged() && seen->buffers.unchanged()) {
    return true;
  }
  const py::object own = seen_attributes_of(module);
  *seen = {seen->place, SeenDict(own.ptr()), SeenDict(find(own.ptr(), names().parameters)),
           SeenDict(find(own.ptr(), names().buffers))};
  return false;
}

// Whether an entry's tensor is the expected one, of a module that may have changed.
bool Operands::look_up(const Entry& entry, PyObject* module, Found* found) {
  *found = {};
  found->tensor = tensor_of(attributes_of(module).ptr(), entry.name);
  if (entry.kind == Kind::tensor) found->torchs = torchs_part_of(found->tensor);
  return entry.kind == Kind::packed || is_expected(entry.expected, found->tensor);
}

bool Operands::look_into_packed(const Entry& entry, bool is_unchanged, Found* found) {
  PyObject* parameter = found->tensor;
  if (is_unchanged && parameter != nullptr && found->attributes.is(SeenDict::of(parameter))) return true;
  found->packed = packed_of(parameter);
  if (!is_expected(entry.expected, found->packed)) return false;
  found->torchs = torchs_part_of(found->packed);
  found->attributes = found->packed == nullptr ? SeenDict() : SeenDict(SeenDict::of(parameter));
  return true;
}

bool Operands::passes(const Entry& entry, PyObject* module, bool is_unchanged, Found* found) {
  if (entry.kind == Kind::attribute) {
    if (is_unchanged && entry.is_constant) return true;
    return has(attributes_of(module).ptr(), entry.name, entry.expected);
  }
  if (!is_unchanged && !look_up(entry, module, found)) return false;
  if (entry.kind == Kind::packed) return look_into_packed(entry, is_unchanged, found);
  const bool is_none = found->tensor == nullptr || found->tensor == Py_None;
  if (is_none || entry.version == kAnyVersion) return true;
  return PyLong_AsLongLong(entry.version_of(found->tensor).ptr()) == entry.version;
}

// ---- All of them ----------------------------------------------------------------------------------------------------

void Operands::Seen::fetch() const {
  constexpr size_t kCountedBytes = 48, kTakenBytes = 192;  // what is read of torch's own part
  for (const SeenModule& module : modules) {
    module.attributes.fetch();
    module.parameters.fetch();
    module.buffers.fetch();
  }
  for (const Version& each : versions) {
    ::xopt::fetch(each.tensor, sizeof(PyObject) + sizeof(void*));
    ::xopt::fetch(each.torchs, kCountedBytes);
    fetch_line(each.counter);
  }
  for (const Packed& each : packed) each.attributes.fetch();
  for (const Taken& each : taken) {
    ::xopt::fetch(each.tensor, sizeof(PyObject) + sizeof(void*));
    ::xopt::fetch(each.torchs, kTakenBytes);
  }
}

// An entry that has passed, with what it has led to.
void Operands::Seen::note(const Entry& entry, const Found& its) {
  if (entry.kind == Kind::attribute) {
    if (!entry.is_constant) changeable.push_back(&entry);
    return;
  }
  if (entry.kind == Kind::packed) packed.push_back({its.tensor, its.attributes});
  if (entry.version != kAnyVersion && its.torchs != nullptr) {
    // Which word of a tensor leads to it: were it another one, that would be fetched in vain.
    constexpr size_t kCounter = 5;
    const void* counter = static_cast<const void* const*>(its.torchs)[kCounter];
    const size_t getter = std::find(getters.begin(), getters.end(), entry.version_of) - getters.begin();
    if (getter == getters.size()) getters.push_back(entry.version_of);
    versions.push_back({its.tensor, its.torchs, counter, getter, entry.version});
  }
  if (entry.is_taken) taken.push_back({entry.kind == Kind::packed ? its.packed : its.tensor, its.torchs});
}

// Whether everything is as it was. False also where that cannot be said so quickly.
bool Operands::Seen::holds(const py::list& modules_now) const {
  const auto module_at = [&](size_t place) {
    return PyList_GET_ITEM(modules_now.ptr(), static_cast<Py_ssize_t>(place));
  };
  for (const SeenModule& each : modules) {
    if (each.place >= modules_now.size() || !each.attributes.is(SeenDict::of(module_at(each.place)))) return false;
    if (!each.parameters.unchanged() || !each.buffers.unchanged()) return false;
  }
  for (const Packed& each : packed) {
    if (each.parameter == nullptr || !each.attributes.is(SeenDict::of(each.parameter))) return false;
  }
  for (const Entry* each : changeable) {
    if (!has(attributes_of(module_at(each->place)).ptr(), each->name, each->expected)) return false;
  }
  return std::all_of(versions.begin(), versions.end(), [&](const Version& each) {
    return PyLong_AsLongLong(getters[each.getter](each.tensor).ptr()) == each.expected;
  });
}

// Whether every entry passes; `seen` is then what it was seen by.
bool Operands::look_up_all(const py::list& modules, Seen* seen) const {
  Seen before = std::move(*seen);
  *seen = {};
  before.found.resize(entries_.size());
  PyObject* module = nullptr;
  bool unchanged = false;
  size_t place = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.kind == Kind::own) {
      seen->taken.push_back({entry.expected.ptr(), torchs_part_of(entry.expected.ptr())});
      continue;
    }
    if (module == nullptr || entry.place != place) {
      if (entry.place >= modules.size()) throw py::index_error("Operands: an operand of no module");
      place = entry.place;
      module = PyList_GET_ITEM(modules.ptr(), static_cast<Py_ssize_t>(place));
      const size_t run = seen->modules.size();
      seen->modules.push_back(run < before.modules.size() ? before.modules[run] : SeenModule());
      seen->modules.back().place = place;
      unchanged = is_unchanged(module, &seen->modules.back());
    }
    if (!passes(entry, module, unchanged, &before.found[i])) return false;
    seen->note(entry, before.found[i]);
  }
  seen->found = std::move(before.found);
  return true;
}

py::object Operands::gather(const py::list& modules, const py::tuple& tensors) const {
  Seen seen = std::move(seen_);
  seen.fetch();
  seen_ = {};  // also where this ends early: what was found is good only if all of its module was looked at
  const bool is_known = !seen.modules.empty() && seen.holds(modules);
  if (!is_known && !look_up_all(modules, &seen)) return py::none();
  py::list gathered(tensors.size() + taken_);
  size_t next = 0;
  const auto put = [&](PyObject* tensor) {
    Py_INCREF(tensor);
    PyList_SET_ITEM(gathered.ptr(), static_cast<Py_ssize_t>(next++), tensor);
  };
  for (const py::handle tensor : tensors) put(tensor.ptr());
  for (const Taken& each : seen.taken) put(each.tensor);
  seen_ = std::move(seen);
  return gathered;
}

void bind_operands(const py::module_& m) {
  py::class_<Operands>(m, "Operands")
      .def(py::init<>())
      .def("expect_attribute", &Operands::expect_attribute, py::arg("place"), py::arg("name"), py::arg("value"))
      .def("expect_tensor", &Operands::expect_tensor, py::arg("place"), py::arg("name"), py::arg("tensor"),
           py::arg("version"))
      .def("take_tensor", &Operands::take_tensor, py::arg("place"), py::arg("name"), py::arg("tensor"))
      .def("take_packed", &Operands::take_packed, py::arg("place"), py::arg("name"), py::arg("packed"))
      .def("take", &Operands::take, py::arg("tensor"))
      .def("gather", &Operands::gather, py::arg("modules"), py::arg("tensors"));
}

}  // namespace xopt
