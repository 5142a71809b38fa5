"""Memory maps that hold no descriptor, as torch and safetensors make them. Python's own `mmap` keeps a duplicate."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


@contextmanager
def mapped(path: Path, *, writable: bool = False) -> Iterator[memoryview]:
    """All of the file at *path* as it is now, shared; the descriptor is closed before the block begins."""
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        length = os.fstat(fd).st_size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(path))
    finally:
        os.close(fd)
    try:
        yield memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")
    finally:
        _libc.munmap(address, length)
