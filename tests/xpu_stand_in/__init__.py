"""A stand-in for torch's XPU build, which is not to be had where these tests run: device xpu of a CPU build of torch,
whose memory and queue are those of the CPU's SYCL device.

`device.cpp`, compiled here, gives torch what it asks for before it makes a tensor of device xpu, and exports the shim
by which an XPU build hands out its queue. What torch itself computes goes by way of the CPU; xopt's operators find
tensors of device xpu in USM device memory, and a queue that is not theirs. Takes the part for SYCL devices, and a
process of its own, since what is registered stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from xopt.sycl import loading

Tensor = torch.Tensor
DEVICE = torch.device("xpu", 0)
FOLDER = "XOPT_STAND_IN_FOLDER"  # environment variable: where one process keeps what it has compiled for the next

_libraries: list[Any] = []


def start(*defined: str) -> None:
    """Has to come before torch is asked for anything on device xpu. `defined`: macros of `device.cpp`."""
    loading.native().devices(loading.opencl_driver())
    _load(_built(defined))
    torch.xpu._initialized = True  # torch.device("xpu") as an argument would have Python start the device
    _register()


def _native() -> Any:
    return _libraries[0]


def _load(path: Path) -> None:
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _libraries.append(library)
    library.stand_in_malloc.restype = ctypes.c_void_p
    library.stand_in_copies.restype = ctypes.c_int64
    library.stand_in_is_device_memory.restype = ctypes.c_bool


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Until this process ends."""
    return tempfile.TemporaryDirectory()


def _built(defined: Sequence[str]) -> Path:
    folder = Path(os.environ.get(FOLDER) or _own_folder().name)
    built = folder / "-".join(["device", *defined, "built.so"])
    if not built.exists():
        _build(built, defined)
    return built


