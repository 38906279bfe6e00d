"""The native module of the SYCL part: csrc/sycl/bindings.cpp."""

from typing import TypedDict

class DeviceRecord(TypedDict):
    name: str
    type: str
    backend: str
    driver: str
    sub_group_sizes: list[int]
    matrix_shapes: list[tuple[str, str, int, int, int]]
    usm_device: bool
    usm_shared: bool
    usm_system: bool
    local_bytes: int

class BuildCounts(TypedDict):
    compiled: int
    read: int
    rejected: int
    compile_seconds: float
    read_seconds: float

class Stream:
    def build(self, source: str, options: list[str]) -> None: ...
    def synchronize(self) -> None: ...
    def synchronizations(self) -> int: ...
    def builds(self) -> BuildCounts: ...
    def tile(self, dtype: str) -> tuple[bool, int, int, int]: ...

def devices(opencl_driver: str) -> list[DeviceRecord]: ...
def open(device: int, cache_folder: str, tile: tuple[int, int, int] | None, waits: bool) -> Stream: ...
def use(stream: Stream | None) -> None: ...
def gpu_builds(rows: int, columns: int, depth: int) -> list[tuple[str, list[str]]]: ...
def calls() -> dict[str, int]: ...
