"""Merging other writers' trees: who wins, what is kept, and how little is fetched."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import trio
import trio.testing

from ckptfs.encoding.keys import tree_key
from ckptfs.errors import ContentUnavailable, NameMissing
from ckptfs.ids import ROOT_INODE, ImageId, Inode, WriterId
from ckptfs.local.catalog.cutcopy import ImageStatus
from ckptfs.local.catalog.cuts import Cuts
from ckptfs.remote.directory import DirectoryStore
from tests.support.memory import MemoryStore
from tests.support.peers import Peer, content_id


class World:
    """Two writers and a clock that only rises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remote = MemoryStore()
        self.peers: list[Peer] = []
        self.now = 0
        self.a, self.b = self.peer("a"), self.peer("b")

    def now_ms(self) -> int:
        self.now += 1
        return self.now

    def peer(self, name: str) -> Peer:
        peer = Peer(self.path / f"{name}.db", self.remote, now_ms=self.now_ms)
        self.peers.append(peer)
        return peer

    async def share(self, *rounds: Peer) -> None:
        """Each publishes and all others follow, in turn."""
        for peer in rounds or (self.a, self.b):
            peer.publish()
            for other in self.peers:
                if other is not peer:
                    await other.follow()

    def close(self) -> None:
        for peer in self.peers:
            peer.check()
            peer.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(main)


def test_what_one_writes_another_sees(world: World) -> None:
    """Names, contents and attributes of one writer appear at the other as they are."""

    async def test() -> None:
        await world.a.mkdir("run")
        ino = await world.a.write("run/model", "weights")
        world.a.names.update_inode(ino, mode=0o100600)
        world.a.names.set_xattr(ino, b"user.x", b"1")
        world.a.names.state_changed(ino, world.a.clock.tick())
        await world.share(world.a)
        assert await world.b.view() == {"run/": "", "run/model": content_id("weights")}
        row = world.b.names.inode(await world.b.resolve("run/model"))
        assert (stat.S_IMODE(row.mode), row.size) == (0o600, 7)
        assert world.b.names.xattrs(row.ino) == {b"user.x": b"1"}
        theirs = world.a.names.inode(await world.a.resolve("run"))
        assert world.b.names.inode(await world.b.resolve("run")).mtime_ns == theirs.mtime_ns

    run(test)


def test_directories_that_nobody_looks_into_are_not_fetched(world: World) -> None:
    """A fresh reader of many directories fetches the root's tree alone, and then what it looks into."""

    async def test() -> None:
        for number in range(30):
            await world.a.mkdir(f"step-{number}")
            for shard in range(10):
                await world.a.write(f"step-{number}/shard-{shard}", f"{number} {shard}")
        world.a.publish()
        reader = world.peer("reader")
        await reader.follow()
        assert reader.merger.requests <= 6  # the root is split into parts
        before = reader.merger.requests
        await reader.resolve("step-7/shard-3")
        assert reader.merger.requests == before + 1
        assert not reader.names.inode(await reader.resolve("")).dirty

    run(test)


def test_a_merged_tree_that_equals_the_other_is_clean(world: World) -> None:
    """What was merged and differs in nothing needs no publishing: the next head names the same root tree."""

    async def test() -> None:
        await world.a.mkdir("run")
        await world.a.write("run/x", "1")
        theirs = world.a.publish()
        await world.b.follow()
        await world.b.view()
        assert world.b.publish().lanes[""][0] == theirs.lanes[""][0]
        await world.a.write("run/y", "2")
        theirs = world.a.publish()
        await world.b.follow()
        assert world.b.publish().lanes[""][0] == theirs.lanes[""][0]
        await world.b.check_published()

    run(test)


