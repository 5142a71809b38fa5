"""Publishing over a real directory store: what is on the remote is what was there at the cut, whole and in order."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import pytest
import trio

from ckptfs.encoding.head import open_head
from ckptfs.ids import ROOT_INODE
from ckptfs.remote.directory import DirectoryStore
from ckptfs.replica import markers
from tests.support.faulty import FaultyStore, unavailable
from tests.support.publishing import CALLER, Machine, machine, restore, run, tuned


def heads(remote: DirectoryStore) -> list:
    """All heads of the remote, newest first for each writer."""
    return [open_head(remote.get(each.key), each.key) for each in remote.list("heads/").objects]


def test_everything_arrives(tmp_path: Path) -> None:
    """Files of all sizes, directories and links come back byte for byte from the remote alone."""
    remote = DirectoryStore(str(tmp_path / "remote"))
    numbers = random.Random(1)
    files = {f"d{i % 3}/f{i}": numbers.randbytes(size) for i, size in enumerate([0, 1, 100, 5000, 20000, 40000] * 3)}

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            for i in range(3):
                await here.mkdir(f"d{i}")
            for path, data in files.items():
                await here.write(path, data)
            await here.fs.symlink(await here.walk("d0"), b"link", b"../d1", CALLER)
            await here.publish()
            assert here.publisher is not None and here.publisher.is_drained
            assert here.publisher.progress().pending_files == 0

    run(test)
    found = restore(tmp_path / "remote", tmp_path / "out")
    assert found == {"d0": None, "d1": None, "d2": None, "d0/link": "../d1", **files}
    (head,) = heads(remote)
    assert not head.incomplete


def test_a_file_without_a_name_is_closed(tmp_path: Path) -> None:
    """Nothing changed with that, and what follows is published as usual."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            fh = await here.open("a", os.O_WRONLY | os.O_CREAT)
            await here.fs.files.write(fh, 0, b"a")
            await here.unlink("a")
            await here.publish()
            await here.fs.release(fh)
            await trio.sleep(0.3)  # settled
            await here.write("b", b"b")
            with trio.fail_after(20):
                await here.publish()

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"b": b"b"}


def test_second_publication_sends_only_what_changed(tmp_path: Path) -> None:
    """A second checkpoint that shares most bytes uploads only the rest, and the earlier head stays readable."""
    remote = DirectoryStore(str(tmp_path / "remote"))
    numbers = random.Random(2)
    frozen, moving = numbers.randbytes(30000), numbers.randbytes(2000)

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("a", frozen)
            await here.publish()
            first = here.publisher.counters.raw_bytes
            await here.write("b", frozen)
            await here.write("c", moving)
            await here.publish()
            assert here.publisher.counters.raw_bytes - first == len(moving)
            await here.publish()  # nothing new: no head
            assert here.heads.newest().seq == 2

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": frozen, "b": frozen, "c": moving}


def begin_cut(here: Machine) -> None:
    """Take a cut that no later one replaces."""
    assert here.settler.cut_now()
    cut = here.cuts.pending()
    assert cut is not None
    here.cuts.begin(cut.id)


async def remove(here: Machine, directory: str) -> None:
    """With the files in it."""
    for name, _ in await here.fs.entries(await here.walk(directory)):
        await here.unlink(f"{directory}/{os.fsdecode(name)}")
    await here.rmdir(directory)


def test_what_was_rotated_away_is_not_sent(tmp_path: Path) -> None:
    """A checkpoint that is removed after the cut and before it was sent is not sent and not published; the rest is."""
    remote = DirectoryStore(str(tmp_path / "remote"))
    numbers = random.Random(3)
    old, new = numbers.randbytes(30000), numbers.randbytes(30000)

    async def test() -> None:
        async with machine(tmp_path / "store", remote, tuned(settle_s=30)) as here:
            for name, data in (("step-1", old), ("step-2", new)):
                await here.mkdir(name)
                await here.write(f"{name}/weights", data)
            begin_cut(here)
            await here.unlink("step-1/weights")
            await here.rmdir("step-1")
            assert here.publisher is not None
            await here.publisher.drained()
            assert restore(tmp_path / "remote", tmp_path / "out") == {"step-2": None, "step-2/weights": new}
            assert here.publisher.counters.raw_bytes == len(new)

    run(test)


