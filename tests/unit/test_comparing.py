"""How checkpoints differ, in files as their own libraries write them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptfs.formats import dcpmetadata
from ckptfs.insight import comparing
from ckptfs.insight.comparing import Comparison, Difference, compare
from ckptfs.insight.inspecting import inspect

RANDOM = np.random.default_rng(5)
Arrays = dict[str, np.ndarray]


def state() -> Arrays:
    return {
        "emb": RANDOM.standard_normal((300, 40)).astype(np.float32),
        "head.w": RANDOM.standard_normal((64, 33)).astype(np.float32),
        "head.b": np.zeros(64, np.float32),
        "step": np.array([7]),
    }


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 4 KiB, so that tensors have several, and a last one that is shorter."""
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 4096)


def by_name(found: Comparison) -> dict[str | None, Difference]:
    return {each.name: each for each in found.differences}


def test_what_changed_and_by_how_much(tmp_path: Path) -> None:
    """Equal shares, norm ratios and states are what numpy says of the arrays; across formats."""
    before = state()
    after = {name: array.copy() for name, array in before.items()}
    after["head.w"][:32] += np.float32(0.01) * after["head.w"][:32]
    after["head.b"][3] = 1
    after["step"][0] = 8
    after["new"] = np.ones(5, np.float16)
    np.savez(tmp_path / "before.npz", **before)
    save_file(after, tmp_path / "after.safetensors")
    told: list[tuple[int, int]] = []
    paths = str(tmp_path / "before.npz"), str(tmp_path / "after.safetensors")
    found = by_name(compare(*paths, lambda *at: told.append(at)))
    assert {name: each.state for name, each in found.items()} == {
        "emb": "identical", "head.w": "changed", "head.b": "changed", "step": "changed", "new": "new",
    }  # fmt: skip
    assert found["head.w"].equal == np.mean(before["head.w"] == after["head.w"])
    moved = np.linalg.norm(after["head.w"] - before["head.w"]) / np.linalg.norm(before["head.w"])
    assert found["head.w"].moved == pytest.approx(moved, rel=1e-6)
    delta, encoded = found["head.w"].delta_bytes, found["head.w"].encoded_bytes
    assert delta is not None and encoded is not None and 0 < delta < encoded <= found["head.w"].size_bytes
    assert found["head.b"].equal == 63 / 64
    assert found["head.b"].moved is None, "nothing was there that could have moved"
    assert found["step"].moved == pytest.approx(1 / 7)
    assert told[-1][0] == told[-1][1] == sum(array.nbytes for array in before.values())


def test_directories(tmp_path: Path) -> None:
    """Other shards, a file without tensors that changed, one that is gone, a tensor of another shape."""
    before = state()
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "sub").mkdir(parents=True)
    save_file({"emb": before["emb"], "head.w": before["head.w"]}, tmp_path / "a" / "model-00001-of-00001.safetensors")
    save_file({"emb": before["emb"]}, tmp_path / "b" / "model-00001-of-00002.safetensors")
    save_file({"head.w": before["head.w"][:10]}, tmp_path / "b" / "model-00002-of-00002.safetensors")
    (tmp_path / "a" / "config.json").write_text("{}")
    (tmp_path / "b" / "config.json").write_text("[]")
    (tmp_path / "a" / "old.txt").write_text("x")
    (tmp_path / "b" / "sub" / "deep.txt").write_text("")
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    rows = [(each.state, each.file, each.name) for each in found.differences]
    assert rows == [
        ("changed", b"config.json", None),
        ("identical", b"model-00001-of-00002.safetensors", "emb"),
        ("changed", b"model-00002-of-00002.safetensors", "head.w"),
        ("new", b"sub/deep.txt", None),
        ("gone", b"old.txt", None),
    ]
    config, head = found.differences[0], found.differences[2]
    assert config.equal == 0 and config.moved is None
    assert head.was == ("float32", (64, 33)) and head.shape == (10, 33) and head.equal is None
    summary = found.document()["summary"]
    assert summary["identical"] == {"tensors": 1, "bytes": before["emb"].nbytes}
    assert summary["gone"] == {"tensors": 1, "bytes": 1}


