"""Merging one entry of another writer's tree into the catalog's rows: who wins a name, who wins a file's state.

Plain functions of rows, run inside the caller's transaction: no awaiting, no fetching. What cannot be decided without
looking further (a directory loses its name, or an unknown directory lost to ours) is left in the pass as a `Contest` or
a `Graft`, for `ckptfs.replica.conflicts`. The order in which trees are merged is `ckptfs.replica.merge`'s.

The rules. A name goes to the binding with the greater stamp, for anything but a directory to the greater of binding and
last change, so that an edit outlives an older removal; at equal stamps to the larger file id. A winner by its change
takes that as its stamp, so that published trees are ordered by stamps alone. Content and attributes go by file id to
the greater `Entry.version`, wherever the names are.
"""

from __future__ import annotations

import logging
from stat import S_IFMT, S_ISDIR, S_ISREG

from ckptfs.encoding.manifest import Content, encode_content
from ckptfs.encoding.tree import Entry
from ckptfs.ids import Inode, ObjectId, Stamp, stamp_time_s
from ckptfs.local.catalog.catalog import Catalog
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.names import InodeRow, Names
from ckptfs.local.catalog.sources import BoundRow, Origin, Sources
from ckptfs.replica.passes import Contest, Graft, MergeListener, Pass

log = logging.getLogger(__name__)

SETTLED_S = 600.0
"""Conflicts of names older than this have long been merged by everybody who took part."""