@pytest.mark.parametrize("where", ["", "run/"], ids=["top", "below"])
@pytest.mark.parametrize("marked", [1, 2])
def test_what_a_marker_names_is_sent_though_it_was_rotated_away(tmp_path: Path, where: str, marked: int) -> None:
    """Whatever is published, a marker never names what is not there; what none can name is still not sent."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote, tuned(settle_s=30)) as here:
            if where:
                await here.mkdir(where.rstrip("/"))
                await here.publish()
            for step in (1, 2, 3):
                await here.mkdir(f"{where}step-{step}")
                await here.write(f"{where}step-{step}/weights", b"%d" % step * 20_000)
                if step == marked:
                    await here.write("latest", b"%d" % step)
            begin_cut(here)
            for step in (1, 2):
                await here.unlink(f"{where}step-{step}/weights")
                await here.rmdir(f"{where}step-{step}")
            await here.publisher.drained()
            found = restore(tmp_path / "remote", tmp_path / "out")
            assert {path for path in found if path.endswith("weights")} == {
                f"{where}step-{step}/weights" for step in (marked, 3)
            }
            assert found["latest"] == b"%d" % marked

    run(test)


@pytest.mark.parametrize(
    ("name", "marker", "text", "is_named"),
    [
        ("step-1", "latest", b"step-1\n", True),
        ("step-1", "best.json", b'{"best_model_checkpoint": "/data/out/step-1"}', True),
        ("step-1", "meta/latest", b"step-1", True),
        ("step-1", "step-9/trainer_state.json", b'{"best": "step-1", "step": 9}', True),
        ("iter_0000100", "latest_checkpointed_iteration.txt", b" 100\n", True),
        ("schritt-ü", "latest.json", b'{"latest": "schritt-\\u00fc"}', True),
        ("step-1", "latest", b"step-10", False),
        ("iter_0000100", "config.json", b'{"width": 100}', False),
        ("step-1", "step-1/self", b"step-1", False),
    ],
)
def test_what_a_marker_anywhere_names_is_sent(
    tmp_path: Path, name: str, marker: str, text: bytes, is_named: bool
) -> None:
    """Though other directories came in between, whose marker it could be, too."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote, tuned(settle_s=30)) as here:
            await here.mkdir(name)
            await here.write(f"{name}/weights", b"1" * 20_000)
            for other in ("eval", "meta", "step-9"):
                await here.mkdir(other)
            await here.write(marker, text)
            begin_cut(here)
            await remove(here, name)
            await here.publisher.drained()
            found = restore(tmp_path / "remote", tmp_path / "out")
            assert (f"{name}/weights" in found) == is_named and "eval" in found

    run(test)


def test_what_a_link_names_is_sent(tmp_path: Path) -> None:
    """Also an older one, that was made to lead to the best."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote, tuned(settle_s=30)) as here:
            for step in (1, 2, 3):
                await here.mkdir(f"step-{step}")
                await here.write(f"step-{step}/weights", b"%d" % step * 20_000)
            await here.fs.symlink(ROOT_INODE, b"best", b"step-2", CALLER)
            begin_cut(here)
            for step in (1, 2):
                await remove(here, f"step-{step}")
            await here.publisher.drained()
            found = restore(tmp_path / "remote", tmp_path / "out")
            assert {path for path in found if path.endswith("weights")} == {"step-2/weights", "step-3/weights"}

    run(test)


def test_too_many_small_files_to_look_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out then."""
    monkeypatch.setattr(markers, "_MOST_FILES", 3)
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test(files: int) -> None:
        async with machine(tmp_path / f"store-{files}", remote, tuned(settle_s=30)) as here:
            await here.mkdir(f"step-{files}")
            await here.write(f"step-{files}/weights", b"1" * 20_000)
            await here.mkdir(f"other-{files}")
            for number in range(files - 1):  # and the weights
                await here.write(f"other-{files}/{number}", b"%d" % number)
            begin_cut(here)
            await remove(here, f"step-{files}")
            await here.publisher.drained()

    run(partial(test, 3))
    run(partial(test, 4))
    assert {path for path in restore(tmp_path / "remote", tmp_path / "out") if "step" in path} == {
        "step-4", "step-4/weights"
    }  # fmt: skip


def test_restart_goes_on(tmp_path: Path) -> None:
    """A store that is opened again publishes on top of what it published, with the next sequence."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def first() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("a", b"one" * 1000)
            await here.publish()
            await here.write("b", b"two" * 1000)

    async def second() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.publisher.drained()
            await here.publish()
            assert here.heads.newest().seq == 2

    run(first)
    run(second)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": b"one" * 1000, "b": b"two" * 1000}


def test_unfinished_file_is_left_out(tmp_path: Path) -> None:
    """Publishing at once leaves a new file that is being written out, keeps the old version of a rewritten one."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("old", b"first")
            await here.publish()
            new = await here.open("new", os.O_WRONLY | os.O_CREAT)
            old = await here.open("old", os.O_WRONLY | os.O_TRUNC)
            await here.fs.files.write(old, 0, b"sec")
            await here.write("other", b"x")
            await here.publish()
            assert restore(tmp_path / "remote", tmp_path / "out1") == {"old": b"first", "other": b"x"}
            assert max(heads(remote), key=lambda head: head.seq).incomplete
            await here.fs.release(new)
            await here.fs.files.write(old, 3, b"ond")
            await here.fs.release(old)
            while here.heads.newest().seq < 3:
                await trio.sleep(0.01)

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out2") == {"old": b"second", "new": b"", "other": b"x"}


