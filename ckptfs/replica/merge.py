"""Merging other writers' heads into the catalog's tree, lazily.

The live tree is the merged state. A head gives its writer's root tree; a directory that nobody looked into only takes
note of the new tree, one that was looked into is merged by (directory id, name), and then those below it whose tree
differs. What the rows of `source` say is still to be merged is done by the next pass, also after a restart, so that any
failure or cancellation leaves nothing but work undone.

Who calls: the event loop's thread. `apply` runs one at a time; `expand` any number at once, also during an apply, and
callers that want the same directory share one action. Fetching happens between transactions, never inside; every
transaction reads again what it assumes, since local operations run in between.

Which of two entries wins is `entries`' to say, what is saved of a directory that lost is `conflicts`'.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from ckptfs.config import Tuning
from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import Head, decode_head
from ckptfs.encoding.tree import Tree
from ckptfs.errors import ContentUnavailable, FormatError, RemoteError
from ckptfs.ids import ROOT_INODE, Clock, Inode, ObjectId, Stamp, WriterId
from ckptfs.local.catalog.catalog import SELF, Catalog
from ckptfs.local.catalog.followed import Followed
from ckptfs.local.catalog.names import CHANGED, Names
from ckptfs.local.catalog.sources import SourceRow, Sources
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.replica.conflicts import Conflicts
from ckptfs.replica.entries import Entries
from ckptfs.replica.passes import MergeListener, Pass, Side
from ckptfs.replica.trees import Trees

log = logging.getLogger(__name__)

_ENTRIES_AT_ONCE = 2000
"""Per transaction: about 50 ms, so that local operations are not kept waiting."""


@dataclass
class _Run:
    """One apply or expand: a pass for each writer whose trees it merges."""

    passes: dict[int, Pass] = field(default_factory=dict)
    touched: list[tuple[Inode, ObjectId, bytes | None, Tree]] = field(default_factory=list)
    held: list[tuple[Inode, int, ObjectId]] = field(default_factory=list)
    """(directory, writer row, tree): merged but for jobs that are still to be done."""


class Merger:
    """Keeps the catalog's tree merged with what other writers published.

    *clock* is set past every stamp that is merged. Who looks into a directory waits for the remote for up to
    *read_timeout_s*.
    """

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        remote: ObjectStore,
        listener: MergeListener,
        tuning: Tuning,
        read_timeout_s: float,
    ) -> None:
        limits = Limits(tuning.retry_first_s, tuning.retry_most_s, deadline_s=read_timeout_s)
        self._catalog = catalog
        self._clock = clock
        self._timeout_s = read_timeout_s
        self._names = Names(catalog)
        self._sources = Sources(catalog)
        self._followed = Followed(catalog)
        self._entries = Entries(catalog, listener)
        self._remote = Retrying(remote, limits)
        self._trees = Trees(self._remote, trio.CapacityLimiter(tuning.fetch_threads))
        self._conflicts = Conflicts(catalog, self._entries, self._trees)
        self._applying = trio.Lock()
        self._whole = trio.Event()
        """Set while the tree is not halfway between two heads."""
        self._whole.set()
        self._sides: dict[int, Side] = {}
        self._expanding: dict[Inode, trio.Event] = {}

    @property
    def requests(self) -> int:
        """Trees fetched so far."""
        return self._trees.requests

    async def apply(self, head: Head, body: bytes) -> None:
        """Merge *head*, whose object's bytes are *body*, and remember it as followed.

        Raises RemoteError and FormatError; then some of it is merged, it does not count as followed, and the next
        `apply` of this writer goes on.
        """
        async with self._applying:
            side = self._side(head)
            if side.row == SELF or "" not in head.lanes:
                return
            digest, tree_body = head.lanes[""]
            await self._read_ahead(side, ROOT_INODE, digest, tree_body)
            with self._halfway():
                await self._apply(head, side, body)

    @property
    def is_halfway(self) -> bool:
        """Whether the tree has a part of a head and not yet the rest."""
        return not self._whole.is_set()

    async def whole(self) -> None:
        """Return when the tree is not halfway between two heads: nobody who looks is to see that."""
        while not self._whole.is_set():  # it may be halfway to the next one when we run again
            await self._whole.wait()

    @property
    def behind(self) -> bool:
        """Whether something that was followed is not all merged: an earlier pass failed or was cut short."""
        return bool(self._sources.waiting(1))

    async def resume(self) -> None:
        """Merge what earlier passes left. Raises RemoteError and FormatError."""
        async with self._applying:
            with self._halfway():
                await self._finish(_Run())

    async def expand(self, directory: Inode) -> None:
        """Make sure that *directory* was merged from all its sources.

        Raises ContentUnavailable, with its cause, when the remote cannot deliver in time.
        """
        state = self._sources.tree(directory)
        if state is None or state.expanded:
            return
        run, began = _Run(), time.monotonic()
        try:
            with trio.fail_after(self._timeout_s):
                await self._expand(run, directory)
                await self._finish(run, waiting=False)
        except (RemoteError, FormatError, trio.TooSlowError) as error:
            state = self._sources.tree(directory)
            if state is None or state.expanded:
                log.warning("what other writers changed below directory %d is not all merged yet: %s", directory, error)
                return
            path = self._names.path(directory).decode(errors="replace")
            why = str(error) or self._remote.failure_since(began) or "no answer in time"
            raise ContentUnavailable(f"what {path} holds cannot be had from the remote now: {why}") from error

    # Within

    @contextmanager
    def _halfway(self) -> Iterator[None]:
        self._whole = trio.Event()
        try:
            yield
        finally:
            self._whole.set()

    async def _apply(self, head: Head, side: Side, body: bytes) -> None:
        self._clock.see(head.stamp)
        self._sides[side.row] = side
        run = _Run()
        digest, tree_body = head.lanes[""]
        with self._catalog.transaction():
            self._sources.put(ROOT_INODE, side.row, side.seq, digest, tree_body)
            state = self._sources.tree(ROOT_INODE)
            if state is not None and state.dirty == 0 and state.digest == digest:
                self._sources.set_merged(ROOT_INODE, side.row, digest)
        self._pass(run, side)
        await self._finish(run)
        with self._catalog.transaction():
            self._followed.remember(side.row, side.seq, body)

    async def _read_ahead(self, side: Side, directory: Inode, digest: ObjectId, body: bytes | None) -> None:
        """Fetch the trees that merging is going to need, so that it does not wait for the remote halfway."""
        state, source = self._sources.tree(directory), self._sources.get(directory, side.row)
        if state is None or not state.expanded or (source is not None and source.digest == digest):
            return
        for entry in (await self._trees.read(digest, body)).entries:
            if entry.file_id is None or entry.tree is None:
                continue
            local = self._names.inode_by_file_id(entry.file_id)
            if local is not None:
                await self._read_ahead(side, local.ino, ObjectId(entry.tree), entry.tree_body)

    def _side(self, head: Head) -> Side:
        row = self._catalog.writer_row(head.writer)
        known = {self._catalog.writer_row(writer): seq for writer, seq in head.vector.items()}
        known[row] = head.seq
        return Side(head.writer, row, head.seq, head.stamp, known)

    def _side_of(self, source: SourceRow) -> Side:
        """The newest head of a source's writer; its tree for a directory is the source's, however old that is."""
        side = self._sides.get(source.writer)
        if side is None:
            body = self._followed.body(source.writer)
            if body is not None:
                side = self._side(decode_head(open_object(body)))
            else:
                writer: WriterId = self._catalog.writer_id(source.writer)
                return Side(writer, source.writer, source.seq, Stamp(0), {source.writer: source.seq})
            self._sides[source.writer] = side
        return side

    def _pass(self, run: _Run, side: Side) -> Pass:
        if side.row not in run.passes:
            run.passes[side.row] = Pass(side, lambda directory: self._expand(run, directory))
        return run.passes[side.row]

    async def _finish(self, run: _Run, *, waiting: bool = True) -> None:
        """Merge what is *waiting*, settle what came up, and whatever that leads to, until nothing is left."""
        while (
            (waiting and await self._merge_waiting(run)) or await self._expand_diverging(run) or await self._settle(run)
        ):
            pass
        with self._catalog.transaction():
            for held in run.held:
                self._sources.set_merged(*held)
        await self._compare(run)

    async def _merge_waiting(self, run: _Run) -> bool:
        held = set(run.held)
        found = False
        for source in self._sources.waiting(64 + len(held)):
            if (source.dir, source.writer, source.digest) not in held:
                found = True
                tree = await self._trees.read(source.digest, source.body)
                await self._merge_tree(run, source, tree)
        return found

    async def _expand_diverging(self, run: _Run) -> bool:
        for p in list(run.passes.values()):
            if p.diverging:
                await self._expand(run, p.diverging.pop())
                return True
        return False

    async def _settle(self, run: _Run) -> bool:
        for p in list(run.passes.values()):
            if p.jobs:
                await self._conflicts.settle(p, p.jobs.pop())
                self._after(p)
                return True
        return False

    async def _expand(self, run: _Run, directory: Inode) -> None:
        while True:
            state = self._sources.tree(directory)
            if state is None or state.expanded:
                return
            event = self._expanding.get(directory)
            if event is None:
                break
            await event.wait()
        event = self._expanding[directory] = trio.Event()
        try:
            await self._merge_sources(run, directory)
        finally:
            del self._expanding[directory]
            event.set()

    async def _merge_sources(self, run: _Run, directory: Inode) -> None:
        done: set[tuple[int, ObjectId]] = set()
        merged: set[ObjectId] = set()
        while True:
            with self._catalog.transaction():
                left = [each for each in self._sources.of(directory) if (each.writer, each.digest) not in done]
                if not left:
                    self._sources.set_expanded(directory, True)
                    return
            source = self._first(left)
            done.add((source.writer, source.digest))
            if source.digest in merged:
                self._sources.set_merged(directory, source.writer, source.digest)
                continue
            tree = await self._trees.read(source.digest, source.body)
            await self._merge_tree(run, source, tree)
            merged.add(source.digest)

    def _first(self, sources: list[SourceRow]) -> SourceRow:
        """The one whose head knew none of the others': what a later head removed must be there before it."""
        sides = [self._side_of(source) for source in sources]
        knows = [
            sum(other.writer != side.row and side.covers((other.writer, other.seq)) for other in sources)
            for side in sides
        ]
        return sources[knows.index(min(knows))]

    async def _merge_tree(self, run: _Run, source: SourceRow, tree: Tree) -> None:
        """Merge one directory's *tree*, in transactions of bounded size; a newer tree that came meanwhile stops it."""
        p = self._pass(run, self._side_of(source))
        directory = source.dir
        entries = tree.entries
        for start in range(0, len(entries) + 1, _ENTRIES_AT_ONCE):
            last = start + _ENTRIES_AT_ONCE > len(entries)
            with self._catalog.transaction():
                if not self._is_current(source, tree):
                    return
                for entry in entries[start : start + _ENTRIES_AT_ONCE]:
                    self._clock.see(max(entry.stamp, entry.changed))
                    self._entries.merge(p, directory, entry)
                if last:
                    names = {entry.name for entry in entries}
                    for row in self._sources.rows(directory):
                        if row.name not in names:
                            self._entries.merge_absence(p, directory, row)
                    if any(job.directory == directory for job in p.jobs):
                        run.held.append((directory, source.writer, source.digest))
                    else:
                        self._sources.set_merged(directory, source.writer, source.digest)
                    run.touched.append((directory, source.digest, source.body, tree))
                self._outdate(p)
            self._entries.deliver(p)
            await trio.lowlevel.checkpoint()

    def _is_current(self, source: SourceRow, tree: Tree) -> bool:
        now = self._sources.get(source.dir, source.writer)
        state = self._sources.tree(source.dir)
        if now is None or state is None or now.digest != source.digest:
            return False
        if self._names.inode(source.dir).file_id != tree.file_id:
            raise FormatError(f"tree {source.digest.hex()} is of another directory than what names it")
        return True

    def _after(self, p: Pass) -> None:
        with self._catalog.transaction():
            self._outdate(p)
        self._entries.deliver(p)

    def _outdate(self, p: Pass) -> None:
        """Directories that changed differ from their published trees, as far as is known before `_compare`."""
        for directory, _ in p.pending:
            self._sources.outdate(directory, changed=True)
        modified, p.modified = p.modified, set()
        for directory in modified:
            state = self._sources.tree(directory)
            if state is not None and state.expanded:
                self._sources.outdate(directory)

    async def _compare(self, run: _Run) -> None:
        """Directories that now hold exactly what a merged tree says need not be published again; others do."""
        touched = sorted(run.touched, key=lambda each: -len(self._names.ancestors(each[0])))
        settled: Counter[Inode] = Counter()
        left = Counter(each[0] for each in touched)
        for directory, digest, body, tree in touched:
            left[directory] -= 1
            with self._catalog.transaction():
                state = self._sources.tree(directory)
                if state is None or state.dirty == CHANGED or settled[directory]:
                    continue
                if self._holds(directory, tree):
                    settled[directory] += 1
                    if state.dirty or state.digest != digest:
                        self._sources.set_tree(directory, digest, body)
                        if state.digest != digest:
                            for parent, _ in self._names.parents(directory):
                                self._sources.outdate(parent)
                elif not left[directory] and state.digest in {each[1] for each in touched if each[0] == directory}:
                    self._sources.outdate(directory)
            await trio.lowlevel.checkpoint()

    def _holds(self, directory: Inode, tree: Tree) -> bool:
        held = self._sources.holds(directory)
        if len(held) != len(tree.entries):
            return False
        for row, entry in zip(held, tree.entries, strict=True):
            if (row.name, row.stamp, row.file_id) != (entry.name, entry.stamp, entry.file_id):
                return False
            if entry.file_id is None:
                continue
            if row.version != entry.version:
                return False
            if entry.tree is not None and (row.dirty != 0 or row.tree != entry.tree):
                return False
        return True
