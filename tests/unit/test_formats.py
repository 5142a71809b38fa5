"""Recognising real files of each format, as their own libraries write them."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfs.config import Tuning
from ckptfs.formats.base import UNKNOWN, BytesSource, FileSource, Tensor, tidy
from ckptfs.formats.cutting import cut
from ckptfs.formats.recognise import recognise
from ckptfs.ids import digest


def found(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, the bytes in the file); checks what `recognise` promises of the order."""
    tensors = recognise(BytesSource(data))
    assert tidy(tensors, len(data)) == tensors
    return {tensor.name: (tensor.dtype, tensor.shape, data[tensor.start : tensor.end]) for tensor in tensors}


def saved(save: Any, *args: Any, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


def test_npy_of_every_type() -> None:
    """Each element type numpy saves must be found with its bytes, also an empty array, a scalar and another order."""
    for dtype in ("f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"):
        array = np.arange(30).reshape(5, 6).astype(dtype)
        assert found(saved(np.save, array)) == {"": (array.dtype.name, (5, 6), array.tobytes())}
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert found(saved(np.save, fortran)) == {"": ("float64", (2, 3), fortran.tobytes("F"))}
    assert found(saved(np.save, np.float32(3)))[""][:2] == ("float32", ())
    assert found(saved(np.save, np.empty((0, 4)))) == {"": ("float64", (0, 4), b"")}


def test_npy_of_unnamed_types() -> None:
    """Structures, big-endian numbers, dates and strings must be unknown bytes; a bfloat16 two bytes each."""
    for array in (
        np.zeros(7, np.dtype([("a", "<f4"), ("b", "<i8", (2,))])),
        np.arange(7, dtype=">f4"),
        np.array(["x", "long"]),
        np.array([b"x", b"long"]),
        np.zeros(4, "M8[ns]"),
    ):
        assert found(saved(np.save, array)) == {"": (UNKNOWN, array.shape, array.tobytes())}
    assert found(saved(np.save, np.zeros(5, "V2"))) == {"": ("void16", (5,), bytes(10))}


def test_npy_with_objects_is_left_alone() -> None:
    """An array of objects is a pickle: nothing in it may be taken for a tensor."""
    assert found(saved(np.save, np.array([{}, 1], object))) == {}
    assert found(saved(np.save, np.zeros(2, [("a", object)]))) == {}


def test_several_arrays_in_one_file() -> None:
    """Arrays saved one behind the other must all be found, and what follows them must not matter."""
    first, second = np.arange(5.0), np.arange(7, dtype="u2")
    data = saved(np.save, first) + saved(np.save, second) + b"something else"
    assert found(data) == {"": ("float64", (5,), first.tobytes()), "1": ("uint16", (7,), second.tobytes())}


def test_npz() -> None:
    """Every array of np.savez must be found; members that are compressed, or no arrays, must not."""
    arrays = {"w": np.arange(100.0), "sub/b": np.arange(5, dtype="i4"), "o": np.array([None], object)}
    expected = {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in arrays.items() if name != "o"}
    assert found(saved(np.savez, **arrays)) == expected
    assert found(saved(np.savez_compressed, **arrays)) == {}
    commented = saved(np.savez, **arrays)
    commented = commented[:-2] + (9).to_bytes(2, "little") + b"a comment"
    assert found(commented) == expected


def test_safetensors() -> None:
    """Every tensor of a safetensors file must be found with its own bytes."""
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(10, dtype="f4").reshape(2, 5), "b.c": np.arange(3), "e": np.empty((0,), "f2")}
    data = safetensors.save(arrays, metadata={"format": "np", "note": 'braces {[" in a string'})
    assert found(data) == {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in arrays.items()}


def test_safetensors_of_torch_types() -> None:
    """bfloat16 and the small floats have no numpy type, and must be found all the same."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        name: torch.arange(6).to(getattr(torch, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "bool")
    }
    result = found(safetensors.save(tensors))
    assert {name: value[:2] for name, value in result.items()} == {name: (name, (6,)) for name in tensors}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_save(protocol: int) -> None:
    """A state dict and an optimizer's must give every storage with its name, dtype, shape and bytes."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0](torch.ones(2, 5)).sum().backward()
    optimizer.step()
    base = torch.arange(12.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": torch.nn.Parameter(torch.ones(3)),
        "views": [base[2:6], base, base.reshape(3, 4).t()],
        "fp8": torch.ones(5).to(torch.float8_e5m2),
        "u16": torch.ones(5).to(torch.uint16),
        "complex": torch.ones(5, dtype=torch.complex64),
        "step": 12,
        "lr": 1e-3,
    }
    data = saved(lambda file: torch.save(state, file, pickle_protocol=protocol))
    result = found(data)
    weight = model[0].weight.detach().numpy()
    assert result["model.0.weight"] == ("float32", (7, 5), weight.tobytes())
    assert result["model.1.bias"][:2] == ("bfloat16", (3,))
    assert result["optimizer.state.0.exp_avg"][:2] == ("float32", (7, 5))
    assert result["optimizer.state.1.exp_avg_sq"][:2] == ("float32", (7,))
    assert result["ema"] == ("float32", (3,), np.ones(3, "f4").tobytes())
    assert result["views.0"] == ("float32", (12,), base.numpy().tobytes())
    assert result["fp8"][:2] == ("float8_e5m2", (5,))
    assert result["u16"] == ("uint16", (5,), np.ones(5, "u2").tobytes())
    assert result["complex"][:2] == ("complex64", (5,))
    assert len(result) == 4 + 2 * 3 + 5