def test_a_late_addition_follows_a_rename(world: World) -> None:
    """A file that was added to a directory under its old name is found under the name that another writer gave it."""

    async def test() -> None:
        await world.a.mkdir("tmp-1")
        await world.a.write("tmp-1/x", "1")
        await world.share()
        await world.b.view()
        await world.b.write("tmp-1/late", "2")
        await world.a.mkdir("done")
        await world.a.rename("tmp-1", "done/step-1")
        await world.share()
        assert await world.a.view() == await world.b.view()
        assert set(await world.b.view()) == {"done/", "done/step-1/", "done/step-1/x", "done/step-1/late"}

    run(test)


def test_a_removal_hides_only_what_is_older(world: World) -> None:
    """A file that was changed after another writer removed it stays; one that was changed before goes."""

    async def test() -> None:
        for name in ("older", "newer"):
            await world.a.write(name, "1")
        await world.share()
        await world.a.write("older", "2")
        await world.b.remove("older")
        await world.b.remove("newer")
        await world.a.write("newer", "2")
        await world.share()
        await world.share()
        assert await world.a.view() == await world.b.view() == {"newer": content_id("2")}

    run(test)


def test_a_removed_directory_with_a_pending_entry_is_kept(world: World) -> None:
    """A directory that another writer removed lives on with what was added here meanwhile, and nothing else."""

    async def test() -> None:
        await world.a.mkdir("run")
        await world.a.write("run/old", "1")
        await world.share()
        await world.b.view()
        await world.b.write("run/mine", "2")
        await world.a.remove("run")
        await world.share()
        assert await world.b.view() == {"run/": "", "run/mine": content_id("2")}
        assert await world.a.view() == await world.b.view()

    run(test)


def test_a_removed_directory_goes_with_what_the_remover_knew(world: World) -> None:
    """Without anything new in it, a directory that was removed elsewhere goes, looked into or not, without a fetch."""

    async def test() -> None:
        for name in ("seen", "unseen"):
            await world.a.mkdir(name)
            await world.a.mkdir(f"{name}/deep")
            await world.a.write(f"{name}/deep/x", "1")
        await world.share(world.a)
        await world.b.resolve("seen/deep/x")
        await world.a.remove("seen")
        await world.a.remove("unseen")
        world.a.publish()
        before = world.b.merger.requests
        await world.b.follow()
        assert world.b.merger.requests <= before + 1
        assert await world.b.view() == {}

    run(test)


def test_the_same_path_made_twice_is_one_directory(world: World) -> None:
    """Two machines that make the same path at once and each write into it see one directory with everything."""

    async def test() -> None:
        for peer, name in ((world.a, "a"), (world.b, "b")):
            await peer.mkdir("out")
            await peer.mkdir("out/run")
            await peer.write(f"out/run/shard-{name}", name)
        await world.share()
        await world.share()
        assert await world.a.view() == await world.b.view()
        assert set(await world.a.view()) == {"out/", "out/run/", "out/run/shard-a", "out/run/shard-b"}

    run(test)


def test_a_remade_directory_does_not_get_its_old_content_back(world: World) -> None:
    """After rm -r and mkdir of the same name, what another writer's head still has of the old one stays away."""

    async def test() -> None:
        await world.a.mkdir("out")
        await world.a.write("out/old", "1")
        await world.share()
        await world.a.remove("out")
        await world.a.mkdir("out")
        await world.a.write("out/new", "2")
        await world.b.write("other", "3")
        world.b.publish()  # still has the old directory
        await world.a.follow()
        assert set(await world.a.view()) == {"out/", "out/new", "other"}
        await world.share()
        assert set(await world.b.view()) == {"out/", "out/new", "other"}

    run(test)


