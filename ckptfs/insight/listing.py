"""The files of a checkpoint on any file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator


def _raise(error: OSError) -> None:
    raise error


def files_below(top: str, on_error: Callable[[OSError], None] = _raise) -> Iterator[tuple[str, bytes]]:
    """(path, path from *top*) of each regular file, ordered; that of *top* itself, if it is one, is empty.

    Links to files are followed, links to directories are not. Raises OSError when *top* cannot be read; what else
    cannot be is *on_error*'s.
    """
    if not os.path.isdir(top):
        os.stat(top)
        yield top, b""
        return
    os.scandir(top).close()
    for directory, folders, names in os.walk(top, onerror=on_error):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                yield path, os.fsencode(os.path.relpath(path, top))
