// Python module xopt._sycl: devices, streams, and which of them a thread's operators run on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "sycl/stream.h"
#include "sycl/torch_queue.h"

namespace py = pybind11;

namespace xopt::sycl_device {
namespace {

py::list device_list(const std::string& opencl_driver) {
  prepare_runtime(opencl_driver);
  py::list devices;
  for (const sycl::device& device : all_devices()) {
    const DeviceFacts facts = facts_of(device);
    py::list shapes;
    for (const MatrixShape& one : facts.matrix_shapes) {
      shapes.append(py::make_tuple(dtype_name(one.a), dtype_name(one.b), one.m, one.n, one.k));
    }
    py::dict entry;
    entry["name"] = facts.name;
    entry["type"] = facts.type;
    entry["backend"] = facts.backend;
    entry["driver"] = facts.driver;
    entry["sub_group_sizes"] = facts.sub_group_sizes;
    entry["matrix_shapes"] = shapes;
    entry["usm_device"] = facts.usm_device;
    entry["usm_shared"] = facts.usm_shared;
    entry["usm_system"] = facts.usm_system;
    entry["local_bytes"] = facts.local_bytes;
    devices.append(entry);
  }
  return devices;
}

Stream* open_stream(size_t device, const std::string& cache_folder,
                    const std::optional<std::tuple<int, int, int>>& tile, bool waits) {
  const auto& devices = all_devices();
  if (device >= devices.size()) throw py::index_error("there is no SYCL device " + std::to_string(device));
  std::optional<TileShape> forced;
  if (tile) forced = TileShape{std::get<0>(*tile), std::get<1>(*tile), std::get<2>(*tile)};
  return new Stream(devices[device], cache_folder, forced, waits ? Waits::each_operator : Waits::at_synchronize);
}

py::dict build_counts(const Stream& stream) {
  const BuildCounts counts = stream.builds();
  py::dict entry;
  entry["compiled"] = counts.compiled;
  entry["read"] = counts.read;
  entry["rejected"] = counts.rejected;
  entry["compile_seconds"] = counts.compile_seconds;
  entry["read_seconds"] = counts.read_seconds;
  return entry;
}

py::dict kernel_calls() {
  py::dict calls;
  for (const KernelRecord* record = first_sycl_kernel(); record != nullptr; record = record->next) {
    calls[py::str(std::string(record->name) + " " + record->dtype)] = record->calls.load();
  }
  return calls;
}

}  // namespace

PYBIND11_MODULE(_sycl, m) {
  // Streams are never destroyed: at the process's end, the runtime that they need may be gone before them.
  py::class_<Stream, std::unique_ptr<Stream, py::nodelete>>(m, "Stream")
      .def("synchronize", &Stream::synchronize, py::call_guard<py::gil_scoped_release>())
      .def("build", &Stream::build, py::arg("source"), py::arg("options"), "Builds without running: for tools.")
      .def("synchronizations", &Stream::synchronizations)
      .def("builds", &build_counts)
      .def(
          "tile",
          [](Stream& stream, const std::string& dtype) {
            for (const DType one : {DType::f32, DType::bf16, DType::f16, DType::s8, DType::u8}) {
              if (dtype != dtype_name(one)) continue;
              const Tiling& t = stream.tiling(one);
              return py::make_tuple(t.matrix, t.tile.m, t.tile.n, t.tile.k);
            }
            throw py::value_error("unknown dtype '" + dtype + "'");
          },
          py::arg("dtype"), "Whether matrix units compute products of this dtype, and in which tiles.");
  m.def("devices", &device_list, py::arg("opencl_driver"));
  m.def("open", &open_stream, py::arg("device"), py::arg("cache_folder"), py::arg("tile"), py::arg("waits"),
        py::return_value_policy::reference);
  m.def(
      "use", [](Stream* stream) { set_current_offload(stream); }, py::arg("stream"),
      "Sends the calling thread's operators to a stream, or with None back to the CPU.");
  m.def(
      "gpu_builds",
      [](int rows, int columns, int depth) {
        py::list builds;
        for (const Build& one : gpu_builds({rows, columns, depth})) {
          builds.append(py::make_tuple(one.source, one.options));
        }
        return builds;
      },
      py::arg("rows"), py::arg("columns"), py::arg("depth"),
      "Sources and options of all that a GPU with matrix units of this tile (of bf16) would build.");
  m.def("serve_torch", &serve_torch, py::arg("cache_folder"),
        "Runs operators on tensors of device xpu, on torch's queues, from now on.");
  m.def("synchronizations_on_torch_queues", &synchronizations_on_torch_queues,
        "How often the host has waited for a queue of torch's.");
  m.def("calls_left_to_cpu", &calls_left_to_cpu, "How often a device lacked a kernel, whose CPU form ran instead.");
  m.def("calls", &kernel_calls, "How often each kernel was run on a device in this process.");
}

}  // namespace xopt::sycl_device