def test_a_removal_whose_tombstone_was_dropped_is_learned(world: World) -> None:
    """A reader that did not look while a tombstone lived learns from a later head that the name is gone, also when the
    writer from which it had the name is dead."""

    async def test() -> None:
        await world.a.write("gone", "1")
        await world.a.write("kept", "1")
        world.a.publish()
        reader = world.peer("reader")
        await reader.follow()
        await world.b.follow()
        await world.b.remove("gone")
        world.b.publish()
        world.now += 3_600_000
        world.b.catalog.db.execute("DELETE FROM dirent WHERE ino IS NULL")
        world.b.catalog.db.execute("UPDATE inode SET dirty = 2 WHERE ino = 1")
        world.b.publish()
        await reader.write("mine", "2")
        await reader.follow()
        assert set(await reader.view()) == {"kept", "mine"}

    run(test)


def test_a_cut_that_leaves_others_entries_out_does_not_cover_them(world: World) -> None:
    """Where a cut shows an earlier state of a directory, its vector does not say that it has what others put there."""

    async def test() -> None:
        await world.a.mkdir("set")
        await world.a.write("set/theirs", "1")
        world.a.publish()
        await world.b.follow()
        await world.b.view()
        await world.b.write("set/mine", "2")
        await world.b.write("other", "3")
        cuts = Cuts(world.b.catalog)

        def vector(held: set[Inode]) -> Mapping[WriterId, int]:
            cuts.take(
                taken_ns=0,
                stamp=world.b.clock.tick(),
                incomplete=False,
                vector=world.b.followed.newest(),
                unfinished=(),
                held=held,
                status=lambda ino, image: ImageStatus(0, 0, 0),
                provisional=lambda ino: None,
            )
            pending = cuts.pending()
            assert pending is not None
            return pending.vector

        assert vector({await world.b.resolve("set")}) == {}
        assert vector(set()) == {world.a.writer: 1}

    run(test)


def test_hard_links_share_what_is_newest(world: World) -> None:
    """A change through one name shows through the other, wherever it is; the link count is right."""

    async def test() -> None:
        await world.a.write("x", "1")
        await world.a.mkdir("d")
        await world.a.link("x", "d/y")
        await world.share()
        await world.b.view()
        await world.b.write("d/y", "2")
        await world.share()
        assert (await world.a.view())["x"] == content_id("2")
        assert world.a.names.inode(await world.a.resolve("x")).nlink == 2

    run(test)


def test_two_renames_do_not_make_a_loop(world: World) -> None:
    """Each of two directories moved below the other at once: both stay reachable, with all that is in them."""

    async def test() -> None:
        for name in ("x", "y"):
            await world.a.mkdir(name)
            await world.a.write(f"{name}/file-{name}", name)
        await world.share()
        await world.b.view()
        await world.a.rename("x", "y/x")
        await world.b.rename("y", "x/y")
        await world.share()
        await world.share()
        assert await world.a.view() == await world.b.view()
        assert {path.rsplit("/", 1)[-1] for path in await world.a.view() if not path.endswith("/")} == {
            "file-x",
            "file-y",
        }

    run(test)


def test_replaced_content_frees_its_image(world: World) -> None:
    """When newer content of another writer arrives, the local image is let go and the listener told; attributes
    alone keep it; and a file that is being written here is left alone."""

    async def test() -> None:
        await world.a.write("x", "1")
        await world.share()
        ino = await world.b.resolve("x")
        world.b.names.update_inode(ino, image=ImageId(77))
        theirs = await world.a.resolve("x")
        world.a.names.update_inode(theirs, mode=0o100600)
        world.a.names.state_changed(theirs, world.a.clock.tick())
        await world.share(world.a)
        assert world.b.names.inode(ino).image == ImageId(77) and not world.b.freed
        await world.a.write("x", "2")
        world.b.being_written.add(ino)
        await world.share(world.a)
        assert world.b.names.inode(ino).image == ImageId(77)
        world.b.being_written.clear()
        await world.a.write("x", "3")
        await world.share(world.a)
        assert world.b.names.inode(ino).image is None and world.b.freed == [ImageId(77)]
        assert (None, None, ino, True) in world.b.events

    run(test)


