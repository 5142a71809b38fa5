"""Files that nobody has open, as far as we know, and that can be written all the same.

Two ways lead here: a memory map outlives its descriptor (C, C++ and Rust programs close theirs at once), which under
passthrough the kernel does not tell; or a program that our killed predecessor served goes on with the descriptors and
maps it has. Such a file counts as being written. A lease (`ckptfs.local.leases`) tells when that is over; there is no
event for it, so we look, often at first: after an ordinary close it takes the kernel a moment to let go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from ckptfs.handles import OpenFile
from ckptfs.ids import Inode
from ckptfs.local import leases
from ckptfs.local.images import Image

log = logging.getLogger(__name__)

_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.5


def is_free(image: Image) -> bool:
    """Whether nobody can write *image*, which is open for reading. Where there are no leases, only we ever could."""
    try:
        return leases.nobody_writes(image.fd)
    except OSError as error:
        log.debug("image %016x: %s", image.id, error)
        return True


class HeldFiles:
    """Looks at held files until they are free; then each is told to *freed*, on the loop."""

    def __init__(self, freed: Callable[[OpenFile], None]) -> None:
        self._freed = freed
        self._files: dict[Inode, OpenFile] = {}
        self._added = trio.Event()

    def add(self, file: OpenFile) -> None:
        file.held = True
        self._files[file.ino] = file
        self._added.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._files:
                await self._added.wait()
            pause_s = _FIRST_LOOK_S
            while self._files:
                if self._added.is_set():
                    self._added, pause_s = trio.Event(), _FIRST_LOOK_S
                with trio.move_on_after(pause_s):
                    await self._added.wait()
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
                self.look()

    def look(self) -> None:
        """Tell those that are free by now."""
        for file in list(self._files.values()):
            if file.writers or not is_free(file.image):
                continue
            del self._files[file.ino]
            file.held = False
            try:
                self._freed(file)
            except Exception:  # it must not be forgotten
                if file.modified:
                    self.add(file)
                raise
