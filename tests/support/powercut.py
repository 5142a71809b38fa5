"""What a power cut can leave of a disk whose changes and flushes were written down (`tests.support.testdisk`).

What was flushed is there. Of what came after the last flush of a file, any subset of its blocks may be there, in any
order; of a directory's new, removed and renamed names, any subset since the last flush of the directory. That is more
than any real disk does: ext4 and xfs keep the order of names.
"""

from __future__ import annotations

import marshal
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 4096
ROOT = 1
LEFT_OUT = ("lock", "control.sock", "daemon.log", "ballast", "catalog.db-shm")
"""Nothing depends on what these were: they are made anew, or tell nothing of the files."""


@dataclass
class _NameChange:
    """Applied to one directory, or two, as a whole or not at all."""

    gone: tuple[int, bytes] | None
    here: tuple[int, bytes] | None
    node: int
    done: bool = False


@dataclass
class _Node:
    mode: int
    target: bytes = b""
    durable: bytearray = field(default_factory=bytearray)
    changes: list[tuple[Any, ...]] = field(default_factory=list)
    """Writes and truncations since the last flush."""
    names: dict[bytes, int] = field(default_factory=dict)
    renames: list[_NameChange] = field(default_factory=list)


class Replay:
    """The disk as it was after so many bytes of the log, and what may be left of it when the power is cut then."""

    def __init__(self, log: Path) -> None:
        self._log = log.read_bytes()
        self._nodes: dict[int, _Node] = {ROOT: _Node(stat.S_IFDIR | 0o755)}
        self.position = 0

    def ends(self) -> list[int]:
        """Positions behind each record."""
        at, found = 0, []
        while at + 4 <= len(self._log):
            at += 4 + int.from_bytes(self._log[at : at + 4], "little")
            found.append(at)
        return [each for each in found if each <= len(self._log)]

    def advance(self, position: int) -> None:
        """Go on to *position*, which is behind the one before."""
        while self.position < position:
            length = int.from_bytes(self._log[self.position : self.position + 4], "little")
            self._apply(*marshal.loads(self._log[self.position + 4 : self.position + 4 + length]))
            self.position += 4 + length

    def cut(self, target: Path, chance: random.Random) -> None:
        """Write what is left into the new directory *target*."""
        kept = chance.choice((0.0, 0.3, 0.7, 0.95, 1.0))
        names = {number: dict(node.names) for number, node in self._nodes.items() if stat.S_ISDIR(node.mode)}
        changes = [each for node in self._nodes.values() for each in node.renames if not each.done]
        for change in {id(each): each for each in changes}.values():
            if chance.random() < kept:
                _rename(names, change)
        target.mkdir(0o700)
        self._write(ROOT, target, names, chance, kept)

    # Within

    def _apply(self, kind: str, number: int, *rest: Any) -> None:
        match kind:
            case "make":
                name, made, mode, link = rest
                self._nodes[made] = _Node(mode, link)
                self._change(_NameChange(None, (number, name), made))
            case "link":
                name, linked = rest
                self._change(_NameChange(None, (number, name), linked))
            case "unlink":
                self._change(_NameChange((number, rest[0]), None, 0))
            case "rename":
                name, directory, new_name, moved = rest
                self._change(_NameChange((number, name), (directory, new_name), moved))
            case "write" | "truncate":
                self._nodes[number].changes.append((kind, *rest))
            case "fsync":
                node = self._nodes[number]
                _apply(node.durable, node.changes)
                node.changes = []
            case "fsyncdir":
                self._flush_names(number)

    def _change(self, change: _NameChange) -> None:
        for directory in {each[0] for each in (change.gone, change.here) if each is not None}:
            self._nodes[directory].renames.append(change)

    def _flush_names(self, directory: int) -> None:
        names = {number: node.names for number, node in self._nodes.items()}
        for change in self._nodes[directory].renames:
            if not change.done:
                _rename(names, change)
                change.done = True
        self._nodes[directory].renames = []

    def _write(
        self, directory: int, target: Path, names: dict[int, dict[bytes, int]], chance: random.Random, kept: float
    ) -> None:
        for name, number in names[directory].items():
            path, node = target / os.fsdecode(name), self._nodes[number]
            if path.name in LEFT_OUT:
                continue
            if stat.S_ISDIR(node.mode):
                path.mkdir(0o700)
                self._write(number, path, names, chance, kept)
            elif stat.S_ISLNK(node.mode):
                os.symlink(node.target, path)
            elif stat.S_ISREG(node.mode):
                left = [each for change in node.changes for each in _blocks(change) if chance.random() < kept]
                data = bytearray(node.durable)
                _apply(data, left)
                path.write_bytes(data)


def _rename(names: dict[int, dict[bytes, int]], change: _NameChange) -> None:
    if change.gone is not None:
        directory, name = change.gone
        if change.here is None or names[directory].get(name) == change.node:
            names[directory].pop(name, None)
    if change.here is not None:
        directory, name = change.here
        names[directory][name] = change.node


def _blocks(change: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if change[0] != "write":
        yield change
        return
    _, offset, data = change
    at = 0
    while at < len(data):
        length = min(BLOCK - (offset + at) % BLOCK, len(data) - at)
        yield "write", offset + at, data[at : at + length]
        at += length


def _apply(data: bytearray, changes: list[tuple[Any, ...]]) -> None:
    for change in changes:
        if change[0] == "truncate":
            size = change[1]
            del data[size:]
            data.extend(bytes(size - len(data)))
        else:
            _, offset, new = change
            data.extend(bytes(max(0, offset - len(data))))
            data[offset : offset + len(new)] = new