def test_settles_by_itself(tmp_path: Path) -> None:
    """Without being asked, a changed directory is published once it is quiet."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.mkdir("d")
            await here.write("d/a", b"1")
            while here.heads.newest() is None:
                await trio.sleep(0.01)
            await here.rename("d", "e")
            await here.unlink("e/a")
            while here.heads.newest().seq < 2:
                await trio.sleep(0.01)

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"e": None}


def test_outage_heals_unaided(tmp_path: Path) -> None:
    """While the remote fails local work goes on; when it works again everything is published, nothing twice."""
    remote = FaultyStore(DirectoryStore(str(tmp_path / "remote")))
    data = random.Random(3).randbytes(40000)

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            remote.fault = lambda operation, key: unavailable(key)
            await here.write("a", data)
            while here.publisher.last_error is None:
                await trio.sleep(0.01)
            await here.write("b", data[:5000])
            assert "503" in here.publisher.progress().last_error and here.publisher.progress().pending_files == 2
            flaky = random.Random(4)
            remote.fault = lambda operation, key: unavailable(key) if flaky.random() < 0.7 else None
            await here.publish()
            assert here.publisher.last_error is None and here.publisher.progress().pending_files == 0
        assert len(remote.put_keys) == len(set(remote.put_keys))

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": data, "b": data[:5000]}


def test_lost_answers(tmp_path: Path) -> None:
    """A put that was stored although its answer was lost is recognised, whatever it was; no head is put twice."""
    remote = FaultyStore(DirectoryStore(str(tmp_path / "remote")))
    lost: set[str] = set()

    def lose(operation: str, key: str) -> Exception | None:
        if operation != "put" or key in lost:
            return None
        lost.add(key)
        return unavailable(key)

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            remote.after = lose
            await here.write("a", random.Random(5).randbytes(20000))
            await here.mkdir("d")
            for i in range(20):
                await here.write(f"d/{i}", b"%d" % i * 300)
            await here.publish()
            assert here.heads.newest().seq == 1

    run(test)
    assert any(key.startswith("heads/") for key in lost) and any(key.startswith("trees/") for key in lost)
    assert len(heads(remote)) == 1
    assert len(restore(tmp_path / "remote", tmp_path / "out")) == 22


@pytest.mark.parametrize("stage", ["packs/", "manifests/", "trees/", "heads/", "acknowledged"])
def test_killed_while_publishing(tmp_path: Path, stage: str) -> None:
    """A process that dies at any step is followed by one that finishes the same cut, with the next sequence."""
    remote = FaultyStore(DirectoryStore(str(tmp_path / "remote")))
    numbers = random.Random(6)
    files = {f"d/{i}": numbers.randbytes(4000) for i in range(10)}

    async def first() -> None:
        async with machine(tmp_path / "store", remote) as here:
            await here.write("before", b"b")
            await here.publish()
            reached = trio.Event()
            token = trio.lowlevel.current_trio_token()

            def stop(operation: str, key: str) -> Exception | None:
                if operation == "put" and key.startswith("heads/" if stage == "acknowledged" else stage):
                    token.run_sync_soon(reached.set)
                    return unavailable(key)
                return None

            if stage == "acknowledged":
                remote.after = stop
            else:
                remote.fault = stop
            await here.mkdir("d")
            for path, data in files.items():
                await here.write(path, data)
            await here.rename("before", "after")
            here.settler.cut_now()
            await reached.wait()

    async def second() -> None:
        remote.fault = remote.after = lambda operation, key: None
        packs = remote.requests["put", "packs"]
        async with machine(tmp_path / "store", remote) as here:
            await here.publisher.drained()
            await here.publish()
            assert here.heads.newest().seq == 2
            assert here.publisher.progress().pending_files == 0
            state = "SELECT sum(dirty), sum(tree IS NOT NULL), count(*) FROM inode WHERE mode & 16384"
            assert here.store.catalog.db.execute(state).fetchone() == (0, 2, 2)
        if stage in ("heads/", "acknowledged"):
            assert remote.requests["put", "packs"] == packs

    run(first)
    run(second)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"d": None, "after": b"b", **files}
    assert len(remote.put_keys) == len(set(remote.put_keys))


def test_copied_store_becomes_another_writer(tmp_path: Path) -> None:
    """When its next head's key holds another head, the store was copied: it goes on as a new writer."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def before() -> None:
        async with machine(tmp_path / "one", remote) as here:
            await here.write("a", b"a")
            await here.publish()

    async def publish(name: str, seq: int, place: str) -> None:
        async with machine(tmp_path / place, remote) as here:
            writer = here.store.writer
            await here.write(name, name.encode())
            await here.publish()
            assert here.heads.newest().seq == seq
            assert (here.store.writer != writer) == (name == "copy")

    run(before)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    db = sqlite3.connect(tmp_path / "two" / "catalog.db")
    with db:  # as if nothing told that it is a copy
        db.execute("UPDATE setting SET value = ? WHERE key = 'place'", (_place_of(tmp_path / "two" / "catalog.db"),))
    db.close()
    run(lambda: publish("original", 2, "one"))
    run(lambda: publish("copy", 1, "two"))
    found = restore(tmp_path / "remote", tmp_path / "out")
    assert found == {"a": b"a", "original": b"original", "copy": b"copy"}


