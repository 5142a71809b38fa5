"""`ckptfs diff` on what frameworks really write: one state in every format is one state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptfs.insight.comparing import CHANGED, IDENTICAL, compare

torch = pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")
safetensors = pytest.importorskip("safetensors.torch")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "layers.0.weight": torch.randn(300, 200),
        "layers.0.bias": torch.randn(300),
        "emb.weight": torch.randn(100, 64).to(torch.float16),
    }


def save_hdf5(tensors: dict[str, Any], path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, tensor in tensors.items():
            file[name.replace(".", "/")] = tensor.numpy()


def save_legacy(tensors: dict[str, Any], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, save_legacy, safetensors.save_file, save_hdf5])
def test_formats_do_not_matter(tmp_path: Path, save: Any) -> None:
    """The same tensors are identical, and one that was trained on is the only one that changed."""
    before, after = state(), state()
    after["layers.0.weight"] *= 1.001
    torch.save(before, tmp_path / "before.pt")
    save(before, tmp_path / "same")
    save(after, tmp_path / "after")
    same = compare(str(tmp_path / "before.pt"), str(tmp_path / "same"))
    assert {each.name: each.state for each in same.differences} == dict.fromkeys(before, IDENTICAL)
    found = {each.name: each for each in compare(str(tmp_path / "before.pt"), str(tmp_path / "after")).differences}
    assert [name for name, each in found.items() if each.state == CHANGED] == ["layers.0.weight"]
    assert found["layers.0.weight"].moved == pytest.approx(0.001, rel=1e-3)


def test_wrappers_do_not_matter(tmp_path: Path) -> None:
    """Names behind what compiling and data parallelism put in front of them."""
    torch.save(state(), tmp_path / "plain.pt")
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in state().items()}
    torch.save({"model": wrapped, "epoch": 3}, tmp_path / "wrapped.pt")
    found = compare(str(tmp_path / "plain.pt"), str(tmp_path / "wrapped.pt"))
    assert found.prefix == "model._orig_mod.module."
    assert {each.state for each in found.differences} == {IDENTICAL}
