"""Memory that ends, or begins, at a page that may not be touched: a read or write outside ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_PRIVATE_ANONYMOUS = 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedMemory:
    """Pages between two forbidden ones; give tensors out of it and close it when they are gone."""

    def __init__(self) -> None:
        self._mappings: list[tuple[int, int]] = []

    def place(self, tensor: torch.Tensor, at_end: bool, alignment: int = 1) -> torch.Tensor:
        """A contiguous copy that ends right before a guard page, or starts right after one.

        At the end, its first byte is at a multiple of `alignment`, so up to alignment - 1 bytes may stay free.
        """
        tensor = tensor.contiguous()
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return tensor
        pages = -(-size // PAGE) * PAGE
        base = _libc.mmap(None, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE_ANONYMOUS, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        self._mappings.append((base, pages + 2 * PAGE))
        first = base + PAGE
        if _libc.mprotect(first, pages, PROT_READ | PROT_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
        start = (first + pages - size) // alignment * alignment if at_end else first
        memory = (ctypes.c_char * size).from_address(start)
        copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def close(self) -> None:
        for base, size in self._mappings:
            _libc.munmap(base, size)
        self._mappings.clear()
