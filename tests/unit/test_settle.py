"""When a cut is taken: at the very event at which everything new is whole, by time where only time can tell."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ckptfs.config import Settings
from ckptfs.encoding.canonical import object_id
from ckptfs.encoding.tree import Tree, encode_tree
from ckptfs.ids import ROOT_INODE, Inode
from ckptfs.local.catalog.cuts import Unneeded
from ckptfs.replica import sets
from tests.support.publishing import Machine, run

SETTINGS = Settings(settle_s=5.0, max_lag_s=120.0, log_after_s=60.0)


class Watched(Machine):
    """A machine without a remote; cuts are taken, and finished at once as if they had been published."""

    def __init__(self, path: Path, settings: Settings = SETTINGS) -> None:
        super().__init__(path, None, settings)
        self.taken: list[tuple[float, bool, set[str]]] = []
        self.settler._wake = self._cut
        self.seq = 0

    def _cut(self) -> None:
        cut = self.cuts.pending()
        if cut is None:
            return
        names = {self._path(directory, entry.name) for directory in self.cuts.directories(cut.id)
                 for entry in self.cuts.entries(cut.id, directory) if entry.entry and entry.ino}  # fmt: skip
        self.taken.append((trio.current_time(), cut.incomplete, names))
        body = encode_tree(Tree(self.store.names.inode(ROOT_INODE).file_id, ()))
        trees = {ino: (object_id(body), body) for ino in self.cuts.directories(cut.id)}
        self.seq += 1
        assert isinstance(self.cuts.finish(cut.id, self.seq, trees), Unneeded)

    def _path(self, directory: Inode, name: bytes) -> str:
        top = self.store.names.path(directory).decode().strip("/")
        return f"{top}/{name.decode()}" if top else name.decode()

    @property
    def times(self) -> list[float]:
        return [at for at, _, _ in self.taken]


def settling(path: Path, test: Callable[[Watched], Awaitable[None]], settings: Settings = SETTINGS) -> None:
    """Run *test* in virtual time, which starts at 0."""

    async def body() -> None:
        here = Watched(path, settings)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.settler.run)
                await trio.testing.wait_all_tasks_blocked()
                await test(here)
                nursery.cancel_scope.cancel()
        finally:
            here.close()

    run(body, clock=MockClock(autojump_threshold=0))


def test_unrecognised_settles_by_time(tmp_path: Path) -> None:
    """A directory of no known layout is cut `settle_s` after its last new name, not after each pause."""

    async def test(here: Watched) -> None:
        for i in range(4):
            await here.write(f"shard{i}", b"x")
            await trio.sleep(4)
        assert here.taken == []
        await trio.sleep(60)
        assert here.times == [12 + 5.0]
        assert here.taken[0][2] == {"shard0", "shard1", "shard2", "shard3"} and not here.taken[0][1]

    settling(tmp_path / "s", test)


def test_a_stall_of_our_own_is_not_quiet(tmp_path: Path) -> None:
    """When the loop was held up, so were the requests that would have told of more: they come first."""

    async def test(here: Watched) -> None:
        await here.write("shard0", b"x")
        await trio.sleep(1)
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(20)
        await trio.testing.wait_all_tasks_blocked()
        await here.write("shard1", b"x")
        assert here.taken == []
        await trio.sleep(60)
        assert here.times == [21 + 5.0]
        assert here.taken[0][2] == {"shard0", "shard1"}

    settling(tmp_path / "s", test)


def test_open_file_holds_back(tmp_path: Path) -> None:
    """Nothing is cut while a new file is being written, however long its pauses; then at its close."""

    async def test(here: Watched) -> None:
        fh = await here.open("model.pt", os.O_WRONLY | os.O_CREAT)
        for _ in range(10):
            await here.append(fh, b"x" * 100)
            await trio.sleep(30)
        assert here.taken == []
        await here.fs.release(fh)
        assert here.times == [300.0]

    settling(tmp_path / "s", test)


def test_trainer_checkpoint_is_cut_at_its_last_file(tmp_path: Path) -> None:
    """A Trainer checkpoint waits for trainer_state.json across pauses longer than settling, and not a moment more."""

    async def test(here: Watched) -> None:
        await here.mkdir("checkpoint-5")
        await trio.sleep(20)
        await here.write("checkpoint-5/model.safetensors", b"m")
        await trio.sleep(40)
        await here.write("checkpoint-5/optimizer.pt", b"o")
        await trio.sleep(40)
        assert here.taken == []
        await here.write("checkpoint-5/trainer_state.json", b"{}")
        assert here.times == [100.0] and not here.taken[0][1]

    settling(tmp_path / "s", test)


def test_a_file_renamed_into_place_is_no_removal(tmp_path: Path) -> None:
    """safetensors writes beside and renames: a checkpoint with such files is cut at its last one all the same.

    A name that was removed is another matter: what is being rotated away may look whole for a while.
    """

    async def test(here: Watched) -> None:
        await here.mkdir("checkpoint-5")
        await here.write("checkpoint-5/.tmpa1B2c3", b"m")
        await here.rename("checkpoint-5/.tmpa1B2c3", "checkpoint-5/model.safetensors")
        await here.write("checkpoint-5/trainer_state.json", b"{}")
        assert here.times == [0.0]
        await here.unlink("checkpoint-5/model.safetensors")
        await trio.sleep(60)
        assert here.times == [0.0, 5.0]

    settling(tmp_path / "s", test)


def test_temporary_directory_is_cut_at_its_rename(tmp_path: Path) -> None:
    """What lies below a temporary name is not whole before the rename, and is at the rename."""

    async def test(here: Watched) -> None:
        await here.mkdir("tmp-checkpoint-5")
        await here.mkdir("tmp-checkpoint-5/sub")
        await here.write("tmp-checkpoint-5/trainer_state.json", b"{}")
        await here.write("tmp-checkpoint-5/sub/weights", b"w")
        await trio.sleep(100)
        assert here.taken == []
        await here.rename("tmp-checkpoint-5", "checkpoint-5")
        await trio.sleep(0)
        assert here.times == [100.0]
        assert "checkpoint-5/sub/weights" in here.taken[0][2]

    settling(tmp_path / "s", test)


def test_dcp_is_cut_when_metadata_is_in_place(tmp_path: Path) -> None:
    """A torch.distributed.checkpoint directory is complete at the rename of .metadata."""

    async def test(here: Watched) -> None:
        await here.mkdir("dcp")
        await trio.sleep(1)
        for rank in range(3):
            await here.write(f"dcp/__{rank}_0.distcp", b"x")
        await trio.sleep(30)
        await here.write("dcp/.metadata.tmp", b"m")
        await trio.sleep(10)
        assert here.taken == []
        await here.rename("dcp/.metadata.tmp", "dcp/.metadata")
        assert here.times == [41.0]
        await here.unlink("dcp/.metadata")  # saved again into the same directory
        await here.write("dcp/__0_0.distcp", b"y")
        await trio.sleep(30)
        assert len(here.taken) == 1
        await here.write("dcp/.metadata.tmp", b"m")
        await here.rename("dcp/.metadata.tmp", "dcp/.metadata")
        assert here.times == [41.0, 71.0]

    settling(tmp_path / "s", test)


def test_deepspeed_waits_for_latest(tmp_path: Path) -> None:
    """A DeepSpeed step is complete when `latest`, a file beside it, names it."""

    async def test(here: Watched) -> None:
        await here.mkdir("out")
        await here.mkdir("out/global_step10")
        await here.write("out/global_step10/mp_rank_00_model_states.pt", b"x")
        await trio.sleep(50)
        assert here.taken == []
        await here.write("out/latest", b"global_step10")
        assert here.times == [50.0]

    settling(tmp_path / "s", test)


def test_incomplete_set_is_given_up(tmp_path: Path) -> None:
    """A set whose writer died is published, marked incomplete, after `max_lag_s`; what comes later goes on in order."""

    async def test(here: Watched) -> None:
        await here.mkdir("checkpoint-5")
        await here.write("checkpoint-5/model.safetensors", b"m")
        await trio.sleep(300)
        assert here.times == [120.0] and here.taken[0][1]
        assert here.settler.incomplete_sets
        await here.mkdir("checkpoint-6")
        await here.write("checkpoint-6/trainer_state.json", b"{}")
        assert here.times == [120.0, 300.0] and not here.taken[1][1]

    settling(tmp_path / "s", test)


def test_stalled_file_is_left_out(tmp_path: Path) -> None:
    """An open file that neither grows nor closes is left out after `max_lag_s`, and comes with its close."""

    async def test(here: Watched) -> None:
        fh = await here.open("stalled", os.O_WRONLY | os.O_CREAT)
        await here.fs.files.write(fh, 0, b"x")
        await here.write("other", b"o")
        await trio.sleep(200)
        assert len(here.taken) == 1 and 120 <= here.times[0] <= 125
        assert here.taken[0][1] and here.taken[0][2] == {"other"}
        await here.fs.release(fh)
        assert here.times[1:] == [200.0] and here.taken[1][2] == {"other", "stalled"} and not here.taken[1][1]

    settling(tmp_path / "s", test)


def test_unlinked_open_file_holds_nothing_back(tmp_path: Path) -> None:
    """A temporary file without a name does not matter, though it stays open."""

    async def test(here: Watched) -> None:
        await here.open("temporary", os.O_WRONLY | os.O_CREAT)
        await here.unlink("temporary")
        await here.write("file", b"x")
        await trio.sleep(20)
        assert here.times == [5.0] and here.taken[0][2] == {"file"}

    settling(tmp_path / "s", test)


def test_log_holds_nothing_back(tmp_path: Path) -> None:
    """A file that is open long, grows, and was sealed twice with its beginning unchanged counts as a log."""

    async def test(here: Watched) -> None:
        fh = await here.open("events", os.O_WRONLY | os.O_CREAT)
        ino = await here.walk("events")
        for second in range(0, 70, 10):
            await here.append(fh, b"line\n")
            await trio.sleep(10)
            if second in (20, 50):
                here.settler.sealed(ino, provisional=True, unchanged=second == 50)
        assert here.times and 60 <= here.times[0] <= 70 and not here.taken[0][1]
        count = len(here.taken)
        await here.mkdir("checkpoint-1")
        await here.write("checkpoint-1/trainer_state.json", b"{}")
        assert len(here.taken) == count + 1 and not here.taken[-1][1]

    settling(tmp_path / "s", test)


def test_tensorboard_holds_nothing_back(tmp_path: Path) -> None:
    """A TensorBoard file that is open from the start delays no checkpoint, not even the first."""

    async def test(here: Watched) -> None:
        await here.mkdir("checkpoint-1")
        await here.open("events.out.tfevents.1.host", os.O_WRONLY | os.O_CREAT)
        await trio.sleep(10)
        await here.write("checkpoint-1/trainer_state.json", b"{}")
        assert here.times[-1] == 10.0 and not here.taken[-1][1]
        assert "events.out.tfevents.1.host" not in here.taken[-1][2]

    settling(tmp_path / "s", test)


def test_file_with_changing_beginning_is_no_log(tmp_path: Path) -> None:
    """A file whose sealed beginning is rewritten holds back as long as it changes."""

    async def test(here: Watched) -> None:
        fh = await here.open("data.h5", os.O_WRONLY | os.O_CREAT)
        ino = await here.walk("data.h5")
        for _ in range(12):
            await here.append(fh, b"more")
            await trio.sleep(20)
            here.settler.sealed(ino, provisional=True, unchanged=False)
        assert here.taken == []

    settling(tmp_path / "s", test)


def test_rewriting_a_file_every_second_costs_few_cuts(tmp_path: Path) -> None:
    """A small file that is rewritten all the time is cut at most every `settle_s`, but it is cut."""

    async def test(here: Watched) -> None:
        await here.write("progress.json", b"0")
        await trio.sleep(10)
        first = len(here.taken)
        for i in range(30):
            await here.write("progress.json", b"%d" % i)
            await trio.sleep(1)
        assert 5 <= len(here.taken) - first <= 7

    settling(tmp_path / "s", test)


def test_endless_names_do_not_starve(tmp_path: Path) -> None:
    """A directory that gets a new name every second for ever is cut all the same, within a bounded time."""

    async def test(here: Watched) -> None:
        for i in range(700):
            await here.write(f"step{i}", b"x")
            await trio.sleep(1)
        assert here.taken and here.times[0] <= 601

    settling(tmp_path / "s", test)


def test_endless_set_is_cut_around(tmp_path: Path) -> None:
    """A set that goes on growing for very long is left out whole; what is complete beside it goes on."""

    async def test(here: Watched) -> None:
        await here.mkdir("checkpoint-1")
        await here.write("notes", b"n")
        for i in range(70):
            await here.write(f"checkpoint-1/shard{i}", b"x")
            await trio.sleep(10)
        assert len(here.taken) == 1 and here.taken[0][1] and here.taken[0][2] == {"notes"}
        await here.write("checkpoint-1/trainer_state.json", b"{}")
        assert len(here.taken) == 2 and not here.taken[1][1]
        assert "checkpoint-1/shard0" in here.taken[1][2]

    settling(tmp_path / "s", test)


def test_cut_now(tmp_path: Path) -> None:
    """Cutting at once takes incomplete sets, leaves unfinished files out, and does nothing when nothing changed."""

    async def test(here: Watched) -> None:
        assert not here.settler.cut_now()
        await here.mkdir("checkpoint-1")
        await here.write("checkpoint-1/model", b"x")
        fh = await here.open("open", os.O_WRONLY | os.O_CREAT)
        assert here.settler.cut_now()
        assert here.taken[0][1] and here.taken[0][2] == {"checkpoint-1", "checkpoint-1/model"}
        assert not here.settler.cut_now()
        await here.fs.release(fh)
        await trio.sleep(10)
        assert "open" in here.taken[-1][2] and not here.taken[-1][1]

    settling(tmp_path / "s", test)


def test_rotation_is_not_half_published(tmp_path: Path) -> None:
    """While an old checkpoint is deleted file by file nothing is cut; the cut comes at its rmdir."""

    async def test(here: Watched) -> None:
        await here.mkdir("checkpoint-1")
        for name in ("model", "trainer_state.json"):
            await here.write(f"checkpoint-1/{name}", b"x")
        assert len(here.taken) == 1
        await trio.sleep(30)
        await here.unlink("checkpoint-1/trainer_state.json")
        await trio.sleep(30)
        await here.unlink("checkpoint-1/model")
        await trio.sleep(30)
        assert len(here.taken) == 1
        await here.rmdir("checkpoint-1")
        assert here.times[1:] == [90.0] and here.taken[1][2] == set()

    settling(tmp_path / "s", test)


def test_restart_takes_up_what_was_changed(tmp_path: Path) -> None:
    """What an earlier process changed and did not cut is settled anew."""

    async def before(here: Watched) -> None:
        await here.write("a", b"x")
        assert here.taken == []

    async def after(here: Watched) -> None:
        await trio.sleep(20)
        assert here.times == [5.0] and here.taken[0][2] == {"a"}

    settling(tmp_path / "s", before)
    settling(tmp_path / "s", after)


def test_failing_cut_fails_nobody(tmp_path: Path) -> None:
    """When the cut itself fails the change that led to it is answered, and the cut comes later."""

    async def test(here: Watched) -> None:
        def broken(**_: object) -> None:
            raise OSError("disk full")

        here.cuts.take, whole = broken, here.cuts.take  # type: ignore[method-assign,assignment]
        await here.mkdir("checkpoint-1")
        await here.write("checkpoint-1/trainer_state.json", b"{}")
        here.cuts.take = whole  # type: ignore[method-assign]
        await trio.sleep(20)
        assert len(here.taken) == 1 and here.times[0] <= 5.0

    settling(tmp_path / "s", test)


def test_a_directory_that_cannot_be_judged_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever makes the look at one directory fail, it is published as one that is none, and so is the rest."""
    judge = sets.judge

    def strange(name: bytes, *others: Any) -> sets.Verdict:
        if name == b"strange":
            raise RecursionError("maximum recursion depth exceeded")
        return judge(name, *others)

    monkeypatch.setattr("ckptfs.replica.sets.judge", strange)

    async def test(here: Watched) -> None:
        await here.mkdir("strange")
        await here.write("strange/model.safetensors.index.json", b"{}")
        await here.mkdir("checkpoint-1")
        await here.write("checkpoint-1/trainer_state.json", b"{}")
        await trio.sleep(20)
        published = set[str]().union(*(names for _, _, names in here.taken))
        assert here.times[-1] <= 5.0 and "checkpoint-1/trainer_state.json" in published
        assert "strange/model.safetensors.index.json" in published

    with caplog.at_level(logging.ERROR):
        settling(tmp_path / "s", test)
    assert "strange" in caplog.text


def test_a_rapid_series_is_not_cut_for_each_checkpoint(tmp_path: Path) -> None:
    """A cut that was not begun is replaced at most so often that cutting takes a small part of the time."""

    async def test(here: Watched) -> None:
        taken: list[float] = []
        take = here.cuts.take

        def slow(**arguments: Any) -> Any:
            taken.append(trio.current_time())
            time.sleep(0.02)
            return take(**arguments)

        here.cuts.take = slow  # type: ignore[method-assign]
        here.settler._wake = lambda: None  # nothing is begun
        for step in range(4):
            await here.mkdir(f"checkpoint-{step}")
            await here.write(f"checkpoint-{step}/trainer_state.json", b"{}")
            await trio.sleep(0.01)
        assert taken == [0.0]
        await trio.sleep(60)
        assert len(taken) == 2 and taken[1] >= 0.2
        cut = here.cuts.pending()
        assert cut is not None and len(list(here.cuts.entries(cut.id, ROOT_INODE))) == 4

    settling(tmp_path / "s", test)