def test_torch_save_of_other_shapes() -> None:
    """A lone tensor, a whole module and a module's attributes must be found without running the pickle."""
    torch = pytest.importorskip("torch")
    assert found(saved(lambda file: torch.save(torch.arange(9.0), file)))["0"][:2] == ("float32", (9,))
    module = found(saved(lambda file: torch.save(torch.nn.Linear(4, 2), file)))
    assert sorted(value[:2] for value in module.values()) == [("float32", (2,)), ("float32", (2, 4))]
    assert any("weight" in name for name in module)


def test_torch_archives_in_a_row() -> None:
    """Archives one behind the other, as torch.distributed.checkpoint writes them, must all be found."""
    torch = pytest.importorskip("torch")
    tensors = [torch.arange(5.0), torch.ones(3, 2).bfloat16(), torch.zeros(1000)]
    parts = [saved(lambda file, tensor=tensor: torch.save(tensor, file)) for tensor in tensors]
    result = found(b"".join(parts))
    assert [value[:2] for value in result.values()] == [
        ("float32", (5,)),
        ("bfloat16", (3, 2)),
        ("float32", (1000,)),
    ]
    assert list(result) == ["0/0", "1/0", "2/0"]
    assert [value[:2] for value in found(b"PK\x03\x04 other" + b"".join(parts)).values()][1:] == [
        ("bfloat16", (3, 2)),
        ("float32", (1000,)),
    ]


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """The shards that torch.distributed.checkpoint itself writes must be read."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {"w": torch.arange(3000.0).reshape(30, 100), "b": torch.ones(50).bfloat16(), "n": {"step": 3}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about running without a process group
        dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    kinds = [
        (tensor.dtype, tensor.shape)
        for path in (tmp_path / "d").glob("*.distcp")
        for tensor in recognise(BytesSource(path.read_bytes()))
    ]
    assert ("float32", (30, 100)) in kinds
    assert ("bfloat16", (50,)) in kinds


def test_the_same_tensors_in_three_formats() -> None:
    """At least 99 % of the bytes of every format must be chunks that each other format has too."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(5)
    shapes = [(1024, 300), (333, 777), (70_000,), (3000, 300), (12,), (64, 257), (1 << 19,)]
    arrays = {f"layer.{at}.weight": rng.standard_normal(shape).astype("f4") for at, shape in enumerate(shapes)}
    files = [
        safetensors.save(arrays),
        saved(lambda file: torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, file)),
        saved(np.savez, **arrays),
    ]
    chunks = []
    for data in files:
        source = BytesSource(data)
        pieces = cut(len(data), recognise(source), [(0, len(data))], Tuning(), source.read)
        chunks.append({digest(data[piece.start : piece.end]): piece.end - piece.start for piece in pieces})
    for one in chunks:
        for other in chunks:
            shared = sum(length for name, length in one.items() if name in other)
            assert shared >= 0.99 * sum(one.values())


def test_unknown_and_empty_files() -> None:
    """Other files have no tensors."""
    for data in (b"", b"\0", b"PK\x03\x04", b"\x93NUMPY", b"some text\n" * 100, b"\x89HDF\r\n\x1a\n" + bytes(500)):
        assert recognise(BytesSource(data)) == []


def test_file_source(tmp_path: Path) -> None:
    """A source over a descriptor must read any range, cut at the end, and take the size it was given."""
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))
    with path.open("rb") as file:
        source = FileSource(file.fileno())
        assert source.size == 100
        assert source.read(90, 50) == bytes(range(90, 100))
        assert source.read(200, 5) == b""
        assert FileSource(file.fileno(), 50).read(40, 50) == bytes(range(40, 50))
        assert FileSource(file.fileno(), 500).read(90, 300) == bytes(range(90, 100))


def test_errors_of_the_disk_pass_through() -> None:
    """An I/O error is not a damaged format: it must reach the caller."""

    class Broken:
        size = 100

        def read(self, offset: int, length: int) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        recognise(Broken())


def test_tensor_is_a_value() -> None:
    """Equal descriptions compare equal, whoever read them."""
    assert Tensor("a", "float32", (2,), 0, 8) == Tensor("a", "float32", (2,), 0, 8)
