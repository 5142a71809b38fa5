"""Directories that lost their name, and what is saved of them.

A directory that another writer removed or replaced takes with it what that writer knew, and what is older than the
removal. What is pending here stays, and so do additions that the remover did not know and that are newer: then the
directory keeps its name, bound anew just above the removal; or, where a directory took the name (two machines made the
same path at once), its entries move into that one, a directory among them with a stamp one higher, since it has but
one place.

Nothing here fetches before the rest of the head is merged: by then a directory that was only moved has its new place.
Each decision is made anew, in one transaction, after the last await.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from stat import S_ISDIR

from ckptfs.encoding.tree import Entry
from ckptfs.ids import FileId, Inode, ObjectId, Stamp
from ckptfs.local.catalog.catalog import SELF, Catalog
from ckptfs.local.catalog.names import InodeRow
from ckptfs.local.catalog.sources import BoundRow
from ckptfs.replica.entries import Entries, entry_weight, winning_stamp
from ckptfs.replica.passes import Contest, Graft, Pass
from ckptfs.replica.trees import Trees


@dataclass
class _Branch:
    """What is newer than a floor in a tree unknown here: an entry, and for a directory that is itself older its own."""

    entry: Entry
    whole: bool = False
    below: list[_Branch] = field(default_factory=list)
    older: list[Entry] = field(default_factory=list)
    """What the directory holds that stays hidden."""


class Conflicts:
    """Settles the jobs of a pass."""

    def __init__(self, catalog: Catalog, entries: Entries, trees: Trees) -> None:
        self._catalog = catalog
        self._entries = entries
        self._names = entries.names
        self._sources = entries.sources
        self._trees = trees

    async def settle(self, p: Pass, job: Contest | Graft) -> None:
        """Finish *job*. Raises RemoteError and FormatError; then it is done again by the next pass."""
        if isinstance(job, Graft):
            await self._graft(p, job)
        else:
            await self._contest(p, job)

    # A name here lost

    async def _contest(self, p: Pass, job: Contest) -> None:
        await self._search(p, job)
        losing = self._losing(p, job)
        if losing is not None and S_ISDIR(losing[1].mode):
            await self._open_unknown(p, losing[1].ino)
            taker = job.entry if job.entry is not None and job.entry.file_id is not None else None
            if taker is not None and S_ISDIR(taker.mode):
                await self._open_common(p, losing[1].ino, await self._prepare(p, taker))
        with self._catalog.transaction():
            losing = self._losing(p, job)
            if losing is not None:
                self._decide(p, job, *losing)
            else:
                self._again(p, job)

    def _again(self, p: Pass, job: Contest) -> None:
        """The victim was moved, or somebody changed the name: what the head says of it is merged as if it came now."""
        row = self._sources.row(job.directory, job.name)
        if self._sources.tree(job.directory) is None:
            return
        if job.entry is not None:
            self._entries.merge(p, job.directory, job.entry)
        elif row is not None:
            self._entries.merge_absence(p, job.directory, row)

    def _decide(self, p: Pass, job: Contest, row: BoundRow, local: InodeRow) -> None:
        entry = job.entry
        if not S_ISDIR(local.mode):
            saved = False
        elif entry is not None and self._concurrent(p, row, entry):
            saved = self._has_something(local.ino)
        else:
            saved = self._purge(p, local.ino, None if entry is None else entry.stamp)
        if saved and (entry is None or entry.file_id is None or not S_ISDIR(entry.mode)):
            self._entries.restamp(p, job.directory, row, 0 if entry is None else entry_weight(entry))
            return
        if saved and entry is not None:
            self._replace(p, job, row, local, entry)
            return
        self._entries.unlink(p, job.directory, row, local)
        if entry is None:
            self._sources.remove_row(job.directory, job.name)
        elif entry.file_id is None:
            self._entries.set_tombstone(p, job.directory, job.name, entry.stamp, p.side.origin)
        else:
            self._sources.remove_row(job.directory, job.name)
            self._entries.bind(p, job.directory, entry, winning_stamp(entry, row.stamp))

    def _replace(self, p: Pass, job: Contest, row: BoundRow, local: InodeRow, entry: Entry) -> None:
        """Directory *local* makes way for directory *entry*, and what was saved of it moves in there."""
        taker = self._names.inode_by_file_id(entry.file_id or FileId(b""))
        if taker is None or not self._can_join(local.ino, taker.ino):
            p.jobs.append(job)  # somebody changed it since it was looked at: look again
            return
        if taker.ino not in self._names.ancestors(job.directory):
            # First, since the taker may have been below what it replaces.
            self._sources.remove_row(job.directory, job.name)
            bound = self._entries.bind(p, job.directory, entry, winning_stamp(entry, row.stamp))
            if bound is not None:
                for child in self._sources.rows(local.ino):
                    if child.ino is not None:
                        self._move_into(p, local.ino, child, taker.ino)
                self._entries.unlink(p, job.directory, row, local)
                return
            self._sources.set_row(job.directory, job.name, row.ino, row.stamp, row.origin)
        self._entries.restamp(p, job.directory, row, entry_weight(entry))

    def _losing(self, p: Pass, job: Contest) -> tuple[BoundRow, InodeRow] | None:
        """The row and inode of *job*, if they are still what the job is about."""
        row = self._sources.row(job.directory, job.name)
        if row is None or row.ino != job.victim or row.stamp != job.stamp:
            return None
        local = self._names.inode(job.victim)
        if job.entry is None:
            return (row, local) if p.side.covers(row.origin) else None
        own = self._entries.row_weight(p, job.directory, row, local)
        won = (entry_weight(job.entry), job.entry.file_id or b"") > (own, local.file_id)
        return (row, local) if won else None

    async def _search(self, p: Pass, job: Contest) -> None:
        """Look into the directories that changed with this head, until the victim is found in one of them or not."""
        if S_ISDIR(self._names.inode(job.victim).mode) and self._names.is_empty(job.victim):
            return
        while p.fresh and self._losing(p, job) is not None:
            directory = p.fresh.pop()
            state = self._sources.tree(directory)
            if state is not None and not state.expanded:
                await p.expand(directory)

    async def _open_unknown(self, p: Pass, directory: Inode) -> None:
        """Expand what is below *directory* and may hold entries that the head did not know."""
        state = self._sources.tree(directory)
        if state is None:
            return
        if not state.expanded:
            if self._knew_all(p, directory):
                return
            await p.expand(directory)
        for row in self._sources.rows(directory):
            if row.ino is not None and S_ISDIR(self._names.inode(row.ino).mode):
                await self._open_unknown(p, row.ino)

    def _knew_all(self, p: Pass, directory: Inode) -> bool:
        """Whether the head knew everything in *directory*, which was not looked into."""
        sources = self._sources.of(directory)
        own = {source.digest for source in sources if source.writer == p.side.row}
        return all(source.digest in own or p.side.covers((source.writer, source.seq)) for source in sources)

    async def _open_common(self, p: Pass, directory: Inode, taker: Inode) -> None:
        """Expand, below both, the directories that have the same name: their entries may have to be joined."""
        if directory == taker:
            return
        await p.expand(directory)
        await p.expand(taker)
        for row in self._sources.rows(directory):
            there = self._sources.row(taker, row.name)
            if row.ino is None or there is None or there.ino is None or not self._both_directories(row.ino, there.ino):
                continue
            await self._open_common(p, row.ino, there.ino)

    def _both_directories(self, one: Inode, other: Inode) -> bool:
        return S_ISDIR(self._names.inode(one).mode) and S_ISDIR(self._names.inode(other).mode)

    def _can_join(self, directory: Inode, taker: Inode) -> bool:
        """Whether all that `_move_into` would look at is expanded."""
        for ino in (directory, taker):
            state = self._sources.tree(ino)
            if state is None or not state.expanded:
                return False
        for row in self._sources.rows(directory):
            there = self._sources.row(taker, row.name)
            if (
                row.ino is not None
                and there is not None
                and there.ino is not None
                and row.ino != there.ino
                and self._both_directories(row.ino, there.ino)
                and not self._can_join(row.ino, there.ino)
            ):
                return False
        return True

    async def _prepare(self, p: Pass, taker: Entry) -> Inode:
        """Make sure that the directory which takes the name is here and expanded; without a name yet if it is new."""
        assert taker.file_id is not None and taker.tree is not None
        with self._catalog.transaction():
            ino = self._entries.find_or_create(p, taker)
        await p.expand(ino)
        return ino

    def _concurrent(self, p: Pass, row: BoundRow, entry: Entry) -> bool:
        """Whether *row*'s directory was not even known to who removed the name, or gave it to another directory."""
        return (entry.file_id is None or S_ISDIR(entry.mode)) and not p.side.covers(row.origin)

    def _has_something(self, directory: Inode) -> bool:
        state = self._sources.tree(directory)
        return state is not None and (not state.expanded or not self._names.is_empty(directory))

    def _purge(self, p: Pass, directory: Inode, floor: Stamp | None) -> bool:
        """Remove what goes with *directory*; whether anything in it stays."""
        state = self._sources.tree(directory)
        if state is None:
            return False
        if directory in p.lost:
            return True  # moved by the other writer, not removed: that move lost to what was done here
        if not state.expanded:
            return not self._knew_all(p, directory)
        gone = []
        for row in self._sources.rows(directory):
            if row.ino is None:
                continue
            local = self._names.inode(row.ino)
            inside = S_ISDIR(local.mode) and self._purge(p, row.ino, floor)
            if not inside and not self._stays(p, directory, row, local, floor):
                gone.append((row, local))
        left = sum(row.ino is not None for row in self._sources.rows(directory)) - len(gone)
        for row, local in gone:
            self._entries.unlink(p, directory, row, local)
            if left and floor is not None:
                self._entries.set_tombstone(p, directory, row.name, max(floor, row.stamp), None)
            else:
                self._sources.remove_row(directory, row.name)
        return left > 0

    def _stays(self, p: Pass, directory: Inode, row: BoundRow, local: InodeRow, floor: Stamp | None) -> bool:
        if row.origin is None:
            return True
        newer = floor is None or self._entries.row_weight(p, directory, row, local) > floor
        return newer and not p.side.covers(row.origin)

    def _move_into(self, p: Pass, source: Inode, row: BoundRow, target: Inode) -> None:
        """Move a saved entry into the directory that took the name; a directory that is there takes its entries."""
        assert row.ino is not None
        there = self._sources.row(target, row.name)
        local = self._names.inode(row.ino)
        own = self._entries.row_weight(p, source, row, local)
        if there is None or there.ino is None:
            stamp = max(row.stamp + S_ISDIR(local.mode), 0 if there is None else there.stamp + 1)
            self._entries.move_row(p, source, row, target, Stamp(stamp))
            return
        other = self._names.inode(there.ino)
        if local.ino == other.ino:
            if row.origin is None:
                self._sources.set_row(target, row.name, local.ino, max(row.stamp, there.stamp), None)
            self._entries.unlink(p, source, row, local)
            self._sources.remove_row(source, row.name)
            return
        if S_ISDIR(local.mode) and S_ISDIR(other.mode):
            for child in self._sources.rows(row.ino):
                if child.ino is not None:
                    self._move_into(p, row.ino, child, there.ino)
            self._entries.unlink(p, source, row, local)
            self._sources.remove_row(source, row.name)
            return
        their = self._entries.row_weight(p, target, there, other)
        wins = S_ISDIR(local.mode) or (
            not S_ISDIR(other.mode) and (own, local.file_id) > (their, other.file_id)
        )
        if wins:
            self._entries.unlink(p, target, there, other)
            self._entries.move_row(p, source, row, target, Stamp(max(row.stamp + 1, their + 1)))
        else:
            self._entries.unlink(p, source, row, local)
            self._sources.remove_row(source, row.name)

    # A directory unknown here lost

    async def _graft(self, p: Pass, job: Graft) -> None:
        row = self._sources.row(job.directory, job.entry.name)
        if row is None:
            return
        floor = self._floor(job.entry, row)
        branch = await self._newer(job.entry, floor)
        if not branch.below:
            return
        if row.ino is not None and S_ISDIR(self._names.inode(row.ino).mode):
            await p.expand(row.ino)
        with self._catalog.transaction():
            row = self._sources.row(job.directory, job.entry.name)
            taker = row.ino if row is not None else None
            if taker is None or row is None or not S_ISDIR(self._names.inode(taker).mode):
                taker = self._make(p, job.directory, branch, floor)
            self._plant(p, taker, branch, floor)

    def _floor(self, entry: Entry, row: BoundRow) -> Stamp:
        """What is older than this in the directory *entry* was known to whoever gave its name to *row*.

        Where that was done here, it is known what was known, and nothing is hidden of a directory that never was
        here: an hour's work of a machine without a network does not go because somebody made the same path at its end.
        """
        ours = row.origin is None or row.origin[0] == SELF
        known = entry.file_id is not None and self._sources.was_here(entry.file_id)
        return Stamp(0) if ours and not known else row.stamp

    async def _newer(self, entry: Entry, floor: Stamp) -> _Branch:
        """What the directory *entry* holds that is newer than *floor*."""
        assert entry.tree is not None
        tree = await self._trees.read(ObjectId(entry.tree), entry.tree_body)
        found = _Branch(entry)
        for each in tree.entries:
            if each.file_id is None:
                continue
            if entry_weight(each) > floor:
                found.below.append(_Branch(each, whole=True))
                continue
            below = await self._newer(each, floor) if S_ISDIR(each.mode) else None
            if below is not None and below.below:
                found.below.append(below)
            else:
                found.older.append(each)
        return found

    def _make(self, p: Pass, directory: Inode, branch: _Branch, floor: Stamp) -> Inode:
        """The directory of *branch* bound anew, without what stays hidden."""
        row = self._sources.row(directory, branch.entry.name)
        above = floor if row is None else max(floor, row.stamp)
        if row is not None and row.ino is not None:  # a file: what is saved of a directory takes its name
            local = self._names.inode(row.ino)
            above = Stamp(max(above, self._entries.row_weight(p, directory, row, local)))
            self._entries.unlink(p, directory, row, local)
        ino = self._entries.find_or_create(p, branch.entry, empty=True)
        stamp = Stamp(max(branch.entry.stamp, above + 1))
        self._entries.attach(p, directory, branch.entry.name, ino, stamp)
        for each in branch.older:
            self._entries.set_tombstone(p, ino, each.name, floor, None)
        return ino

    def _plant(self, p: Pass, directory: Inode, branch: _Branch, floor: Stamp) -> None:
        state = self._sources.tree(directory)
        if state is None or not state.expanded:
            return  # came apart meanwhile: the next head of that writer brings it again
        directory_id = self._names.inode(directory).file_id
        for each in branch.below:
            if each.whole:
                moved = S_ISDIR(each.entry.mode) and directory_id != branch.entry.file_id
                stamp = Stamp(each.entry.stamp + moved)
                self._entries.merge(p, directory, replace(each.entry, stamp=stamp))
                continue
            row = self._sources.row(directory, each.entry.name)
            if row is not None and row.ino is not None and S_ISDIR(self._names.inode(row.ino).mode):
                self._plant(p, row.ino, each, floor)
            else:
                self._plant(p, self._make(p, directory, each, floor), each, floor)
