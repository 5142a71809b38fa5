"""Settling: at which moment everything new is whole, so that a cut may be taken.

The file system calls the event methods on the loop after each commit. Each ends in `_evaluate`, which takes the cut
right there when nothing speaks against it: the state that is cut is the state at that very event. What speaks against
it, in the order in which it is cheap to find out:

1. A file is open and unfinished. A log (open for `log_after_s`, grown twice, and sealed again with what was sealed
   before unchanged; or known by its name) does not count.
2. A directory with a layout that is not recognised saw a name come, go or change within `settle_s`.
3. A recognised set among the changed directories is not complete (`sets`).
4. Only contents or attributes changed, and the last cut is younger than `settle_s`: a program that rewrites a small
   file every second must not cost a head every second.

Where time alone can resolve it, `run` evaluates again then. What is unfinished or incomplete and did not change for
`max_lag_s` is given up: it no longer counts, an unfinished file is left out, and the cut is marked incomplete. While
something goes on changing for `_PATIENCE` times that, a cut is taken around it: unfinished files and new incomplete
sets are left out, everything else goes on in order.

The state here is lost with the process and rebuilt from the catalog: directories marked dirty, nothing open.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ckptfs.errors import NameMissing
from ckptfs.ids import ROOT_INODE, ImageId, Inode
from ckptfs.local.catalog.cutcopy import ImageStatus, Provisional
from ckptfs.local.catalog.cuts import Cuts, Unneeded
from ckptfs.local.catalog.heads import Heads
from ckptfs.local.store import Store
from ckptfs.replica import sets
from ckptfs.replica.sets import UNRECOGNISED, Verdict

log = logging.getLogger(__name__)

_PATIENCE = 5
"""Times `max_lag_s` that a cut waits for what goes on changing: a checkpoint may take minutes to write, but what is
complete beside it must not wait for ever."""
_POLL_S = 1.0
"""How often open files are looked at while they hold a cut back: growth is not reported by the kernel."""
_MERGING_S = 0.05
"""When to look again while another writer's head is being merged."""
_LATE_S = 0.005
"""Later than this the loop was busy: what programs did meanwhile is not known yet, and may not be taken for quiet."""
_PAUSE = 10
"""A cut that nobody began to publish stays for so many times as long as it took: it copies directories whole, and where
these hold thousands of checkpoints, one for each of a rapid series left no time to publish any."""
_AFTER_FAILURE_S = 5.0
"""When to try again after a cut failed (the disk is full)."""


@dataclass
class _OpenFile:
    """A file whose content is unfinished."""

    since: float
    active_at: float
    size: int = 0
    ctime_ns: int = 0
    growths: int = 0
    named_log: bool = False
    """Its name says that it is a log."""
    unchanged_seals: int = 0
    """Provisional seals in a row that found what was sealed before unchanged."""


@dataclass
class _Directory:
    """A directory in which something changed since the last cut."""

    active_at: float
    named_at: float = -math.inf
    """When a name last came, went or changed that is not part of a recognised layout."""
    verdict: Verdict | None = None
    """None: to be judged anew."""
    removed_at: float = -math.inf
    """When a name last went: a set that is being rotated away may look whole for a while."""
    made_at: float = -math.inf
    """When it was made, empty."""


@dataclass
class _Blocked:
    """Why no cut can be taken now."""

    until: float
    """When time may resolve it."""
    files: set[Inode] = field(default_factory=set)
    directories: set[Inode] = field(default_factory=set)