def _place_of(catalog: Path) -> str:
    try:
        machine_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine_id = ""
    status = catalog.stat()
    return f"{machine_id}:{status.st_dev}:{status.st_ino}"


def test_changed_bytes_are_sealed_anew(tmp_path: Path) -> None:
    """A file whose bytes changed since it was sealed is sealed again, and what is published is consistent."""
    remote = FaultyStore(DirectoryStore(str(tmp_path / "remote")))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            remote.fault = lambda operation, key: unavailable(key)
            await here.write("a", b"a" * 5000)
            await here.write("b", b"b" * 5000)
            while here.publisher.last_error is None:
                await trio.sleep(0.01)
            row = here.store.names.inode(await here.walk("a"))
            here.store.images.path(row.image).write_bytes(b"c" * 5000)
            remote.fault = lambda operation, key: None
            await here.publish()

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": b"c" * 5000, "b": b"b" * 5000}


def test_lost_packs_are_sent_again(tmp_path: Path) -> None:
    """Packs that no head names yet are looked for before the head: those that are gone are sent again."""
    remote = FaultyStore(DirectoryStore(str(tmp_path / "remote")))
    data = random.Random(7).randbytes(20000)

    async def first() -> None:
        async with machine(tmp_path / "store", remote) as here:
            failed = trio.Event()
            token = trio.lowlevel.current_trio_token()

            def stop(operation: str, key: str) -> Exception | None:
                if operation == "put" and key.startswith("heads/"):
                    token.run_sync_soon(failed.set)
                    return unavailable(key)
                return None

            remote.fault = stop
            await here.write("a", data)
            here.settler.cut_now()
            await failed.wait()

    async def second() -> None:
        remote.fault = lambda operation, key: None
        for each in remote.list("packs/").objects[:2]:
            remote.delete([each.key])
        async with machine(tmp_path / "store", remote) as here:
            await here.publisher.drained()
            assert here.heads.newest().seq == 2  # the head that named them is never put

    run(first)
    run(second)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"a": data}


def test_another_remote_is_refused(tmp_path: Path) -> None:
    """A store that was replicated to one remote does not take another one for it."""

    async def once(name: str) -> None:
        async with machine(tmp_path / "store", DirectoryStore(str(tmp_path / name))) as here:
            await here.write(name, b"x")
            if name == "one":
                await here.publish()
            else:
                here.settler.cut_now()
                while here.publisher.last_error is None:
                    await trio.sleep(0.01)
                assert "not the remote that this store was replicated with" in here.publisher.last_error

    run(lambda: once("one"))
    run(lambda: once("two"))
    assert os.listdir(tmp_path / "two") == [".tmp"]


def test_poisoned_image_holds_nothing_up(tmp_path: Path) -> None:
    """A file that can never be sealed is left out; everything else is published."""
    remote = DirectoryStore(str(tmp_path / "remote"))

    async def test() -> None:
        async with machine(tmp_path / "store", remote) as here:
            fh = await here.open("bad", os.O_WRONLY | os.O_CREAT)
            await here.fs.files.write(fh, 0, b"x")
            image = here.fs.files.handle(fh).file.image.id
            here.store.sync.poisoned[image] = OSError("I/O error")
            await here.fs.release(fh)
            await here.write("good", b"g")
            await here.publish()

    run(test)
    assert restore(tmp_path / "remote", tmp_path / "out") == {"good": b"g"}
