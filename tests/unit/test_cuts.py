"""Cuts: what they copy, what they pin, and what becomes of the rows when they are published, replaced or broken."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from ckptfs.encoding.canonical import object_id
from ckptfs.encoding.tree import Tree, encode_tree
from ckptfs.ids import ROOT_INODE, ImageId, Inode, WriterId
from ckptfs.local.catalog.cuts import Subtree
from ckptfs.replica.seal import Sealer
from tests.support.publishing import Machine, run


class Cutting(Machine):
    """A machine whose cuts are taken by hand; nothing is published."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, None)
        self.settler._evaluate = lambda: None  # type: ignore[method-assign]
        self.vector = {WriterId(b"w" * 16): 7}

    def cut(self, unfinished: set[Inode] | None = None, held: set[Inode] | None = None) -> int:
        cut, unneeded = self.cuts.take(
            taken_ns=1,
            stamp=self.store.clock.tick(),
            incomplete=False,
            vector=self.vector,
            unfinished=unfinished or set(),
            held=held or set(),
            status=self.settler._image_status,
            provisional=lambda ino: None,
        )
        self._released(unneeded)
        return cut

    def unsealed(self, cut: int) -> list[ImageId]:
        """Images of the cut that have no manifest."""
        rows = self.store.catalog.db.execute(
            "SELECT DISTINCT image FROM cut_entry WHERE cut = ? AND image IS NOT NULL AND manifest IS NULL", (cut,)
        ).fetchall()
        assert (self.cuts.first_unsealed(cut) is None) == (not rows)
        return [ImageId(image) for (image,) in rows]

    def names(self, cut: int) -> dict[bytes, bytes | None]:
        """Path of each entry of the cut -> "whole", "unfinished" or None for a tombstone."""
        found = {}
        for directory in self.cuts.directories(cut):
            top = self.store.names.path(directory).rstrip(b"/")
            for entry in self.cuts.entries(cut, directory):
                state = None if entry.ino is None else b"whole" if entry.entry else b"unfinished"
                found[top + b"/" + entry.name] = state
        return found

    def dirty(self) -> dict[Inode, int]:
        return dict(self.store.catalog.db.execute("SELECT ino, dirty FROM inode WHERE dirty > 0").fetchall())

    def tree(self, ino: Inode) -> Subtree | tuple[None, None]:
        return self.store.catalog.db.execute("SELECT tree, tree_body FROM inode WHERE ino = ?", (ino,)).fetchone()

    def origin(self, ino: Inode) -> int | None:
        return self.store.catalog.db.execute("SELECT origin_seq FROM dirent WHERE ino = ?", (ino,)).fetchone()[0]

    def publish_as(self, cut: int, seq: int) -> dict[Inode, Subtree]:
        """Finish *cut* with trees that differ by *seq*."""
        trees: dict[Inode, Subtree] = {}
        for ino in self.cuts.directories(cut):
            body = encode_tree(Tree(self.store.names.inode(ino).file_id, (), (), (f"test-{seq}",)))
            trees[ino] = (object_id(body), body)
        self.cuts.begin(cut)
        self._released(self.cuts.finish(cut, seq, trees))
        return trees


def cutting(path: Path, test: Callable[[Cutting], Awaitable[None]]) -> None:
    async def body() -> None:
        here = Cutting(path)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.store.sync.run, 3600.0)
                await test(here)
                nursery.cancel_scope.cancel()
        finally:
            here.close()

    run(body)


