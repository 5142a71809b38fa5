"""Calls of the kernel that Python has no function for."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
MREMAP_MAYMOVE = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
libc.mprotect.argtypes = libc.madvise.argtypes = libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.pwrite.argtypes = libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
libc.readahead.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_size_t)
libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint)
libc.syscall.restype = ctypes.c_long

_OPENAT2 = 437  # of every machine
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""io_setup, io_destroy, io_getevents, io_submit."""
_AIO_S = 10


def call(function: Callable[..., int], *arguments: object) -> int:
    """A function of libc; OSError when it says -1."""
    result = function(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), "libc")
    return result


def address_of(result: int) -> int:
    """What mmap or mremap returned; OSError when that is no address."""
    if result == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "libc")
    return result


def vmsplice(fd: int, memory: mmap.mmap) -> int:
    """Whoever reads the pipe sees *memory* as it is then: it must live, and stay, as long."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return call(libc.vmsplice, fd, struct.pack("PN", address, len(memory)), ctypes.c_size_t(1), 0)


def openat2(directory: int, path: bytes, flags: int, resolve: int, mode: int = 0) -> int:
    how = struct.pack("QQQ", flags, mode, resolve)
    return call(libc.syscall, _OPENAT2, directory, path, how, ctypes.c_size_t(len(how)))


def statx(directory: int, path: bytes, flags: int, mask: int) -> dict[str, Any]:
    """What it filled in, the devices aside."""
    buffer = ctypes.create_string_buffer(256)
    call(libc.statx, directory, path, flags, ctypes.c_uint(mask), buffer)
    head = struct.unpack_from("IIQIIIHxxQQQQ", buffer)
    names = ("mask", "blksize", "attributes", "nlink", "uid", "gid", "mode", "ino", "size", "blocks", "attributes_mask")
    times = (seconds * 10**9 + rest for seconds, rest in struct.iter_unpack("qIxxxx", buffer.raw[64:128]))
    return {
        **dict(zip(names, head, strict=True)),
        **dict(zip(("atime", "btime", "ctime", "mtime"), times, strict=True)),
    }


class Aio:
    """A context of the kernel's asynchronous input and output, as libaio makes it; use `aio`."""

    READ, WRITE, FSYNC, FDATASYNC = 0, 1, 2, 3

    def __init__(self, context: ctypes.c_ulong) -> None:
        self._context = context

    def run(self, *requests: tuple[int, int, mmap.mmap, int]) -> list[int]:
        """Submit (what, descriptor, buffer, offset) at once and wait: bytes, or an errno below zero, of each in order.

        OSError when they are not taken. An fsync has no use for its buffer.
        """
        blocks = []
        for number, (what, fd, buffer, offset) in enumerate(requests):
            address, length = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer)
            if what in (self.FSYNC, self.FDATASYNC):
                address = length = offset = 0
            block = struct.pack("QIiHhIQQqQII", number, 0, 0, what, 0, fd, address, length, offset, 0, 0, 0)
            blocks.append(ctypes.create_string_buffer(block, len(block)))
        pointers = (ctypes.c_void_p * len(blocks))(*(ctypes.addressof(block) for block in blocks))
        taken = call(libc.syscall, _number(3), self._context, ctypes.c_long(len(blocks)), pointers)
        assert taken == len(blocks)
        events, within = ctypes.create_string_buffer(32 * taken), struct.pack("qq", _AIO_S, 0)
        wanted = ctypes.c_long(taken)
        assert call(libc.syscall, _number(2), self._context, wanted, wanted, events, within) == taken
        done = {number: result for number, _, result, _ in struct.iter_unpack("QQqq", events.raw)}
        return [done[number] for number in range(taken)]


@contextmanager
def aio() -> Iterator[Aio]:
    context = ctypes.c_ulong(0)
    call(libc.syscall, _number(0), 64, ctypes.byref(context))
    try:
        yield Aio(context)
    finally:
        libc.syscall(_number(1), context)


def has_aio() -> bool:
    return platform.machine() in _NUMBERS and os.path.exists("/proc/sys/fs/aio-nr")


def _number(index: int) -> int:
    return _NUMBERS[platform.machine()][index]
