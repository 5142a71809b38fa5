"""What merging one head is made of: the head's side, what happened so far, and what is left to be settled.

Values alone. The rules are in `entries` and `conflicts`, the order of things in `merge`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ckptfs.encoding.tree import Entry
from ckptfs.ids import FileId, ImageId, Inode, Stamp, WriterId
from ckptfs.local.catalog.sources import Origin


class MergeListener(Protocol):
    """Who must know what merging did; called on the loop, after the commit."""

    def changed(self, parent: Inode | None, name: bytes | None, ino: Inode | None, content: bool) -> None:
        """(parent, name): that name means something else now. (ino): its attributes, and with *content* its bytes."""
        ...

    def pending(self, directory: Inode, name: bytes) -> None:
        """Settling a conflict made this name new here: it is to be published, as if somebody had made it."""
        ...

    def unnamed(self, ino: Inode) -> None:
        """*ino* lost its last name; it may still be open or known to the kernel."""
        ...

    def unneeded(self, image: ImageId) -> None:
        """An inode refers to *image* no longer; it goes unless somebody else needs it."""
        ...

    def writing(self, ino: Inode) -> bool:
        """Whether *ino* is being changed through a handle right now: then its state is not replaced."""
        ...


@dataclass(frozen=True)
class Side:
    """The head whose tree is merged: who it is and what it knew."""

    writer: WriterId
    row: int
    seq: int
    stamp: Stamp
    """When the head was taken."""
    known: Mapping[int, int]
    """Writer row -> highest sequence that this head had merged, its own included."""

    @property
    def origin(self) -> Origin:
        return self.row, self.seq

    def covers(self, origin: Origin | None) -> bool:
        """Whether the head knew what was published there; never what is still pending here."""
        return origin is not None and self.known.get(origin[0], 0) >= origin[1]


@dataclass(frozen=True)
class Contest:
    """The live name (directory, name), bound at *stamp* to *victim*, loses to *entry*, or to its absence (None)."""

    directory: Inode
    name: bytes
    victim: Inode
    stamp: Stamp
    entry: Entry | None


@dataclass(frozen=True)
class Graft:
    """*entry*, a directory unknown here, lost its name in *directory*; it may hold entries newer than what won."""

    directory: Inode
    entry: Entry


@dataclass
class Pass:
    """Merging one head: what happened so far, and what is left."""

    side: Side
    expand: Callable[[Inode], Awaitable[None]]
    """Merges all sources of a directory that was not looked into; nothing when it was."""
    weights: dict[tuple[Inode, bytes], int] = field(default_factory=dict)
    """By what a name won in this pass: its inode's `changed` may have grown since through another name."""
    before: dict[FileId, int] = field(default_factory=dict)
    """inode.changed as it was before this pass raised it, for the same reason. By file: when its content is replaced,
    its names move to another inode (`Names.move_names`) while the pass goes on."""
    jobs: list[Contest | Graft] = field(default_factory=list)
    fresh: list[Inode] = field(default_factory=list)
    """Directories not looked into whose tree changed in this pass: where a missing file may have been moved to."""
    diverging: list[Inode] = field(default_factory=list)
    """Directories not looked into of which writers have different trees: to be expanded."""
    lost: dict[Inode, tuple[Inode, Entry]] = field(default_factory=dict)
    """Known directories whose place in this head lost: (directory, entry)."""
    modified: set[Inode] = field(default_factory=set)
    """Directories that may no longer be what their published tree says."""
    events: list[tuple[Inode | None, bytes | None, Inode | None, bool]] = field(default_factory=list)
    pending: list[tuple[Inode, bytes]] = field(default_factory=list)
    """Names that no head has as they are now."""
    unnamed: list[Inode] = field(default_factory=list)
    unneeded: list[ImageId] = field(default_factory=list)