async def seal(here: Machine) -> None:
    """Seal whatever was closed."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sealer(here.store, here.fs.files).run)
        while here.store.contents.unsealed_images():
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def test_takes_changed_directories_and_their_ancestors(tmp_path: Path) -> None:
    """A cut has what changed and the way to it, and not what was cut before; its flags are clear afterwards."""

    async def test(here: Cutting) -> None:
        for name in ("a", "a/b", "a/b/c", "quiet"):
            await here.mkdir(name)
        await here.write("quiet/f", b"1")
        first = here.cut()
        assert here.names(first).keys() == {b"/a", b"/a/b", b"/a/b/c", b"/quiet", b"/quiet/f"}
        assert here.dirty() == {} and here.cuts.pending().vector == here.vector
        here.publish_as(first, 1)
        await here.write("a/b/c/f", b"2")
        second = here.cut()
        assert here.names(second).keys() == {b"/a", b"/quiet", b"/a/b", b"/a/b/c", b"/a/b/c/f"}

    cutting(tmp_path / "s", test)


def test_is_the_state_of_that_moment(tmp_path: Path) -> None:
    """What happens after the cut is not in it, and its images stay although their names are gone."""

    async def test(here: Cutting) -> None:
        await here.write("f", b"old")
        cut = here.cut()
        (image,) = here.unsealed(cut)
        await here.unlink("f")
        assert here.names(cut) == {b"/f": b"whole"}
        assert here.store.images.path(image).read_bytes() == b"old"
        here.publish_as(cut, 1)
        await here.store.sync.sync()
        assert not here.store.images.path(image).exists()

    cutting(tmp_path / "s", test)


def test_newer_cut_takes_a_pending_one_over(tmp_path: Path) -> None:
    """Of two cuts that wait only the newer one is left, with the directories of both as they are now."""

    async def test(here: Cutting) -> None:
        await here.mkdir("d")
        await here.write("d/f", b"1")
        first = here.cut()
        (image,) = here.unsealed(first)
        await here.unlink("d/f")
        await here.write("g", b"2")
        second = here.cut()
        assert here.cuts.pending().id == second > first
        assert here.names(second) == {b"/d": b"whole", b"/d/f": None, b"/g": b"whole"}
        await here.store.sync.sync()
        assert not here.store.images.path(image).exists()

    cutting(tmp_path / "s", test)


def test_publishing_cut_is_pinned(tmp_path: Path) -> None:
    """A cut that is on its way is not replaced; a newer one waits beside it."""

    async def test(here: Cutting) -> None:
        await here.write("f", b"1")
        first = here.cut()
        here.cuts.begin(first)
        await here.write("g", b"1")
        second = here.cut()
        assert here.cuts.publishing().id == first and here.cuts.pending().id == second
        assert b"/g" not in here.names(first)

    cutting(tmp_path / "s", test)


def test_sealing_reaches_cuts(tmp_path: Path) -> None:
    """A file that is sealed after the cut is complete in it, also when its name is gone by then."""

    async def test(here: Cutting) -> None:
        await here.write("f", b"1" * 3000)
        await here.write("g", b"2" * 3000)
        cut = here.cut()
        await here.unlink("g")
        assert len(here.unsealed(cut)) == 2
        await seal(here)
        assert here.unsealed(cut) == []
        assert [file is not None for _, _, file in here.cuts.files(cut, ROOT_INODE, b"")] == [True, True]

    cutting(tmp_path / "s", test)


def test_rescued_image_is_followed(tmp_path: Path) -> None:
    """Writing in place into a file that a cut has leaves the cut its own copy of the bytes."""

    async def test(here: Cutting) -> None:
        await here.write("f", b"old" * 1000)
        await seal(here)
        cut = here.cut()
        ((_, _, before),) = here.cuts.files(cut, ROOT_INODE, b"")
        fh = await here.open("f", os.O_RDWR)
        await here.fs.files.write(fh, 0, b"new")
        await here.fs.release(fh)
        ((_, _, after),) = here.cuts.files(cut, ROOT_INODE, b"")
        assert after.image != before.image and after.manifest == before.manifest
        assert here.cuts.image_of(after.manifest) == after.image
        assert here.store.images.path(after.image).read_bytes() == b"old" * 1000

    cutting(tmp_path / "s", test)


def test_finish_marks_what_is_still_so(tmp_path: Path) -> None:
    """Names that are as the cut had them count as published, with the head's sequence; changed ones stay pending."""

    async def test(here: Cutting) -> None:
        for name in ("same", "attributes", "content", "replaced", "removed"):
            await here.write(name, b"x")
        inodes = {name: await here.walk(name) for name in ("same", "attributes", "content")}
        cut = here.cut()
        await here.chmod("attributes", 0o600)
        await here.write("content", b"y")
        await here.unlink("replaced")
        await here.write("replaced", b"z")
        await here.unlink("removed")
        trees = here.publish_as(cut, 5)
        assert {name: here.origin(ino) for name, ino in inodes.items()} == {
            "same": 5,
            "attributes": None,
            "content": None,
        }
        assert here.origin(await here.walk("replaced")) is None
        rows = here.store.catalog.db.execute("SELECT name FROM dirent WHERE origin_seq IS NULL")
        assert {row[0] for row in rows} == {b"attributes", b"content", b"replaced", b"removed"}
        assert here.tree(ROOT_INODE) == trees[ROOT_INODE] and here.dirty() == {ROOT_INODE: 2}

    cutting(tmp_path / "s", test)


