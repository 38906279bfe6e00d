"""xopt's kernels on SYCL devices: an optional part, built with `make xpu` or XOPT_SYCL=ON.

    with xopt.sycl.device("cpu"):  # what this thread calls runs on the CPU's SYCL device
        model(x)

The operators are the same, `torch.ops.xopt.*`, and so are packed weights: their tiles are those that AMX and XMX load.
"""

from xopt.sycl import xpu as _xpu  # noqa: F401 - lets operators find this part
from xopt.sycl.devices import Device, available, devices
from xopt.sycl.stream import Builds, Tile, calls, calls_left_to_cpu, device

__all__ = ["Builds", "Device", "Tile", "available", "calls", "calls_left_to_cpu", "device", "devices"]
