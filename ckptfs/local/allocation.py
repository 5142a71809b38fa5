"""fallocate(2), of which Python knows only the POSIX part."""

from __future__ import annotations

import ctypes
import os

KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(fd: int, mode: int, start: int, length: int) -> None:
    """Raises OSError."""
    if _libc.fallocate(fd, mode, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
