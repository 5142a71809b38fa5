"""`ckptfs du`: the bytes of files, directories and series, on real mounts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from tests.support.machines import Machines
from tests.support.mounts import TINY, Site, until
from tests.support.proxy import Faults

KIB = 1024
pytestmark = pytest.mark.timeout(120)


def save(directory: Path, step: int) -> None:
    """A backbone of 64 KiB that never changes, and 32 KiB that always do, incompressible."""
    target = directory / f"checkpoint-{step}"
    target.mkdir()
    frozen = np.random.default_rng(0).integers(0, 1 << 62, 8 * KIB)
    trained = np.random.default_rng(step).integers(0, 1 << 62, 4 * KIB)
    np.savez(target / "model.npz", frozen=frozen, trained=trained)


def du(site: Site, path: Path | str, *options: str) -> dict[str, Any]:
    done = site.run("du", str(path), "--json", *options)
    assert done.status == 0, done.said
    document: dict[str, Any] = json.loads(done.out)
    return document


def fill(site: Site) -> None:
    run = site.mountpoint / "run"
    run.mkdir()
    for step in (9, 10, 100):
        save(run, step)
    (run / "notes.txt").write_text("hello")
    os.link(run / "notes.txt", run / "same.txt")


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Site]:
    """Three checkpoints, mounted with a remote in a directory, all replicated."""
    with Site(tmp_path, tuning=TINY) as site:
        site.mount("--remote", (tmp_path / "remote").as_uri())
        fill(site)
        assert ckptfs.wait(site.mountpoint, "replicated", 60)
        yield site


def by_path(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in document["entries"]}


def test_a_frozen_backbone_is_counted_once(filled: Site) -> None:
    """Rows add up to the last line; what is shared counts once in it; the series tells what each state added."""
    document = du(filled, filled.mountpoint / "run")
    rows = by_path(document)
    assert list(rows) == ["checkpoint-10", "checkpoint-100", "checkpoint-9", "notes.txt", "same.txt"]
    one = os.path.getsize(filled.mountpoint / "run/checkpoint-9/model.npz")
    for step in (9, 10, 100):
        row = rows[f"checkpoint-{step}"]
        assert row["logical_bytes"] == one
        assert row["unique_bytes"] + row["shared_bytes"] == one
        assert 64 * KIB <= row["shared_bytes"] < 66 * KIB
        assert row["local_bytes"] == row["remote_bytes"] == one
        assert 0 < row["encoded_bytes"] <= one
    total = document["total"]
    for column in ("files", "logical_bytes", "unique_bytes"):
        assert total[column] == sum(row[column] for row in rows.values())
    assert total["logical_bytes"] == 3 * one + 5  # a file with two names counts with the first
    assert 64 * KIB <= total["shared_bytes"] < 66 * KIB
    assert document["exclusive_bytes"] == total["unique_bytes"] + total["shared_bytes"]
    (series,) = document["series"]
    assert series["pattern"] == "checkpoint-*"
    assert [member["numbers"] for member in series["members"]] == [[9], [10], [100]]
    first, *later = [member["added_bytes"] for member in series["members"]]
    assert first == one
    assert all(32 * KIB <= each < 34 * KIB for each in later)
    assert sum(member["added_encoded_bytes"] for member in series["members"]) == series["encoded_bytes"]


def test_parts_of_a_mount(filled: Site) -> None:
    """A directory in it shares with the rest; a file is a line of its own; --files lists each."""
    inside = du(filled, filled.mountpoint / "run" / "checkpoint-9")
    (row,) = inside["entries"]
    assert row["path"] == "model.npz"
    assert inside["total"]["unique_bytes"] == inside["exclusive_bytes"] < 34 * KIB
    assert inside["series"] == []
    of_file = du(filled, filled.mountpoint / "run" / "checkpoint-9" / "model.npz")
    assert of_file["entries"] == [row]
    each = du(filled, filled.mountpoint, "--files")
    assert [row["path"] for row in each["entries"]] == [
        "run/checkpoint-10/model.npz", "run/checkpoint-100/model.npz", "run/checkpoint-9/model.npz", "run/notes.txt",
        "run/same.txt",
    ]  # fmt: skip


def test_people_get_a_table_and_a_picture(filled: Site, tmp_path: Path) -> None:
    """Whole paths in a pipe, too; the picture in the format that its name says."""
    done = filled.run("du", str(filled.mountpoint / "run"), "--plot", str(tmp_path / "growth.svg"))
    assert done.status == 0, done.said
    lines = done.out.splitlines()
    assert lines[0].split() == ["path", "files", "logical", "unique", "shared", "local", "remote", "encoded"]
    assert any(line.startswith("checkpoint-100/ ") for line in lines)
    assert any(line.startswith("together ") for line in lines)
    assert "checkpoint-*: 3 states, " in done.out
    assert "<svg" in (tmp_path / "growth.svg").read_text()
    done = filled.run("du", str(filled.mountpoint / "run"), "--plot", str(tmp_path / "growth.png"))
    assert done.status == 0, done.said
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_said(filled: Site, tmp_path: Path) -> None:
    """One line and status 1; a wrong option is status 2."""
    missing = filled.run("du", str(filled.mountpoint / "gone"))
    assert (missing.status, missing.err) == (1, f"Error: {filled.mountpoint}/gone: no such file or directory\n")
    elsewhere = filled.run("du", str(tmp_path))
    assert elsewhere.status == 1 and "neither in a ckptfs mount" in elsewhere.err
    no_series = filled.run("du", str(filled.mountpoint / "run/checkpoint-9"), "--plot", str(tmp_path / "x.png"))
    assert no_series.status == 1 and "no series in it" in no_series.err
    assert filled.run("du", str(filled.mountpoint), "--plot", "x.gif").status == 2
    (filled.mountpoint / "empty").mkdir()
    empty = filled.run("du", str(filled.mountpoint / "empty"))
    assert (empty.status, empty.out) == (0, f"{filled.mountpoint}/empty: nothing in it\n")


def test_what_is_being_written_counts_as_it_is(tmp_path: Path) -> None:
    """An open file has its size so far, all of it unique; nothing waits for it."""
    with Site(tmp_path, tuning=TINY) as site:
        site.mount()
        with open(site.mountpoint / "log", "wb", buffering=0) as log:
            log.write(bytes(5000))
            document = du(site, site.mountpoint)
            (row,) = document["entries"]
            assert (row["logical_bytes"], row["unique_bytes"], row["local_bytes"]) == (5000, 5000, 5000)
            assert document["unsealed_files"] == 1
        site.umount()


def test_a_store_that_is_not_mounted(filled: Site) -> None:
    """The same numbers, by its mountpoint or the store itself."""
    mounted = du(filled, filled.mountpoint)
    filled.umount()
    assert du(filled, filled.store) == {**mounted, "path": str(filled.store)}
    assert du(filled, filled.mountpoint) == mounted


def test_another_machine_sees_what_it_has_not_read(machines: Machines) -> None:
    """Directories and chunk lists that only the remote knows are looked up first; nothing of the bytes is here."""
    near, far = machines.site("near"), machines.site("far")
    machines.mount(near)
    fill(near)
    assert ckptfs.wait(near.mountpoint, "replicated", 60)
    there = machines.mount(far)
    until(lambda: (there / "run").exists(), "the other machine to see it")
    ours, theirs = du(near, near.mountpoint), du(far, far.mountpoint)
    for row in (*ours["entries"], ours["total"], *ours["series"]):
        assert row["local_bytes"] > 0
        row["local_bytes"] = 0
    assert theirs == {**ours, "path": str(far.mountpoint)}


def test_a_remote_that_is_down_is_told(machines: Machines) -> None:
    """What is known is counted, and what could not be looked up is said; status 0, since nothing is unsafe by it."""
    near, way = machines.site("near"), machines.proxy()
    far = machines.site("far", by=way, settings={"read_timeout_s": 1.0})
    machines.mount(near)
    fill(near)
    assert ckptfs.wait(near.mountpoint, "replicated", 60)
    there = machines.mount(far)
    until(lambda: (there / "run").exists(), "the other machine to see it")
    assert len(os.listdir(there / "run")) == 5
    way.faults = Faults("refuse")
    done = far.run("du", str(far.mountpoint), "--json")
    assert done.status == 0 and done.err.startswith("warning: not all can be looked up on the remote: "), done.said
    document = json.loads(done.out)
    assert document["unseen_directories"] == 3 and document["total"]["logical_bytes"] == 5
    text = far.run("du", str(far.mountpoint))
    assert "Not counted: 3 directories that were not looked into on this machine." in text.err
    way.heal()
    assert du(far, far.mountpoint)["total"]["logical_bytes"] > 3 * 96 * KIB