def test_finish_keeps_what_a_merge_set_meanwhile(tmp_path: Path) -> None:
    """A directory whose tree a merge set between cut and acknowledgement keeps that tree."""

    async def test(here: Cutting) -> None:
        await here.mkdir("d")
        cut = here.cut()
        merged = b"m" * 32
        here.store.names.update_inode(await here.walk("d"), tree=merged, tree_body=None)
        here.publish_as(cut, 1)
        assert here.tree(await here.walk("d")) == (merged, None)

    cutting(tmp_path / "s", test)


def test_pending_cut_learns_what_was_published_before_it(tmp_path: Path) -> None:
    """A directory that changed before the cut being published, and not since, is in the newer cut as published then."""

    async def test(here: Cutting) -> None:
        await here.mkdir("d")
        here.publish_as(here.cut(), 1)
        await here.write("d/f", b"1")
        first = here.cut()
        here.cuts.begin(first)
        await here.write("g", b"2")
        second = here.cut()
        ino = await here.walk("d")
        assert ino not in here.cuts.directories(second)
        trees = here.publish_as(first, 2)
        (entry,) = [each.entry for each in here.cuts.entries(second, ROOT_INODE) if each.name == b"d"]
        assert (entry.tree, entry.tree_body) == trees[ino]
        last = here.publish_as(second, 3)
        assert here.tree(ino) == trees[ino] and here.tree(ROOT_INODE) == last[ROOT_INODE]

    cutting(tmp_path / "s", test)


def test_unknown_trees_are_built_again(tmp_path: Path) -> None:
    """When the trees of a published cut are not known any more its directories are in the next cut again."""

    async def test(here: Cutting) -> None:
        await here.mkdir("d")
        first = here.cut()
        here.cuts.begin(first)
        await here.write("f", b"1")
        here.cut()
        here.cuts.finish(first, 1, None)
        assert here.cuts.pending() is None
        assert here.dirty().keys() == {ROOT_INODE, await here.walk("d")}
        assert here.origin(await here.walk("d")) == 1

    cutting(tmp_path / "s", test)


def test_unfinished_and_held_stay_dirty(tmp_path: Path) -> None:
    """What is left out of a cut keeps its directory dirty, so that the next one has it."""

    async def test(here: Cutting) -> None:
        await here.mkdir("set")
        await here.mkdir("set/sub")
        await here.mkdir("d")
        await here.write("d/f", b"1")
        unfinished, held = await here.walk("d/f"), await here.walk("set")
        cut = here.cut({unfinished}, {held})
        assert here.names(cut) == {b"/d": b"whole", b"/d/f": b"unfinished"}
        here.publish_as(cut, 1)
        assert here.origin(unfinished) is None
        assert here.names(here.cut()) == {b"/d": b"whole", b"/d/f": b"whole", b"/set": b"whole", b"/set/sub": b"whole"}

    cutting(tmp_path / "s", test)


def test_leave_out(tmp_path: Path) -> None:
    """A pending cut that waits for an image can go on without the file, which stays dirty."""

    async def test(here: Cutting) -> None:
        await here.write("f", b"1")
        cut = here.cut()
        (image,) = here.unsealed(cut)
        here.cuts.leave_out(image)
        assert here.unsealed(cut) == [] and here.names(cut) == {b"/f": b"unfinished"}
        assert here.dirty() == {ROOT_INODE: 2}

    cutting(tmp_path / "s", test)


def test_directory_removed_while_dirty(tmp_path: Path) -> None:
    """Directories without a way to the root are in no cut."""

    async def test(here: Cutting) -> None:
        await here.mkdir("a")
        await here.mkdir("a/b")
        here.fs.pin(await here.walk("a/b"))
        await here.rmdir("a/b")
        await here.rmdir("a")
        cut = here.cut()
        assert here.names(cut) == {b"/a": None}

    cutting(tmp_path / "s", test)


def test_survives_a_restart(tmp_path: Path) -> None:
    """A cut is still there, with its images, after the process was killed."""

    async def before(here: Cutting) -> None:
        await here.write("f", b"kept")
        here.cut()
        await here.unlink("f")

    async def after(here: Cutting) -> None:
        cut = here.cuts.pending()
        (image,) = here.unsealed(cut.id)
        assert here.store.images.path(image).read_bytes() == b"kept"

    cutting(tmp_path / "s", before)
    cutting(tmp_path / "s", after)