class Entries:
    """The rules, over one catalog."""

    def __init__(self, catalog: Catalog, listener: MergeListener) -> None:
        self.names = Names(catalog)
        self.sources = Sources(catalog)
        self._contents = Contents(catalog)
        self._listener = listener

    # One entry

    def merge(self, p: Pass, directory: Inode, entry: Entry) -> None:
        """Merge *entry* of the head's tree into *directory*."""
        row = self.sources.row(directory, entry.name)
        if entry.file_id is None:
            self._merge_tombstone(p, directory, entry, row)
            return
        if row is None:
            self.bind(p, directory, entry, entry.stamp)
            return
        weight = entry_weight(entry)
        if row.ino is None:
            if weight >= row.stamp:
                self.bind(p, directory, entry, winning_stamp(entry, row.stamp))
            else:
                self._lose(p, directory, entry)
            return
        local = self.names.inode(row.ino)
        if local.file_id == entry.file_id:
            self._same(p, directory, entry, row, local)
            return
        own = self.row_weight(p, directory, row, local)
        if (weight, entry.file_id) > (own, local.file_id):
            if S_ISDIR(local.mode) or self._is_valuable(row, local):
                p.jobs.append(Contest(directory, entry.name, local.ino, row.stamp, entry))
            else:
                self.unlink(p, directory, row, local)
                self.bind(p, directory, entry, winning_stamp(entry, row.stamp))
        else:
            self._settle_stamp(p, directory, row, max(own, row.stamp), entry.stamp)
            self._lose(p, directory, entry)

    def merge_absence(self, p: Pass, directory: Inode, row: BoundRow) -> None:
        """*row* is not in the head's tree.

        Removals leave tombstones, which are dropped once everybody has merged them. After that a name is gone without
        a word: from the trees of the writer that published it, and from those of others that knew it. Others are
        believed only where the name is older than any conflict that may still be going on.
        """
        own = row.origin is not None and row.origin[0] == p.side.row
        old = stamp_time_s(p.side.stamp) - stamp_time_s(row.stamp) > SETTLED_S
        if not p.side.covers(row.origin) or not (own or old):
            return
        if row.ino is None:
            self.sources.remove_row(directory, row.name)
            p.modified.add(directory)
        else:
            local = self.names.inode(row.ino)
            if S_ISDIR(local.mode) or self._is_valuable(row, local):
                p.jobs.append(Contest(directory, row.name, row.ino, row.stamp, None))
            else:
                self.unlink(p, directory, row, local)
                self.sources.remove_row(directory, row.name)

    # Weights

    def row_weight(self, p: Pass, directory: Inode, row: BoundRow, local: InodeRow) -> int:
        """By what a live row holds its name."""
        won = p.weights.get((directory, row.name))
        if S_ISDIR(local.mode):
            return row.stamp
        if won is not None and row.origin is not None:
            return max(won, row.stamp)
        return max(row.stamp, p.before.get(local.file_id, local.changed))

    # Changing rows

    def bind(self, p: Pass, directory: Inode, entry: Entry, stamp: Stamp) -> Inode | None:
        """Let the name mean the entry's file, from *stamp* on; a row that is there must be a tombstone or unlinked.

        None when a directory keeps another place instead: a later binding, or one that this would make a loop of.
        """
        assert entry.file_id is not None
        origin: Origin | None = p.side.origin
        local = self.names.inode_by_file_id(entry.file_id)
        if local is not None and S_IFMT(local.mode) != S_IFMT(entry.mode):
            log.error("file id %s is of two kinds: %r of another writer is left out", entry.file_id.hex(), entry.name)
            return None
        if local is None:
            ino = self._create(p, entry)
        else:
            ino = local.ino
            if S_ISDIR(local.mode) and not self._take_from(p, directory, entry, stamp, local):
                p.lost[ino] = (directory, entry)
                self.put_source(p, ino, entry)
                return None
            self._apply_state(p, self.names.inode(ino), entry)
            if not S_ISDIR(local.mode):
                self.names.update_inode(ino, nlink=local.nlink + 1)
                if self.names.inode(ino).changed > entry.changed and self.sources.is_pending(ino):
                    origin = None  # an edit made here through another name shows through this one too
        if S_ISDIR(entry.mode):
            self.names.update_inode(ino, nlink=self._count_links(ino))
            self._add_links(directory, 1)
        self.sources.set_row(directory, entry.name, ino, stamp, origin)
        p.weights[directory, entry.name] = max(entry_weight(entry), stamp)
        self._note(p, directory, entry.name)
        if S_ISDIR(entry.mode):
            self.put_source(p, ino, entry)
        return ino

    def unlink(self, p: Pass, directory: Inode, row: BoundRow, local: InodeRow) -> None:
        """*local* loses the name *row*; what the row says next is the caller's."""
        if S_ISDIR(local.mode):
            self.names.update_inode(local.ino, nlink=0)
            self.sources.forget_directory(local.ino)
            self._add_links(directory, -1)
            p.unnamed.append(local.ino)
        else:
            self.names.update_inode(local.ino, nlink=local.nlink - 1)
            if local.nlink <= 1:
                p.unnamed.append(local.ino)
        self._note(p, directory, row.name)

    def set_tombstone(self, p: Pass, directory: Inode, name: bytes, stamp: Stamp, origin: Origin | None) -> None:
        self.sources.set_row(directory, name, None, stamp, origin)
        p.modified.add(directory)

    def restamp(self, p: Pass, directory: Inode, row: BoundRow, above: int) -> None:
        """Bind *row* anew, pending, just above the stamp of what it lost to.

        No more than that: a stamp also says that what is older was known, which our clock's present is not true of.
        """
        self.sources.set_row(directory, row.name, row.ino, Stamp(max(row.stamp, above + 1)), None)
        p.modified.add(directory)
        p.pending.append((directory, row.name))

    def move_row(self, p: Pass, source: Inode, row: BoundRow, target: Inode, stamp: Stamp) -> None:
        """A live row goes to another directory, pending."""
        assert row.ino is not None
        self.sources.remove_row(source, row.name)
        self.sources.set_row(target, row.name, row.ino, stamp, None)
        p.pending.append((target, row.name))
        if S_ISDIR(self.names.inode(row.ino).mode):
            self._add_links(source, -1)
            self._add_links(target, 1)
        self._note(p, source, row.name)
        self._note(p, target, row.name)

    def find_or_create(self, p: Pass, entry: Entry, *, empty: bool = False) -> Inode:
        """The directory of *entry*. A new one has no name yet; with *empty* it counts as expanded and takes no tree."""
        assert entry.file_id is not None
        local = self.names.inode_by_file_id(entry.file_id)
        ino = local.ino if local is not None else self._create(p, entry)
        if local is None:
            self.names.update_inode(ino, nlink=0)
            self.sources.set_expanded(ino, empty)
        if not empty:
            self.put_source(p, ino, entry)
        return ino

    def attach(self, p: Pass, directory: Inode, name: bytes, ino: Inode, stamp: Stamp) -> None:
        """Give a nameless directory a name, pending."""
        self.names.update_inode(ino, nlink=self._count_links(ino))
        self._add_links(directory, 1)
        self.sources.set_row(directory, name, ino, stamp, None)
        p.pending.append((directory, name))
        self._note(p, directory, name)
        p.modified.add(ino)

    def deliver(self, p: Pass) -> None:
        """Tell the listener what the last transaction did. Call after its commit."""
        events, p.events = p.events, []
        pending, p.pending = p.pending, []
        unnamed, p.unnamed = p.unnamed, []
        unneeded, p.unneeded = p.unneeded, []
        for event in events:
            self._listener.changed(*event)
        for name in pending:
            self._listener.pending(*name)
        for ino in unnamed:
            self._listener.unnamed(ino)
        for image in unneeded:
            self._listener.unneeded(image)

    # Within

    def _merge_tombstone(self, p: Pass, directory: Inode, entry: Entry, row: BoundRow | None) -> None:
        if row is None or row.ino is None:
            if row is None or row.stamp < entry.stamp or (row.stamp == entry.stamp and row.origin is None):
                self.set_tombstone(p, directory, entry.name, entry.stamp, p.side.origin)
            return
        local = self.names.inode(row.ino)
        own = self.row_weight(p, directory, row, local)
        if own >= entry.stamp:
            self._settle_stamp(p, directory, row, own, entry.stamp)
        elif S_ISDIR(local.mode) or self._is_valuable(row, local):
            p.jobs.append(Contest(directory, entry.name, local.ino, row.stamp, entry))
        else:
            self.unlink(p, directory, row, local)
            self.set_tombstone(p, directory, entry.name, entry.stamp, p.side.origin)

    def _same(self, p: Pass, directory: Inode, entry: Entry, row: BoundRow, local: InodeRow) -> None:
        """Both mean the same file by this name."""
        applied = self._apply_state(p, local, entry)
        equal_state = applied or self._version(local) == entry.version
        origin, stamp = row.origin, max(row.stamp, entry.stamp)
        if stamp == entry.stamp and equal_state:
            # Exactly as the head has it. What was known before stays known by its older origin.
            origin = p.side.origin if origin is None or applied or stamp != row.stamp else origin
        if (stamp, origin) != (row.stamp, row.origin):
            self.sources.set_row(directory, row.name, row.ino, stamp, origin)
            p.modified.add(directory)
            if origin is None:
                p.pending.append((directory, row.name))
        if applied:
            p.modified.add(directory)
        p.weights[directory, row.name] = max(entry_weight(entry), self.row_weight(p, directory, row, local))
        if S_ISDIR(entry.mode):
            self.put_source(p, local.ino, entry)

    def _lose(self, p: Pass, directory: Inode, entry: Entry) -> None:
        """The name went to what is here; the file's state, or the directory's entries, may still be news."""
        assert entry.file_id is not None
        local = self.names.inode_by_file_id(entry.file_id)
        known = local is not None and local.nlink > 0 and S_IFMT(local.mode) == S_IFMT(entry.mode)
        if S_ISDIR(entry.mode):
            if known and local is not None:
                p.lost[local.ino] = (directory, entry)
                self._apply_state(p, local, entry)
                self.put_source(p, local.ino, entry)
            else:
                p.jobs.append(Graft(directory, entry))
        elif known and local is not None:
            self._apply_state(p, local, entry)

    def _settle_stamp(self, p: Pass, directory: Inode, row: BoundRow, own: int, other: int) -> None:
        """A row that kept its name by its file's last change takes that as its stamp (see the module's docstring)."""
        if row.stamp < other <= own:
            self.sources.set_row(directory, row.name, row.ino, Stamp(own), row.origin)
            p.modified.add(directory)
            if row.origin is None:  # a cut that has it has another stamp, and does not publish it as it is now
                p.pending.append((directory, row.name))

    def _take_from(self, p: Pass, directory: Inode, entry: Entry, stamp: Stamp, local: InodeRow) -> bool:
        """Free directory *local* from the place it has now; False when it keeps that."""
        for parent, name in self.names.parents(local.ino):
            there = self.sources.row(parent, name)
            assert there is not None
            if self._place(there.stamp, parent, name) >= self._place(stamp, directory, entry.name):
                return False
            if not self._break_loop(p, directory, stamp, local.ino):
                return False
            self.sources.remove_row(parent, name)
            self._add_links(parent, -1)
            self._note(p, parent, name)
            return True
        return self._break_loop(p, directory, stamp, local.ino)

    def _break_loop(self, p: Pass, directory: Inode, stamp: Stamp, moved: Inode) -> bool:
        """Make sure that *moved* is not above *directory*; False when it has to stay where it is.

        Two writers each moved a directory below the other's: the newer binding stays, the other directory goes back
        to where this head still has it.
        """
        if directory != moved and moved not in self.names.ancestors(directory):
            return True
        between: list[tuple[Stamp, Inode, Inode, bytes]] = []
        at = directory
        while at != moved:
            parent, name = self.names.parents(at)[0]
            row = self.sources.row(parent, name)
            assert row is not None
            between.append((row.stamp, at, parent, name))
            at = parent
        if not between:
            return False  # into itself
        newest, child, parent, name = max(between)
        if newest >= stamp or child not in p.lost:
            return False
        home, entry = p.lost[child]
        if child in (home, *self.names.ancestors(home)) or moved in (home, *self.names.ancestors(home)):
            return False
        taken = self.sources.row(home, entry.name)
        if taken is not None and taken.ino is not None:
            return False
        row = self.sources.row(parent, name)
        assert row is not None
        self.sources.remove_row(parent, name)
        above = max(newest, taken.stamp if taken is not None else 0)
        self.sources.set_row(home, entry.name, child, Stamp(above + 1), None)
        p.pending.append((home, entry.name))
        self._add_links(parent, -1)
        self._add_links(home, 1)
        self._note(p, parent, name)
        self._note(p, home, entry.name)
        return True

    def _place(self, stamp: Stamp, directory: Inode, name: bytes) -> tuple[int, bytes, bytes]:
        return stamp, self.names.inode(directory).file_id, name

    def _create(self, p: Pass, entry: Entry) -> Inode:
        manifest = self._manifest_row(entry) if S_ISREG(entry.mode) else None
        ino = self.names.add_inode(
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            now_ns=entry.ctime_ns,
            changed=entry.changed,
            rdev=entry.rdev,
            size=entry.size,
            target=entry.target,
            manifest=manifest,
            file_id=entry.file_id,
            mtime_ns=entry.mtime_ns,
            atime_ns=entry.atime_ns,
            expanded=not S_ISDIR(entry.mode),
        )
        if entry.xattrs:
            self.sources.replace_xattrs(ino, entry.xattrs)
        return ino

    def _apply_state(self, p: Pass, local: InodeRow, entry: Entry) -> bool:
        """Give *local* the entry's content and attributes when they are newer; whether they were."""
        if entry.changed < local.changed or entry.version <= self._version(local):
            return False
        regular = S_ISREG(local.mode)
        if regular and local.manifest is None and (entry.changed == local.changed or self._listener.writing(local.ino)):
            return False  # being changed here: this side's stamp will be the newer one
        p.before.setdefault(local.file_id, local.changed)
        columns: dict[str, object] = {
            "mode": entry.mode, "uid": entry.uid, "gid": entry.gid, "rdev": entry.rdev, "target": entry.target,
            "mtime_ns": entry.mtime_ns, "ctime_ns": entry.ctime_ns, "atime_ns": entry.atime_ns, "size": entry.size,
            "changed": entry.changed,
        }  # fmt: skip
        content = False
        if regular:
            image, manifest, digest = self.sources.content_of(local.ino)
            if digest is None or digest != entry.manifest:
                if self._listener.writing(local.ino):
                    return False
                content = True
                columns["manifest"] = self._manifest_row(entry)
                columns["image"] = None
        self.names.update_inode(local.ino, **columns)
        self.sources.replace_xattrs(local.ino, entry.xattrs)
        if content:
            if manifest is not None:
                self._contents.drop_unneeded_manifests([manifest])
            if image is not None:
                p.unneeded.append(image)
        p.events.append((None, None, local.ino, content))
        return True

    def _manifest_row(self, entry: Entry) -> int:
        if entry.manifest is None:  # a tree never says so, a catalog of ours might
            holes = ((0, entry.size),) if entry.size else ()
            return self._contents.add_manifest(size=entry.size, body=encode_content(Content(entry.size, holes, ())))
        known = self._contents.manifest_by_digest(entry.manifest)
        if known is not None:
            return known
        return self._contents.add_manifest(
            size=entry.size, body=None, digest=entry.manifest, remote_body=entry.manifest_body
        )

    def _version(self, local: InodeRow) -> tuple[object, ...]:
        """As `Entry.version`, of what is here."""
        _, _, digest = self.sources.content_of(local.ino) if S_ISREG(local.mode) else (None, None, None)
        return (
            local.changed, local.ctime_ns, local.mtime_ns, local.size, local.mode, local.uid, local.gid,
            digest or b"", local.target or b"", tuple(self.names.xattrs(local.ino).items()),
        )  # fmt: skip

    def put_source(self, p: Pass, ino: Inode, entry: Entry) -> None:
        """The head has tree *entry.tree* for directory *ino*."""
        assert entry.tree is not None
        digest = ObjectId(entry.tree)
        new = self.sources.put(ino, p.side.row, p.side.seq, digest, entry.tree_body)
        state = self.sources.tree(ino)
        assert state is not None
        if state.expanded:
            if state.dirty == 0 and state.digest == digest:
                self.sources.set_merged(ino, p.side.row, digest)
            return
        if len({source.digest for source in self.sources.of(ino)}) > 1:
            p.diverging.append(ino)
        elif new:
            self.sources.set_tree(ino, digest, entry.tree_body)
            p.modified.update(parent for parent, _ in self.names.parents(ino))
        if new:
            p.fresh.append(ino)

    def _is_valuable(self, row: BoundRow, local: InodeRow) -> bool:
        """Whether losing this last name would lose an edit that a rename elsewhere would have kept."""
        return local.nlink <= 1 and row.origin is None

    def _count_links(self, directory: Inode) -> int:
        children = (row.ino for row in self.sources.rows(directory) if row.ino is not None)
        return 2 + sum(S_ISDIR(self.names.inode(child).mode) for child in children)

    def _add_links(self, directory: Inode, change: int) -> None:
        self.names.update_inode(directory, nlink=self.names.inode(directory).nlink + change)

    def _note(self, p: Pass, directory: Inode, name: bytes) -> None:
        p.modified.add(directory)
        p.events.append((directory, name, None, False))


def winning_stamp(entry: Entry, other: Stamp) -> Stamp:
    """The stamp with which *entry* takes a name from a row stamped *other*; see the module's docstring."""
    return entry.stamp if entry.stamp >= other else Stamp(entry_weight(entry))


def entry_weight(entry: Entry) -> int:
    """By what an entry claims its name; see the module's docstring."""
    return entry.stamp if entry.file_id is None or S_ISDIR(entry.mode) else max(entry.stamp, entry.changed)
