"""The one table from ckptfs' errors to errno, and what happens to everything else: EIO and a logged traceback."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pyfuse3

from ckptfs import errors

log = logging.getLogger(__name__)

_ERRNOS: tuple[tuple[type[errors.CkptfsError], int], ...] = (
    (errors.NameMissing, errno.ENOENT),
    (errors.Stale, errno.ESTALE),  # the kernel looks the path up again
    (errors.NameExists, errno.EEXIST),
    (errors.NotDirectory, errno.ENOTDIR),
    (errors.IsADirectory, errno.EISDIR),
    (errors.DirectoryNotEmpty, errno.ENOTEMPTY),
    (errors.NameTooLong, errno.ENAMETOOLONG),
    (errors.AttributeMissing, errno.ENODATA),
    (errors.NotPermitted, errno.EPERM),
    (errors.ReadOnly, errno.EROFS),
    (errors.InvalidArgument, errno.EINVAL),
    (errors.NotSupported, errno.EOPNOTSUPP),
    (errors.TooManyLinks, errno.EMLINK),
)

P = ParamSpec("P")
T = TypeVar("T")


def errno_of(error: errors.CkptfsError) -> int:
    """The number for *error*; EIO where the table has none."""
    for kind, number in _ERRNOS:
        if isinstance(error, kind):
            return number
    return errno.EIO


def replies(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a FUSE handler answer every exception with an errno (invariant 9): one request fails, the mount lives on."""

    name = getattr(handler, "__name__", "request")

    @functools.wraps(handler)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except errors.ContentUnavailable as error:
            log.error("%s: %s", name, error)
            raise pyfuse3.FUSEError(errno.EIO) from None
        except errors.FileSystemError as error:
            raise pyfuse3.FUSEError(errno_of(error)) from None
        except OSError as error:
            if error.errno in (None, errno.EIO):
                log.exception("%s failed", name)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        except pyfuse3.FUSEError:
            raise
        except Exception:
            log.exception("%s failed unexpectedly", name)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return guarded


def answers(otherwise: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make what the C module asks (`passthrough.Answers`) say *otherwise* where it raises: a handler is asked then."""

    def decorate(answer: Callable[P, T]) -> Callable[P, T]:
        name = getattr(answer, "__name__", "answer")

        @functools.wraps(answer)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return answer(*args, **kwargs)
            except Exception:
                log.exception("%s failed; its request is handled as others are", name)
                return otherwise

        return guarded

    return decorate