def test_a_cast_is_compared_by_value(tmp_path: Path) -> None:
    """float32 to float16: what was exact is equal, and the rest moved by what rounding took."""
    exact = np.arange(2000, dtype=np.float32)
    rounded = RANDOM.standard_normal(3000).astype(np.float32)
    save_file({"exact": exact, "rounded": rounded}, tmp_path / "a.safetensors")
    save_file({"exact": exact.astype(np.float16), "rounded": rounded.astype(np.float16)}, tmp_path / "b.safetensors")
    found = by_name(compare(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")))
    assert (found["exact"].state, found["exact"].equal, found["exact"].moved) == ("changed", 1.0, 0.0)
    assert found["exact"].was == ("float32", (2000,))
    moved = found["rounded"].moved
    assert moved is not None and 1e-5 < moved < 1e-3
    assert found["rounded"].delta_bytes is None


def test_what_is_no_number(tmp_path: Path) -> None:
    """NaN and infinity count as equal or not by their bits, and move nothing."""
    before = np.array([np.nan, np.inf, 1.0, 2.0], np.float32)
    after = np.array([np.nan, -np.inf, 1.0, 4.0], np.float32)
    np.save(tmp_path / "a.npy", before)
    np.save(tmp_path / "b.npy", after)
    (found,) = compare(str(tmp_path / "a.npy"), str(tmp_path / "b.npy")).differences
    assert found.equal == 0.5
    assert found.moved == pytest.approx(2 / 5**0.5)
    (same,) = compare(str(tmp_path / "a.npy"), str(tmp_path / "a.npy")).differences
    assert same.state == "identical"


def test_empty_things(tmp_path: Path) -> None:
    """Nothing differs from nothing; a path that is not there is an error of the system's."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert compare(str(tmp_path / "a"), str(tmp_path / "b")).differences == ()
    np.save(tmp_path / "a" / "x.npy", np.empty((0, 3)))
    (tmp_path / "b" / "x.npy").symlink_to(tmp_path / "a" / "x.npy")
    (found,) = compare(str(tmp_path / "a"), str(tmp_path / "b")).differences
    assert (found.state, found.size_bytes) == ("identical", 0)
    with pytest.raises(FileNotFoundError):
        compare(str(tmp_path / "a"), str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "a" / "pipe")
    assert len(compare(str(tmp_path / "a"), str(tmp_path / "b")).differences) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_tensors_have_their_names(tmp_path: Path) -> None:
    """Those of the state dict, so that another format of the same matches; hostile metadata costs the names alone."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    before = {name: torch.from_numpy(array) for name, array in state().items()}
    after = {**before, "head": {"w": before["head.w"] * 1.5}, "epoch": torch.tensor(3)}
    del after["head.w"]
    dcp.save({"model": before}, checkpoint_id=tmp_path / "before")
    dcp.save({"model": after, "lr": 0.5}, checkpoint_id=tmp_path / "after")
    found = by_name(compare(str(tmp_path / "before"), str(tmp_path / "after")))
    tensors = {name: each.state for name, each in found.items() if name is not None and name.startswith("model.")}
    assert tensors == {
        "model.emb": "identical", "model.head.w": "changed", "model.head.b": "identical", "model.step": "identical",
        "model.epoch": "new",
    }  # fmt: skip
    assert found["model.head.w"].moved == pytest.approx(0.5)
    seen = [tensor.name for tensor in inspect(str(tmp_path / "after" / "__0_0.distcp")).tensors]
    assert sorted(seen) == sorted(tensors)
    save_file({name: tensor.numpy() for name, tensor in before.items()}, tmp_path / "model.safetensors")
    across = compare(str(tmp_path / "before"), str(tmp_path / "model.safetensors"))
    assert {each.state for each in across.differences if each.name is not None} == {"identical"}

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    for damaged in (pickle.dumps(Hostile()), b"", b"nonsense", (tmp_path / "after" / ".metadata").read_bytes()[:-50]):
        (tmp_path / "after" / ".metadata").write_bytes(damaged)
        compare(str(tmp_path / "before"), str(tmp_path / "after"))
    assert not (tmp_path / "executed").exists()


def test_shards_of_a_dcp_tensor() -> None:
    """Each is named by where it begins."""
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    torch = pytest.importorskip("torch")
    places = {
        metadata.MetadataIndex("w", torch.Size([512 * rank, 0])): filesystem._StorageInfo(f"__{rank}_0.distcp", 10, 90)
        for rank in (0, 1)
    }
    places[metadata.MetadataIndex("b", torch.Size([0]))] = filesystem._StorageInfo("__1_0.distcp", 100, 20)
    document = pickle.dumps(metadata.Metadata({}, None, places))
    assert dcpmetadata.stored(document) == [
        ("__0_0.distcp", 10, 100, "w[0,0]"), ("__1_0.distcp", 10, 100, "w[512,0]"), ("__1_0.distcp", 100, 120, "b"),
    ]  # fmt: skip