def _build(built: Path, defined: Sequence[str]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "the stand-in for device xpu needs a C++ compiler"
    torch_folder = Path(torch.__file__).parent
    sycl = _sycl_folder()
    include = [f"-isystem{folder}" for folder in (torch_folder / "include", sycl / "include")]
    # torch has loaded its libraries without making their symbols global.
    needed = [str(torch_folder / "lib" / "libtorch_cpu.so"), str(torch_folder / "lib" / "libc10.so")]
    command = [*compiler.split(), "-std=c++20", "-O0", "-shared", "-fPIC", *(f"-D{name}" for name in defined)]
    command += ["-DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING", *include, "-o", str(built)]
    command += [str(Path(__file__).with_name("device.cpp"))]
    subprocess.run([*command, *needed, str(sycl / "lib" / "libsycl.so")], check=True)


def _sycl_folder() -> Path:
    header = next(path for path in _runtime_files() if path.as_posix().endswith("include/sycl/sycl.hpp"))
    return header.parents[2]


def _runtime_files() -> list[Path]:
    import importlib.metadata

    files = importlib.metadata.files("intel-sycl-rt") or []
    return [Path(str(file.locate())).resolve() for file in files]


def copies() -> int:
    """How often torch has copied between host and device: what runs by way of the CPU, too."""
    return int(_native().stand_in_copies())


def is_device_memory(tensor: Tensor) -> bool:
    return bool(_native().stand_in_is_device_memory(ctypes.c_void_p(tensor.data_ptr())))


# ---- torch's operators on the device ---------------------------------------------------------------------------------


@functools.cache
def _torch() -> Any:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _from_blob(data: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, deleter: Any) -> Tensor:
    count, handle = len(sizes), ctypes.c_void_p()
    numbers = ctypes.c_int64 * count
    code = getattr(_torch(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    status = _torch().torch_from_blob(
        *(ctypes.c_void_p(data), ctypes.c_int64(count), numbers(*sizes), numbers(*strides), ctypes.c_int64(0)),
        *(ctypes.c_int32(code), ctypes.c_int32(_torch().aoti_torch_device_type_xpu()), ctypes.c_int32(DEVICE.index)),
        *(ctypes.byref(handle), ctypes.c_int32(_torch().aoti_torch_layout_strided()), None, ctypes.c_int64(0)),
        *(deleter, None),
    )
    assert status == 0, "torch made no tensor of device xpu"
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return made


def _empty_strided(sizes: Any, strides: Any, dtype: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    data = _native().stand_in_malloc(ctypes.c_size_t(max(1, elements) * dtype.itemsize))
    if data is None:
        raise torch.OutOfMemoryError(f"the stand-in for device xpu has no {elements} elements left")
    return _from_blob(data, sizes, strides, dtype, ctypes.cast(_native().stand_in_free, ctypes.c_void_p))


def _empty(sizes: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    like = torch.empty(sizes, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _empty_strided(like.shape, like.stride(), like.dtype)


def _copy_bytes(to: Tensor, source: Tensor) -> None:
    bytes_in_all = to.numel() * to.element_size()
    _native().stand_in_copy(*map(ctypes.c_void_p, (to.data_ptr(), source.data_ptr())), ctypes.c_size_t(bytes_in_all))


def _span(tensor: Tensor) -> int:
    """Elements from its first to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _run(tensor: Tensor) -> Tensor:
    """The memory that it spans, what lies between its elements included."""
    return tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())


def _to_cpu(tensor: Tensor) -> Tensor:
    if tensor.device != DEVICE:
        return tensor
    run = torch.empty(_span(tensor), dtype=tensor.dtype)
    if tensor.numel():
        _copy_bytes(run, _run(tensor))
    return run.as_strided(tensor.shape, tensor.stride())


def to_xpu(tensor: Tensor) -> Tensor:
    """With the same strides."""
    if tensor.device == DEVICE:
        return tensor
    made = _empty_strided(tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.numel():
        _copy_bytes(_run(made), _run(tensor.detach()))
    return made


def _copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    values = _to_cpu(source)
    if self.device != DEVICE:
        return self.copy_(values)
    if not self.numel():
        return self
    changed = _to_cpu(self)  # what lies between the elements of a view stays
    changed.copy_(values)
    _copy_bytes(_run(self), _run(changed))
    return self


def _by_way_of_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    on_cpu: dict[int, tuple[Tensor, Tensor]] = {}

    def to_cpu(tensor: Tensor) -> Tensor:
        return on_cpu.setdefault(id(tensor), (tensor, _to_cpu(tensor)))[1]

    cpu_args, cpu_kwargs = tree_map_only(Tensor, to_cpu, (args, kwargs))
    if cpu_kwargs.get("device") is not None:
        cpu_kwargs["device"] = torch.device("cpu")
    results = op(*cpu_args, **cpu_kwargs)
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(given):
                _overwrite(tensor, on_cpu[id(tensor)][1])
    written = {id(changed): given for given, changed in on_cpu.values()}
    return tree_map_only(Tensor, lambda made: written[id(made)] if id(made) in written else to_xpu(made), results)


def _overwrite(given: Tensor, changed: Tensor) -> None:
    if given.shape == changed.shape:
        _copy_(given, changed)
    else:  # what is handed out empty, for an operator to give it a size
        made = to_xpu(changed)
        given.set_(made.untyped_storage(), 0, made.shape, made.stride())


def _as_on_the_cpu(op: Any) -> Any:
    """Views: the same for all devices."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)


def _register() -> None:
    aten = torch.library.Library("aten", "IMPL")
    everything = torch.library.Library("_", "IMPL")
    _libraries.extend([aten, everything])
    for name, kernel in {
        "empty_strided": _empty_strided,
        "empty.memory_format": _empty,
        "copy_": _copy_,
        "as_strided": _as_on_the_cpu(torch.ops.aten.as_strided.default),
        "view": _as_on_the_cpu(torch.ops.aten.view.default),
        "_reshape_alias": _as_on_the_cpu(torch.ops.aten._reshape_alias.default),
        "set_.source_Storage": _as_on_the_cpu(torch.ops.aten.set_.source_Storage),
        "set_.source_Storage_storage_offset": _as_on_the_cpu(torch.ops.aten.set_.source_Storage_storage_offset),
        "unfold": _as_on_the_cpu(torch.ops.aten.unfold.default),
    }.items():
        aten.impl(name, kernel, "XPU")
    everything.fallback(_by_way_of_the_cpu, "XPU")


class OnXpu(TorchDispatchMode):
    """Within it, xopt's operators are called with their tensors moved to device xpu, and their results moved back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "xopt" or not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "XPU"):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        args, kwargs = tree_map_only(Tensor, to_xpu, (args, kwargs or {}))
        results = func(*args, **kwargs)
        assert all(result.device == DEVICE for result in tree_leaves(results)), f"{func}: a result not on {DEVICE}"
        return tree_map_only(Tensor, _to_cpu, results)