class Settler:
    """Watches changes and takes cuts; a `ChangeListener` of the file system.

    *provisional* gives a log's last seal, *released* is told what a replaced cut has left, *wake* tells the publisher
    that there is something to do. None of them may await.
    """

    def __init__(
        self,
        store: Store,
        cuts: Cuts,
        heads: Heads,
        *,
        provisional: Callable[[Inode], Provisional | None] = lambda ino: None,
        released: Callable[[Unneeded], None] = lambda unneeded: None,
        wake: Callable[[], None] = lambda: None,
        merging: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._names = store.names
        self._cuts = cuts
        self._heads = heads
        self._provisional = provisional
        self._released = released
        self._wake = wake
        self._merging = merging
        self._open: dict[Inode, _OpenFile] = {}
        self._directories: dict[Inode, _Directory] = {}
        self._news = False
        self._pending_since = math.inf
        self._last_cut_at, self._last_cut_s = -math.inf, 0.0
        self._deadline = math.inf
        self._deadline_moved = trio.Event()
        self._commits_cut = -1
        """Commits of the catalog that the newest cut has."""
        self.incomplete_sets: set[Inode] = set()
        """Directories that the newest cut has although they were not complete, for status."""

    # Events

    def entry_changed(self, parent: Inode, name: bytes, *, renamed: bool = False) -> None:
        """A name was created, renamed or removed."""
        if self._store.catalog.commits == self._commits_cut:
            return  # the other half of a rename, of which the first half led to a cut
        now = self._changed()
        directory = self._directory(parent, now)
        directory.active_at = now
        child = self._names.find(parent, name)
        if child is not None and stat.S_ISDIR(self._names.inode(child).mode):
            self._directory(child, now).active_at = now
            if self._names.is_empty(child):
                self._directories[child].made_at = now
            self._forget_verdicts()  # what lies below may have moved out of a temporary directory
        elif sets.is_telling(name) and not self._still_misses(parent, directory, child):
            directory.verdict = None
        if name == b"latest":
            self._forget_verdicts()
        if child is None and not renamed:
            directory.removed_at = now
        if not sets.is_set_name(name) and (child is None or self._kind(child) is None):
            directory.named_at = now
        self._evaluate()

    def writing(self, ino: Inode, new: bool) -> None:
        """The content of a file is unfinished from now on."""
        now = self._changed()
        file = self._open.setdefault(ino, _OpenFile(now, now))
        file.active_at = now
        file.named_log = any(sets.is_log_name(name) for _, name in self._names.parents(ino))
        self._look_at(ino, file, now)

    def grew(self, ino: Inode) -> None:
        """An unfinished file was found to have grown. Optional: open files are also polled."""
        file = self._open.get(ino)
        if file is not None:
            self._look_at(ino, file, trio.current_time())

    def closed(self, ino: Inode) -> None:
        """The last writer of a changed file is gone: its content is whole."""
        self._open.pop(ino, None)
        now = self._changed()
        for parent, name in self._names.parents(ino):
            self._directory(parent, now).active_at = now
            if name == b"latest":
                self._forget_verdicts()
            elif sets.is_telling(name):  # an index may name other files now
                directory = self._directories[parent]
                if not self._still_misses(parent, directory, ino):
                    directory.verdict = None
        self._evaluate()

    def attributes_changed(self, ino: Inode) -> None:
        now = self._changed()
        for parent, _ in self._names.parents(ino):
            self._directory(parent, now).active_at = now
        self._evaluate()

    def sealed(
        self, ino: Inode | None, *, late: bool = False, provisional: bool = False, unchanged: bool = True
    ) -> None:
        """A file was sealed, maybe so *late* that a cut was published without it; or a log was, *provisional*, what was
        sealed of it before being *unchanged* or not."""
        if not provisional:
            if late:
                self._changed()
                self._evaluate()
            self._wake()
            return
        file = self._open.get(ino) if ino is not None else None
        if file is None:
            return
        self._changed()
        file.unchanged_seals = file.unchanged_seals + 1 if unchanged else 0
        self._evaluate()

    # Asking

    def cut_now(self) -> bool:
        """Cut at once, whatever is unfinished; False when nothing changed since the last cut."""
        if not self._news:
            return False
        now = trio.current_time()
        unfinished = {ino for ino in self._open if self._names.parents(ino)}
        incomplete = self._incomplete_sets()
        whole = not incomplete and all(self._is_log(self._open[ino], now) for ino in unfinished)
        self._take(now, incomplete=not whole, incomplete_sets=incomplete)
        return True

    # Running

    def load(self) -> None:
        """Take up what an earlier process left: changed directories, nothing open. Call inside trio, before events."""
        changed = self._cuts.changed()
        if changed:
            now = self._changed()
            for ino in changed:
                self._directory(ino, now).named_at = now
            self._evaluate()

    async def run(self) -> None:
        """Evaluate again when time may have resolved what held a cut back; until cancelled."""
        self.load()
        while True:
            self._deadline_moved = trio.Event()
            with trio.move_on_at(self._deadline):
                await self._deadline_moved.wait()
            now = trio.current_time()
            if now >= self._deadline + _LATE_S:  # we were held up, and so were requests that come before us
                await trio.sleep(min(now - self._deadline, self._store.settings.settle_s))
                now = trio.current_time()
            if now >= self._deadline:
                self._deadline = math.inf
                for ino, file in self._open.items():
                    self._look_at(ino, file, now)
                self._evaluate()

    # Within: what changed

    def _changed(self) -> float:
        now = trio.current_time()
        if not self._news:
            self._news = True
            self._pending_since = now
        return now

    def _directory(self, ino: Inode, now: float) -> _Directory:
        """The record of a directory, made when new, and moved to the end: the latest is the likeliest to hold back."""
        directory = self._directories.pop(ino, None) or _Directory(now)
        self._directories[ino] = directory
        return directory

    def _forget_verdicts(self) -> None:
        for directory in self._directories.values():
            directory.verdict = None

    def _still_misses(self, ino: Inode, directory: _Directory, changed: Inode | None) -> bool:
        """Whether a verdict "incomplete" stands without judging again: its missing file is still missing."""
        missing = directory.verdict.missing if directory.verdict else None
        return changed is not None and missing is not None and self._names.find(ino, missing) is None

    def _look_at(self, ino: Inode, file: _OpenFile, now: float) -> None:
        try:
            image = self._names.inode(ino).image
            status = self._image_status(ino, image) if image is not None else None
        except (NameMissing, OSError):
            return
        if status is None:
            return
        if (status.size, status.ctime_ns) != (file.size, file.ctime_ns):
            file.active_at = now
        if status.size > file.size:
            file.growths += 1
        file.size, file.ctime_ns = status.size, status.ctime_ns

    # Within: what speaks against a cut

    def _evaluate(self) -> None:
        """Take a cut, or remember when to look again. Never raises: a change that was committed must be answered."""
        if not self._news:
            return
        try:
            now = trio.current_time()
            if self._merging():  # half of what another writer published must not be published as ours
                self._look_again(now + _MERGING_S)
                return
            given_up: set[Inode] = set()
            blocked = self._blocked(now, given_up)
            rested = self._last_cut_at + _PAUSE * self._last_cut_s
            if blocked is None and now < rested and self._cuts.pending() is not None:
                blocked = _Blocked(rested)
            if blocked is None:
                incomplete = given_up & self._directories.keys()
                self._take(now, incomplete=bool(given_up), incomplete_sets=incomplete, held=self._empty(now))
                return
            overdue = self._pending_since + _PATIENCE * self._store.settings.max_lag_s
            if now >= overdue:
                held = (self._incomplete_sets() | self._empty(now)) - given_up - {ROOT_INODE}
                self._take(now, incomplete=True, held=held, incomplete_sets=given_up & self._directories.keys())
                return
            self._look_again(min(blocked.until, overdue))
        except Exception:  # whatever it is, it is not the caller's fault: a cut taken later does as well
            log.exception("no cut could be taken")
            self._look_again(trio.current_time() + _AFTER_FAILURE_S)

    def _look_again(self, at: float) -> None:
        if at < self._deadline:
            self._deadline = at
            self._deadline_moved.set()

    def _blocked(self, now: float, given_up: set[Inode]) -> _Blocked | None:
        """What holds a cut back, the cheapest first; None when nothing does. Adds what was given up to *given_up*."""
        settings = self._store.settings
        for ino, file in self._open.items():
            if self._holds_back(ino, file, now):
                if now >= file.active_at + settings.max_lag_s:
                    given_up.add(ino)
                else:
                    return _Blocked(now + min(_POLL_S, settings.max_lag_s / 4, settings.log_after_s / 4))
        for directory in reversed(self._directories.values()):
            until = directory.named_at + settings.settle_s
            if now < until and directory.verdict is UNRECOGNISED:
                return _Blocked(until)
        recognised = False
        for ino, directory in reversed(list(self._directories.items())):
            verdict = self._verdict(ino)
            if ino not in self._directories:  # it was removed
                continue
            if verdict.kind is None:
                until = directory.named_at + settings.settle_s
                if now < until:
                    return _Blocked(until)
            elif verdict.complete:
                recognised = True
                if now < directory.removed_at + settings.settle_s:
                    return _Blocked(directory.removed_at + settings.settle_s)
            elif now >= directory.active_at + settings.max_lag_s:
                given_up.add(ino)
            else:
                return _Blocked(directory.active_at + settings.max_lag_s)
        if not recognised and now < self._last_cut_at + settings.settle_s:
            return _Blocked(self._last_cut_at + settings.settle_s)
        return None

    def _holds_back(self, ino: Inode, file: _OpenFile, now: float) -> bool:
        return not self._is_log(file, now) and bool(self._names.parents(ino))

    def _is_log(self, file: _OpenFile, now: float) -> bool:
        if file.named_log:
            return True
        return now >= file.since + self._store.settings.log_after_s and file.growths >= 2 and file.unchanged_seals > 0

    def _incomplete_sets(self) -> set[Inode]:
        return {ino for ino in list(self._directories) if not self._verdict(ino).complete}

    def _empty(self, now: float) -> set[Inode]:
        """New directories that are empty: what is about to be written into them tells what they are."""
        lately = now - self._store.settings.max_lag_s
        return {
            ino for ino, each in self._directories.items() if each.made_at > lately and self._names.is_empty(ino)
        }

    def _kind(self, ino: Inode) -> str | None:
        """The kind of set that *ino* is, None also for anything but a directory that changed."""
        return self._verdict(ino).kind if ino in self._directories else None

    def _verdict(self, ino: Inode) -> Verdict:
        """What a changed directory is. One that was removed is forgotten, and nothing special."""
        directory = self._directories.get(ino)
        if directory is None:
            return UNRECOGNISED
        path = self._path(ino)
        if path is None:
            del self._directories[ino]
            return UNRECOGNISED
        if directory.verdict is None:
            try:
                directory.verdict = self._judge(ino, path)
            except Exception:  # whatever is in it, it must not keep everything else from being published
                log.exception("the directory %s is taken for no checkpoint", os.fsdecode(path[0][1]) if path else "/")
                directory.verdict = UNRECOGNISED
        return directory.verdict

    def _judge(self, ino: Inode, path: list[tuple[Inode, bytes]]) -> Verdict:
        if sets.is_temporary_below([name for _, name in path[1:]]):
            return Verdict("below", False)
        children = dict(self._names.entries(ino))
        parent, name = path[0] if path else (ROOT_INODE, b"")
        return sets.judge(
            name,
            children.keys(),
            lambda each: self._read_small(children.get(each)),
            lambda each: self._read_small(self._names.find(parent, each)),
        )

    def _path(self, ino: Inode) -> list[tuple[Inode, bytes]] | None:
        """(parent, name) of a directory, of its parent ... up to the root; None when it has no name any more."""
        path: list[tuple[Inode, bytes]] = []
        while ino != ROOT_INODE:
            found = self._names.parents(ino)
            if not found:
                return None
            path.append(found[0])
            ino = found[0][0]
        return path

    def _read_small(self, ino: Inode | None) -> bytes | None:
        if ino is None or ino in self._open:
            return None
        row = self._names.inode(ino)
        if row.image is None or not self._store.contents.image_is_whole(row.image):
            return None
        try:
            with open(self._store.images.file(row.image), "rb") as file:
                data = file.read(sets.INDEX_MOST + 1)
        except OSError:
            return None
        return data if len(data) <= sets.INDEX_MOST else None

    # Within: the cut

    def _image_status(self, ino: Inode, image: ImageId) -> ImageStatus:
        status = self._store.images.status(image)
        return ImageStatus(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def _take(
        self, now: float, *, incomplete: bool, incomplete_sets: set[Inode], held: set[Inode] | None = None
    ) -> None:
        """Take a cut now, without the unfinished files and the directories in *held*."""
        held, began = held or set(), time.monotonic()
        cut, unneeded = self._cuts.take(
            taken_ns=time.time_ns(),
            stamp=self._store.clock.tick(),
            incomplete=incomplete,
            vector=self._heads.vector(),
            unfinished=self._open.keys(),
            held=held,
            status=self._image_status,
            provisional=self._provisional,
        )
        self._released(unneeded)  # after the commit: image files are deleted
        log.debug("cut %d taken%s", cut, ", incomplete" if incomplete else "")
        self.incomplete_sets = set(incomplete_sets)
        self._last_cut_at, self._last_cut_s = now, time.monotonic() - began
        self._news = bool(held)
        self._pending_since = now if held else math.inf
        self._directories = {ino: each for ino, each in self._directories.items() if ino in held}
        self._deadline = math.inf
        if held:
            self._look_again(now + self._store.settings.max_lag_s)
        self._wake()
        self._commits_cut = self._store.catalog.commits