def test_a_failure_halfway_is_made_up_for(world: World) -> None:
    """When the remote fails in the middle of a head, the next check goes on where it stopped and nothing is lost."""

    async def test() -> None:
        for name in "abc":
            await world.a.mkdir(name)
            for shard in range(12):
                await world.a.write(f"{name}/{shard}", "1")
        await world.share()
        await world.b.view()
        for name in "abc":
            await world.a.write(f"{name}/new", "2")
        head = world.a.publish()
        missing = {key: data for key, data in world.remote.objects.items() if key.startswith("trees/")}
        row = world.a.sources.tree(await world.a.resolve("c"))
        assert row is not None and row.digest is not None
        del world.remote.objects[tree_key(row.digest)]
        await world.b.follower.check()
        assert world.b.follower.last_error is not None
        assert world.b.followed.newest()[world.a.writer] < head.seq
        world.remote.objects |= missing
        await world.b.follow()
        assert await world.b.view() == await world.a.view()
        assert world.b.followed.newest()[world.a.writer] == head.seq

    run(test)


def test_who_waits_for_a_whole_tree_never_runs_halfway(world: World) -> None:
    """Also when the next head is begun before who waited for the last one runs."""

    async def test() -> None:
        merger, seen = world.b.merger, []

        async def look() -> None:
            await merger.whole()
            seen.append(merger.is_halfway)

        async with trio.open_nursery() as nursery:
            with merger._halfway():
                nursery.start_soon(look)
                await trio.testing.wait_all_tasks_blocked()
            with merger._halfway():
                await trio.testing.wait_all_tasks_blocked()
                assert seen == []
        assert seen == [False]

    run(test)


def test_looking_into_a_directory_fails_in_time_without_the_remote(world: World) -> None:
    """While the remote is down a directory that is not here is an error after the read timeout, never ENOENT."""

    async def test() -> None:
        await world.a.mkdir("run")
        for shard in range(20):
            await world.a.write(f"run/{shard}", "1")
        await world.share(world.a)
        world.remote.failing = True
        with pytest.raises(ContentUnavailable):
            await world.b.resolve("run/3")
        with pytest.raises(NameMissing):
            await world.b.resolve("nothing")
        world.remote.failing = False
        await world.b.resolve("run/3")

    run(test)


def test_those_who_look_at_once_share_one_fetch(world: World) -> None:
    """Many lookups in a directory that is not here yet cause one request."""

    async def test() -> None:
        await world.a.mkdir("run")
        for shard in range(10):
            await world.a.write(f"run/{shard}", "1")
        await world.share(world.a)
        before = world.b.merger.requests
        ino = world.b.names.child(ROOT_INODE, b"run").ino
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(world.b.merger.expand, ino)
        assert world.b.merger.requests == before + 1

    run(test)


def test_a_large_directory_is_merged_in_parts(world: World) -> None:
    """Thousands of entries come over more than one transaction and more than one tree object."""

    async def test() -> None:
        for number in range(2500):
            await world.a.write(f"{number}", "")
        await world.share(world.a)
        assert len(await world.b.view()) == 2500
        await world.b.remove("17")
        await world.share(world.b)
        assert len(await world.a.view()) == 2499

    run(test)


def test_over_a_directory_as_remote(tmp_path: Path) -> None:
    """Two writers meet in a plain directory as they do in memory."""

    async def test() -> None:
        ticks = itertools.count(1)
        store = DirectoryStore(str(tmp_path / "remote"))
        peers = [Peer(tmp_path / f"{name}.db", store, now_ms=lambda: next(ticks)) for name in "ab"]
        for index, peer in enumerate(peers):
            await peer.mkdir("run")
            await peer.write(f"run/{index}", str(index))
            peer.publish()
        for peer in (*peers, *peers):
            await peer.follow()
            peer.publish()
        for peer in peers:
            await peer.follow()
        assert await peers[0].view() == await peers[1].view()
        assert len(await peers[0].view()) == 3
        for peer in peers:
            peer.close()

    run(test)
