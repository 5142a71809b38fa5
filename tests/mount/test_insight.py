"""`ckptfs diff`, `inspect` and `estimate`, in mounts and outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptfs
from tests.support.mounts import Site, end

SMALL = {"piece_bytes": 16384, "small_bytes": 1024, "cdc_bytes": 2048, "pack_bytes": 1 << 20}
pytestmark = pytest.mark.timeout(120)


def save(path: Path, step: int, scale: int = 1) -> None:
    """Weights of which one tensor never changes, and one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frozen = np.random.default_rng(0).standard_normal((200 * scale, 64)).astype(np.float32)
    trained = np.random.default_rng(1).standard_normal((100 * scale, 64)).astype(np.float32)
    trained *= np.float32(1 + step * 1e-4)
    save_file({"frozen": frozen, "trained": trained, "bias": np.zeros(3, np.float32)}, path)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, tuning=SMALL) as made:
        yield made


def asked(site: Site, *arguments: str | Path) -> dict[str, Any]:
    done = site.run(*map(str, arguments), "--json")
    assert done.status == 0, done.said
    document: dict[str, Any] = json.loads(done.out)
    return document


def test_inspect_a_sealed_file_and_an_ordinary_one(site: Site, tmp_path: Path) -> None:
    """Tensors and chunks with their places; the same file elsewhere says how it would be cut."""
    site.mount("--remote", (tmp_path / "remote").as_uri())
    inside, outside = site.mountpoint / "checkpoint-1" / "model.safetensors", tmp_path / "model.safetensors"
    save(inside, 1)
    save(outside, 1)
    assert ckptfs.wait(site.mountpoint, "replicated", 60)
    sealed, plain = asked(site, "inspect", inside), asked(site, "inspect", outside)
    assert sealed["is_sealed"] and not plain["is_sealed"]
    names = {each["name"]: each for each in sealed["tensors"]}
    assert names["frozen"]["shape"] == [200, 64] and names["frozen"]["dtype"] == "float32"
    assert names["frozen"]["chunks"] == 7, "its edges are short"
    assert names["frozen"]["where"] == sealed["where"] == "both"
    assert 0 < names["frozen"]["encoded_bytes"] < names["frozen"]["size_bytes"] == 200 * 64 * 4
    assert sealed["encoded_bytes"] == sum(each["encoded_bytes"] for each in sealed["chunks"])
    assert sum(each["size_bytes"] for each in sealed["chunks"]) == os.path.getsize(inside) == sealed["size_bytes"]
    assert {each["codec"] for each in sealed["chunks"] if each["dtype"] == "float32"} == {"planes4"}
    assert [each["name"] for each in plain["tensors"]] == [each["name"] for each in sealed["tensors"]]
    assert len(plain["chunks"]) == 1, "outside, the default sizes"
    text = site.run("inspect", "--chunks", str(inside)).out
    count = len(sealed["chunks"])
    assert text.startswith(f"{inside}: {sealed['size_bytes'] / 1024:.1f} KiB; 3 tensors, {count} chunks")
    assert "where: both; encoded" in text and sealed["chunks"][0]["digest"][:16] in text
    assert "Not sealed in a mount" in site.run("inspect", "--chunks", str(outside)).out


def test_inspect_what_only_the_remote_has(site: Site, tmp_path: Path) -> None:
    """Another machine that never read the file tells the same, without fetching its bytes."""
    url = (tmp_path / "remote").as_uri()
    site.mount("--remote", url)
    save(site.mountpoint / "model.safetensors", 1)
    assert ckptfs.wait(site.mountpoint, "replicated", 60)
    here = asked(site, "inspect", site.mountpoint / "model.safetensors")
    site.umount()
    with Site(tmp_path, name="far", tuning=SMALL) as far:
        far.mount("--remote", url)
        there = asked(far, "inspect", far.mountpoint / "model.safetensors")
        assert there["where"] == "remote" and {each["where"] for each in there["chunks"]} == {"remote"}
        assert [each["digest"] for each in there["chunks"]] == [each["digest"] for each in here["chunks"]]
        assert there["encoded_bytes"] == here["encoded_bytes"]
        far.umount()


