"""Markers: small files and links that say which checkpoint is the newest, the best, or complete.

A directory that was rotated away before its turn is left out of a cut, unless the cut has something that may name it:
whoever follows that elsewhere would not find it. What names a directory is found by looking: its name, or alone in a
file its number (Megatron's latest_checkpointed_iteration.txt), in the first bytes of any small file of the cut that was
not published before, or in the target of any link. Too much is found rather than too little: then it is only sent.

Who calls: the event loop's thread. The files are read once for each cut, and only when something was rotated away.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection

from ckptfs.ids import ImageId, Inode
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.cuts import Cuts
from ckptfs.local.images import Images

_SMALL_BYTES = 1 << 20
"""Nobody reads more to find out which checkpoint to load."""
_READ_BYTES = 1 << 16
"""The HF Trainer's trainer_state.json has the best checkpoint's name before its history."""
_MOST_FILES, _MOST_BYTES = 2000, 16 << 20
"""What is looked through holds up everything else for some 50 ms; of more, all is taken to be named."""


class Markers:
    """What the cut asked for last may name."""

    def __init__(self, cuts: Cuts, contents: Contents, images: Images) -> None:
        self._cuts = cuts
        self._contents = contents
        self._images = images
        self._cut: int | None = None
        self._texts: list[tuple[Inode, bytes]] | None = []
        """(directory, what a file or link in it says); None when that is too much, or cannot be read."""

    def may_name(self, cut: int, name: bytes, below: Collection[Inode]) -> bool:
        """Whether something in *cut* may name the directory called *name*; *below* are it and all directories in it."""
        if cut != self._cut:
            self._cut, self._texts = cut, self._read(cut)
        if self._texts is None:
            return True
        naming = _naming(name)
        return any(naming.search(text) for directory, text in self._texts if directory not in below)

    def _read(self, cut: int) -> list[tuple[Inode, bytes]] | None:
        found: list[tuple[Inode, bytes]] = []
        left = _MOST_BYTES
        for directory, image, target in self._cuts.small(cut, _SMALL_BYTES, limit=_MOST_FILES + 1):
            text = target if image is None else self._text(image)
            left -= len(text or b"")
            if text is None or left < 0 or len(found) == _MOST_FILES:
                return None
            found.append((directory, text))
        return found

    def _text(self, image: ImageId) -> bytes | None:
        """How the image begins; None when not all of it is here."""
        if not self._contents.image_is_whole(image):
            return None
        try:
            fd = self._images.open(image)
        except OSError:
            return None
        try:
            return os.pread(fd, _READ_BYTES, 0)
        except OSError:
            return None
        finally:
            os.close(fd)


def _naming(name: bytes) -> re.Pattern[bytes]:
    """What a text that names *name* has: also as JSON writes it; not step-10 for step-1."""
    written = json.dumps(os.fsdecode(name))[1:-1].encode()
    before = rb"(?<!\d)" if name[:1].isdigit() else b""
    after = rb"(?!\d)" if name[-1:].isdigit() else b""
    parts = [before + re.escape(each) + after for each in {name, written}]
    number = re.search(rb"(\d+)$", name)
    if number:
        parts.append(rb"\A\s*0*" + (number[1].lstrip(b"0") or b"0") + rb"\s*\Z")
    return re.compile(b"|".join(parts))
