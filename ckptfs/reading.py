"""What was read of files that have bytes elsewhere, and how much may be fetched ahead of who reads on. Pure.

Who reads a whole checkpoint and who reads a part of it look the same until the second one stops, and must not pay for
the rest. So what was fetched ahead and was not read is kept to a share of what was read, one eighth, by whomever and
wherever, in all the files that belong together.
"""

from __future__ import annotations

from ckptfs.spans import SpanSet

SHARE = 8
"""Bytes read for one that may have been fetched in vain."""


class Account:
    """Of the files in a directory: what readers earned, and what of it is spent."""

    def __init__(self) -> None:
        self.read_bytes = 0
        """Read where bytes were elsewhere."""
        self.unread_bytes = 0
        """Fetched ahead, and not read."""
        self.share = SHARE
        """1 when it is known that everything will be read."""

    def left(self) -> int:
        """How many bytes more may be fetched ahead; less than nothing when that is too many already."""
        return self.read_bytes // self.share - self.unread_bytes


class Reading:
    """Of one open file."""

    def __init__(self) -> None:
        self.account = Account()
        self.touched = SpanSet()
        """What was read of it, by whomever."""
        self.touched_bytes = 0
        self._ahead = SpanSet()
        """What was fetched ahead, and not read."""

    def was_read(self, start: int, end: int, *, cold: bool) -> None:
        """Bytes [start, end) were read; *cold*: not all of the file is here."""
        new_bytes = self.touched.lacks(start, end)
        self.touched.add(start, end)
        self.touched_bytes += new_bytes
        if cold:
            self.account.read_bytes += new_bytes
        self.account.unread_bytes -= end - start - self._ahead.lacks(start, end)
        self._ahead.remove(start, end)

    def ask(self, start: int, end: int) -> None:
        """Bytes [start, end) are being fetched before anybody reads them."""
        for first, last in self.touched.missing(start, end):
            self.account.unread_bytes += self._ahead.lacks(first, last)
            self._ahead.add(first, last)

    def asked(self, position: int) -> int:
        """Up to where bytes are being fetched ahead of a reader at *position*."""
        return self._ahead.run(position)[1]

    def run(self, position: int) -> int:
        """Where the run of bytes that were read begins that reaches *position*."""
        return self.touched.run(position)[0]

    def earned(self, position: int) -> int:
        """How many bytes may be fetched ahead of *position*, with those that are already."""
        return max(self.account.left() + self.asked(position) - position, 0)
