"""A trainer that saves without end and remembers what returned, so that a test can tell what must have survived a kill.

Every system call that changes something is one step: before it, the trees that may be found from now on are noted (with
and without it); once it returned, only the one with it remains. A write that did not return may have come in part.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.trees import Node, Tree, differences, digest_bytes, read_tree

_WRITE = 100_000
"""Bytes per write()."""
_BLOCK = 4096


@dataclass(frozen=True)
class File:
    """A name as the saver knows it; a directory's and a link's data are empty."""

    mode: int
    data: bytes = b""
    mtime_ns: int | None = None
    """None: as the last write left it."""
    target: str | None = None
    xattrs: tuple[tuple[str, bytes], ...] = ()


Model = dict[str, File]


class Saver:
    """Works below *root* in a thread of its own from `start` until `stop` or until a system call fails."""

    def __init__(self, root: Path, seed: int, *, largest: int = 400_000) -> None:
        self._root = root
        self._random = random.Random(seed)
        self._largest = largest
        self._weights = self._random.randbytes(largest)  # frozen layers: most checkpoints share them
        self.model: Model = {}
        self._possible: list[Model] = [{}]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None
        self.steps = 0
        self.saves = 0
        self.ended = threading.Event()

    def start(self) -> None:
        self._stop.clear()
        self.ended.clear()
        self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask it to stop after the step it is at, and wait; fails when that step never returns."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "a system call of the saver hangs"

    def adopt(self) -> None:
        """Look at what is there now. Fails, with what differs, unless it is a state that may be there."""
        found = read_tree(self._root)
        told: list[list[str]] = []
        for each in self._possible:
            wanted = {path: _node(file) for path, file in each.items()}
            different = differences(wanted, found)
            torn = [path for path in each if _differs(wanted, found, path)]
            if different and len(torn) == len(different) == 1 and self._is_torn(torn[0]):
                each = {**each, torn[0]: replace(each[torn[0]], data=self._bytes(torn[0]), mtime_ns=None)}
                different = []
            if not different:
                self.model = dict(each)
                self._possible = [self.model]
                return
            told.append(different)
        raise AssertionError("what returned is not there:\n" + "\nor\n".join("\n".join(each[:8]) for each in told))

    # Within

    def _bytes(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def _is_torn(self, path: str) -> bool:
        """Whether the bytes of *path* are a mixture of those before and after the step that did not return."""
        states = [each[path].data for each in self._possible if path in each]
        if len(states) != 2:
            return False
        before, after = states
        data = self._bytes(path)
        if not min(len(before), len(after)) <= len(data) <= max(len(before), len(after)):
            return False
        return all(
            data[at : at + _BLOCK] in (before[at : at + _BLOCK], after[at : min(at + _BLOCK, len(data))])
            for at in range(0, len(data), _BLOCK)
        )

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._save()
                self.saves += 1
        except OSError as error:
            self.error = error
        except _Stopped:
            pass
        finally:
            self.ended.set()

    def _step(self, call: Callable[[], object], change: Callable[[Model], None]) -> object:
        if self._stop.is_set():
            raise _Stopped
        after = dict(self.model)
        change(after)
        self._possible = [self.model, after]
        result = call()
        self.model = after
        self._possible = [after]
        self.steps += 1
        return result

    def _at(self, path: str) -> str:
        return os.path.join(self._root, path)

    # What it does

    def _save(self) -> None:
        number = 1 + max((int(p[5:]) for p in self.model if p.startswith("step-") and p[5:].isdecimal()), default=0)
        final, temporary = f"step-{number}", f"tmp-{number}"
        for left in [path for path in self.model if path.startswith("tmp-") and "/" not in path]:
            self._remove_tree(left)
        self._mkdir(temporary)
        for index in range(self._random.randint(1, 4)):
            self._write(f"{temporary}/shard-{index}", self._content())
        self._change_something(temporary)
        self._rename(temporary, final)
        self._write("latest.new", final.encode())
        self._rename("latest.new", "latest")
        self._append("log", f"step {number}\n".encode() * 10)
        for old in [path for path in self.model if path.startswith("step-") and "/" not in path]:
            if int(old[5:]) < number - 2:
                self._remove_tree(old)

    def _content(self) -> bytes:
        size = self._random.randint(0, self._largest)
        kept = self._random.randint(0, size)
        return self._weights[:kept] + self._random.randbytes(size - kept)

    def _change_something(self, directory: str) -> None:
        path = self._random.choice([p for p in self.model if p.startswith(f"{directory}/")])
        match self._random.randrange(8):
            case 0:
                self._overwrite(path)
            case 1:
                size = self._random.randint(0, max(1, 2 * len(self.model[path].data)))
                self._truncate(path, size)
            case 2:
                mode = self._random.choice((0o600, 0o640, 0o755))
                self._step(lambda: os.chmod(self._at(path), mode), _edit(path, mode=stat.S_IFREG | mode))
            case 3:
                time_ns = self._random.randrange(10**18)
                self._step(lambda: os.utime(self._at(path), ns=(time_ns, time_ns)), _edit(path, mtime_ns=time_ns))
            case 4:
                value = self._random.randbytes(100)
                self._step(
                    lambda: os.setxattr(self._at(path), "user.note", value), _edit(path, xattrs=(("user.note", value),))
                )
            case 5:
                name, link = f"{directory}/link", File(stat.S_IFLNK | 0o777, target="shard-0")
                self._step(lambda: os.symlink("shard-0", self._at(name)), _put(name, link))
            case 6:
                name = f"{directory}/hard"
                self._step(lambda: os.link(self._at(path), self._at(name)), _put(name, self.model[path]))
            case 7:
                self._append(path, self._content())

    def _mkdir(self, path: str) -> None:
        self._step(lambda: os.mkdir(self._at(path), 0o755), _put(path, File(stat.S_IFDIR | 0o755)))

    def _write(self, path: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = self._step(lambda: os.open(self._at(path), flags, 0o644), _put(path, File(stat.S_IFREG | 0o644)))
        self._fill(fd, path, data)

    def _append(self, path: str, data: bytes) -> None:
        new = File(stat.S_IFREG | 0o644)
        fd = self._step(
            lambda: os.open(self._at(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            lambda model: model.update({path: model.get(path, new)}),
        )
        self._fill(fd, path, data)

    def _fill(self, fd: object, path: str, data: bytes) -> None:
        assert isinstance(fd, int)
        try:
            for at in range(0, len(data), _WRITE):
                part = data[at : at + _WRITE]
                whole = self.model[path].data + part

                def write(part: bytes = part) -> None:
                    if os.write(fd, part) != len(part):
                        raise OSError("a short write")

                self._step(write, _edit(path, data=whole, mtime_ns=None))
            if self._random.random() < 0.3:
                os.fsync(fd)
        finally:
            with suppress(OSError):
                os.close(fd)

    def _overwrite(self, path: str) -> None:
        before = self.model[path].data
        at = self._random.randint(0, len(before))
        part = self._random.randbytes(self._random.randint(1, 20_000))
        data = before[:at] + part + before[at + len(part) :]
        fd = os.open(self._at(path), os.O_WRONLY)
        try:
            self._step(lambda: os.pwrite(fd, part, at), _edit(path, data=data, mtime_ns=None))
        finally:
            with suppress(OSError):
                os.close(fd)

    def _truncate(self, path: str, size: int) -> None:
        data = self.model[path].data[:size]
        data += bytes(size - len(data))
        self._step(lambda: os.truncate(self._at(path), size), _edit(path, data=data, mtime_ns=None))

    def _rename(self, old: str, new: str) -> None:
        def change(model: Model) -> None:
            for path in [p for p in model if p == old or p.startswith(f"{old}/")]:
                model[new + path[len(old) :]] = model.pop(path)

        self._step(lambda: os.rename(self._at(old), self._at(new)), change)

    def _remove_tree(self, directory: str) -> None:
        for path in sorted(p for p in self.model if p.startswith(f"{directory}/")):
            self._step(lambda path=path: os.unlink(self._at(path)), lambda model, path=path: _drop(model, path))  # type: ignore[misc]
        self._step(lambda: os.rmdir(self._at(directory)), lambda model: _drop(model, directory))


class _Stopped(Exception):
    pass


def _node(file: File) -> Node:
    node = Node(file.mode, mtime_ns=file.mtime_ns, target=file.target, xattrs=file.xattrs)
    if stat.S_ISREG(file.mode):
        return replace(node, size=len(file.data), digest=digest_bytes(file.data))
    return node


def _differs(wanted: Tree, found: Tree, path: str) -> bool:
    return path in found and bool(differences({path: wanted[path]}, {path: found[path]}))


def _put(path: str, file: File) -> Callable[[Model], None]:
    return lambda model: model.update({path: file})


def _edit(path: str, **fields: object) -> Callable[[Model], None]:
    return lambda model: model.update({path: replace(model[path], **fields)})  # type: ignore[arg-type]


def _drop(model: Model, path: str) -> None:
    del model[path]