def test_diff_in_a_mount_and_with_what_is_outside(site: Site, tmp_path: Path) -> None:
    """The same answer whether a side was sealed in the mount or lies elsewhere, in another format."""
    site.mount()
    first, second = site.mountpoint / "checkpoint-1", site.mountpoint / "checkpoint-2"
    save(first / "model.safetensors", 1)
    save(second / "model.safetensors", 2)
    assert ckptfs.wait(site.mountpoint, "sealed", 60)
    inside = asked(site, "diff", first, second)
    states = {each["name"]: each["state"] for each in inside["tensors"]}
    assert states == {"frozen": "identical", "trained": "changed", "bias": "identical"}
    changed = next(each for each in inside["tensors"] if each["state"] == "changed")
    assert changed["moved"] == pytest.approx(1e-4, rel=0.01)
    assert changed["equal"] < 0.5 and changed["delta_bytes"] < changed["encoded_bytes"]
    from safetensors.numpy import load_file

    np.savez(tmp_path / "model.npz", **{f"module.{name}": array for name, array in
                                        load_file(second / "model.safetensors").items()})  # fmt: skip
    outside = asked(site, "diff", first, tmp_path / "model.npz")
    assert outside["prefix"] == "module."
    assert outside["summary"] == inside["summary"]
    text = site.run("diff", str(first), str(second)).out.splitlines()
    assert [line.split()[0] for line in text[:2]] == ["tensor", "trained"]
    assert text[-1].startswith("2 identical (50.0 KiB), 1 changed (25.0 KiB), what changed takes about")
    assert "frozen" in site.run("diff", "--all", str(first), str(second)).out


def test_what_is_sealed_alike_is_not_read(site: Site, tmp_path: Path) -> None:
    """Two files of the same bytes that only the remote has are the same without fetching anything."""
    url = (tmp_path / "remote").as_uri()
    site.mount("--remote", url)
    for step in ("1", "2"):
        (site.mountpoint / step).write_bytes(np.random.default_rng(0).bytes(50_000))
    assert ckptfs.wait(site.mountpoint, "replicated", 60)
    site.umount()
    with Site(tmp_path, name="far", tuning=SMALL) as far:
        far.mount("--remote", url)
        assert os.listdir(far.mountpoint)
        asked(far, "inspect", far.mountpoint / "1")
        asked(far, "inspect", far.mountpoint / "2")
        (tmp_path / "remote" / "packs").rename(tmp_path / "hidden")
        document = asked(far, "diff", far.mountpoint / "1", far.mountpoint / "2")
        assert [each["state"] for each in document["tensors"]] == ["identical"]
        end(far.pid())


def test_estimate_and_a_mount_agree(tmp_path: Path) -> None:
    """What `estimate` says of an ordinary directory is what `du` says when it was saved in a mount."""
    with Site(tmp_path) as site:
        check_estimate(site, tmp_path)
        site.umount()


def check_estimate(site: Site, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    site.mount("--remote", (tmp_path / "remote").as_uri())
    for step in (1, 2, 3):
        save(plain / f"checkpoint-{step}" / "model.safetensors", step, scale=40)
    found = asked(site, "estimate", plain)
    for step in (1, 2, 3):
        save(site.mountpoint / f"checkpoint-{step}" / "model.safetensors", step, scale=40)
        assert ckptfs.wait(site.mountpoint, "replicated", 60)
    (estimated,), (real,) = found["series"], asked(site, "du", site.mountpoint)["series"]
    assert estimated["logical_bytes"] == real["logical_bytes"]
    assert estimated["states"] == len(real["members"]) == 3
    assert estimated["deduplicated_bytes"] == pytest.approx(real["unique_bytes"] + real["shared_bytes"], rel=0.02)
    assert estimated["delta_bytes"] == pytest.approx(real["encoded_bytes"], rel=0.1)
    text = site.run("estimate", str(plain)).out
    assert text.splitlines()[1].startswith("checkpoint-*")
    assert "Estimated from 10.0% of the tensors" in site.run("estimate", str(plain), "--sample", "10%").out


def test_mistakes_are_said_in_one_line(site: Site, tmp_path: Path) -> None:
    """Paths that are not there, or are the wrong thing; nothing has a traceback."""
    (tmp_path / "empty").mkdir()
    file = tmp_path / "file"
    file.write_text("x")
    for arguments, said in (
        (("diff", tmp_path / "empty", tmp_path / "gone"), "No such file or directory"),
        (("inspect", tmp_path / "gone"), "No such file or directory"),
        (("inspect", tmp_path / "empty"), "is a directory"),
        (("estimate", file), "is no directory"),
        (("estimate", tmp_path / "gone"), "no such directory"),
    ):
        done = site.run(*map(str, arguments))
        assert done.status == 1 and done.err.count("\n") == 1 and said in done.err, done.said
    assert site.run("estimate", str(file), "--sample", "2").status == 2
    empty = site.run("diff", str(tmp_path / "empty"), str(tmp_path / "empty"))
    assert (empty.status, empty.out) == (0, f"{tmp_path}/empty and {tmp_path}/empty: nothing in them\n")
    assert site.run("estimate", str(tmp_path / "empty")).out == f"{tmp_path}/empty: no files in it\n"
