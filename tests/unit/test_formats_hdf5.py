"""Recognising HDF5 files as h5py writes them, in every version of the format that it knows, and damaged ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptfs.formats.base import MAX_NAME, UNKNOWN, BytesSource, Tensor, tidy
from ckptfs.formats.hdf5 import reader
from ckptfs.formats.recognise import recognise

h5py = pytest.importorskip("h5py")

VERSIONS = ["earliest", "v108", "v110", "v114", "latest"]


def made(fill: Callable[[Any], None], libver: str = "earliest", **options: Any) -> bytes:
    file = io.BytesIO()
    versions = libver if libver in ("earliest", "latest") else (libver, libver)
    with h5py.File(file, "w", libver=versions, **options) as out:
        fill(out)
    return file.getvalue()


def tensors(data: bytes) -> list[Tensor]:
    result = recognise(BytesSource(data))
    assert tidy(result, len(data)) == result
    return result


def found(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape of the first tensor of that name, the bytes of all of them)."""
    result: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for each in tensors(data):
        dtype, shape, before = result.get(each.name, (each.dtype, each.shape, b""))
        result[each.name] = dtype, shape, before + data[each.start : each.end]
    return result


def as_saved(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.name, array.shape, array.tobytes()


@pytest.mark.parametrize("track_order", [False, True])
@pytest.mark.parametrize("libver", VERSIONS)
def test_groups_of_any_size(libver: str, track_order: bool) -> None:
    """Datasets in groups must be found by their paths: few, in their headers, and many, in B-trees and heaps."""
    arrays = {f"{'deep/' * depth}layer{at:04}/kernel:0": np.full((3, at + 1), at, "f8") for depth, at in
              [(0, 0), (9, 1), *((1, at) for at in range(2, 300))]}  # fmt: skip

    def fill(file: Any) -> None:
        for name, array in arrays.items():
            file[name] = array
            file[name].attrs["note"] = "x" * 500
        for at in range(60):  # more than its header has room for: continuations
            file.attrs[f"note{at}"] = np.arange(50)
        file["soft"] = h5py.SoftLink("/deep")
        file["hard"] = file["layer0000/kernel:0"]
        file["elsewhere"] = h5py.ExternalLink("other.h5", "/")

    result = found(made(fill, libver, track_order=track_order))
    shared = next(name for name in ("hard", "layer0000.kernel:0") if name in result)
    assert result.pop(shared) == as_saved(arrays.pop("layer0000/kernel:0"))
    assert result == {name.replace("/", "."): as_saved(array) for name, array in arrays.items()}


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_long_names(libver: str) -> None:
    """Names that fill a heap of several levels must all lead somewhere; what they are called is cut off."""

    def fill(file: Any) -> None:
        for at in range(220):
            file[f"{at}" + "x" * 3900] = np.full(2, at)

    found = tensors(made(fill, libver))
    assert {each.name.rstrip("x") for each in found} == {str(at) for at in range(220)}
    assert max(len(each.name) for each in found) == MAX_NAME


@pytest.mark.parametrize("libver", VERSIONS)
def test_types(libver: str) -> None:
    """Numbers must have their names; what has none must be unknown, with its bytes."""
    arrays = {name: np.arange(6).reshape(2, 3).astype(name) for name in
              ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")}  # fmt: skip
    others = {"?": np.array([True, False]), ">f4": np.arange(4, dtype=">f4"), ">i2": np.arange(4, dtype=">i2"),
              "c8": np.ones(4, "c8"), "S": np.array([b"abc"]), "V2": np.zeros(3, "V2"), "pair": np.zeros(3, "f4,i8"),
              "scalar": np.array(5.0, "f4")}  # fmt: skip

    def fill(file: Any) -> None:
        for name, array in {**arrays, **others}.items():
            file[name] = array
        file["empty"] = np.zeros((0, 3))
        file["null"] = h5py.Empty("f4")
        file["words"] = ["one", "two"]
        file["named"] = np.dtype("f4")
        file.create_dataset("of named type", data=np.ones(5, "f4"), dtype=file["named"])
        bfloat16 = h5py.h5t.IEEE_F32LE.copy()
        bfloat16.set_fields(15, 7, 8, 0, 7)
        bfloat16.set_size(2)
        bfloat16.set_ebias(127)
        space = h5py.h5s.create_simple((6,))
        made = h5py.h5d.create(file.id, b"bfloat16", bfloat16, space)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(6, dtype="f4"))

    result = found(made(fill, libver))
    assert {name: result[name] for name in arrays} == {name: as_saved(array) for name, array in arrays.items()}
    assert {name: result[name][2] for name in others} == {name: array.tobytes() for name, array in others.items()}
    assert [result[name][0] for name in others] == ["int8", *[UNKNOWN] * 4, "void16", UNKNOWN, "float32"]
    assert result["bfloat16"][:2] == ("bfloat16", (6,)) and len(result["bfloat16"][2]) == 12
    assert result["of named type"][2] == np.ones(5, "f4").tobytes()
    assert "empty" not in result and "null" not in result


@pytest.mark.parametrize("libver", VERSIONS)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1000, 30), {"chunks": (64, 30)}),
        ((1000, 30), {"chunks": (1000, 30)}),
        ((100_000,), {"chunks": (300,)}),
        ((3000, 2), {"chunks": (1, 2)}),
        ((100, 10), {"chunks": (7, 10), "maxshape": (None, None)}),
        ((9000, 2), {"chunks": (1, 2), "maxshape": (None, None)}),
        ((100, 10), {"chunks": (7, 10), "maxshape": (200, 10)}),
        ((100, 10), {"chunks": (7, 10), "maxshape": (None, 10)}),
        ((4000,), {"chunks": (1,), "maxshape": (None,)}),
    ],
    ids=range(9),
)
def test_chunks_of_rows(libver: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Chunks of whole rows must be found in order, without what the last one has too much, in few runs."""
    array = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    data = made(lambda file: file.create_dataset("a", data=array, **options) and None, libver)
    runs = tensors(data)
    assert {(each.name, each.dtype, each.shape[1:]) for each in runs} == {("a", "float32", shape[1:])}
    rows = [np.frombuffer(data[each.start : each.end], "f4").reshape(each.shape) for each in runs]
    assert np.array_equal(np.concatenate(sorted(rows, key=lambda each: each.flat[0])), array)
    assert len(runs) <= 3 + len(array) // options["chunks"][0] // 50, "indexes lie between them, now and then"


@pytest.mark.parametrize("libver", VERSIONS)
def test_chunks_of_blocks(libver: str) -> None:
    """Chunks that are no rows must be found, each with all its bytes, those at the edges too."""
    array = np.arange(10_000, dtype="f4").reshape(100, 100) + 1
    chunks = (32, 32)
    data = made(lambda file: file.create_dataset("a", data=array, chunks=chunks) and None, libver)
    content = found(data)["a"][2]
    values = np.frombuffer(content, "f4")
    assert len(content) == 16 * 32 * 32 * 4
    assert sorted(values[values > 0]) == sorted(array.ravel())
    assert array[:32, :32].tobytes() in content and array[32:64, 64:96].tobytes() in content


@pytest.mark.parametrize("libver", VERSIONS)
def test_chunks_that_were_never_written(libver: str) -> None:
    """Only what has a place in the file must be found."""

    def fill(file: Any) -> None:
        made = file.create_dataset("a", (1000, 10), "f4", chunks=(10, 10))
        made[200:210] = 7
        file.create_dataset("b", (1000, 10), "f4")

    result = found(made(fill, libver))
    assert result == {"a": ("float32", (10, 10), np.full((10, 10), 7, "f4").tobytes())}


@pytest.mark.parametrize("most", [(30, None), (None, None), (90, 100), (30, 300)])
@pytest.mark.parametrize("libver", VERSIONS)
def test_datasets_that_may_grow(libver: str, most: tuple[int | None, ...]) -> None:
    """Chunks must be in the order of the dataset as it is now, whichever way it may grow."""
    array = np.arange(3000, dtype="f4").reshape(30, 100)
    data = made(lambda file: file.create_dataset("a", data=array, chunks=(10, 20), maxshape=most) and None, libver)
    runs = [np.frombuffer(data[each.start : each.end], "f4") for each in tensors(data)]
    blocks = [array[row : row + 10, at : at + 20].ravel() for row in (0, 10, 20) for at in range(0, 100, 20)]
    assert np.array_equal(np.concatenate(sorted(runs, key=lambda run: run[0])), np.concatenate(blocks))


@pytest.mark.parametrize("most", [300_000, None])
def test_a_few_chunks_of_very_many(most: int | None) -> None:
    """The pages of an index that were never written must be passed over, and those that were be found."""
    places = [0, 1, 7, 100, 5000, 131_000, 140_001, 299_999]

    def fill(file: Any) -> None:
        dataset = file.create_dataset("a", (300_000,), "i4", chunks=(1,), maxshape=(most,))
        for place in places:
            dataset[place] = place + 1

    data = made(fill, "latest")
    runs = [np.frombuffer(data[each.start : each.end], "i4") for each in tensors(data)]
    assert sorted(np.concatenate(runs)) == [place + 1 for place in places]


@pytest.mark.parametrize("libver", VERSIONS)
def test_compressed_chunks_are_left_to_be_cut_by_content(libver: str) -> None:
    """Their lengths change with their content, so that steps from a start would fit nothing; others must be found."""

    def fill(file: Any) -> None:
        file.create_dataset("packed", data=np.zeros((100, 100)), chunks=(10, 100), compression="gzip")
        file.create_dataset("one", data=np.zeros((100, 100)), chunks=(100, 100), compression="gzip")
        file["plain"] = np.ones(5)

    assert found(made(fill, libver)) == {"plain": as_saved(np.ones(5))}


def test_what_others_put_before() -> None:
    """A file that begins with somebody else's block, as MATLAB's, must be read; addresses count from behind it."""
    array = np.arange(99.0)
    data = made(lambda file: file.__setitem__("a", array), userblock_size=2048)
    assert found(b"MATLAB 7.3 MAT-file" + data[19:]) == {"a": as_saved(array)}


def test_damage_costs_only_what_is_damaged() -> None:
    """With one object header overwritten, the others must be found; without the file's end, what is whole."""
    arrays = {name: np.full(4000, at, "f8") for at, name in enumerate("abcd")}

    def fill(file: Any) -> None:
        for name, array in arrays.items():
            file.create_dataset(f"{name}/data", data=array)

    data = made(fill)
    whole = {each.name: each for each in tensors(data)}
    assert list(whole) == ["a.data", "b.data", "c.data", "d.data"]
    start = whole["b.data"].start
    header = data.index(start.to_bytes(8, "little") + (32_000).to_bytes(8, "little"))  # its layout message
    damaged = data[: header - 2] + b"\xff" + data[header - 1 :]
    assert [each.name for each in tensors(damaged)] == ["a.data", "c.data", "d.data"]
    lying = data[:header] + (whole["c.data"].start + 8).to_bytes(8, "little") + data[header + 8 :]
    assert [each.name for each in tensors(lying)] == ["a.data", "c.data", "d.data"]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_truncation(libver: str) -> None:
    """A file that was cut off anywhere must give what is whole in it."""
    arrays = {f"g/{at}": np.full(20 + at, at, "f4") for at in range(12)}

    def fill(file: Any) -> None:
        for name, array in arrays.items():
            file[name] = array
        file.create_dataset("c", data=np.ones((40, 4)), chunks=(2, 4))

    data = made(fill, libver)
    expected = {(each.start, each.end) for each in tensors(data)}
    for length in range(0, len(data), 7):
        assert {(each.start, each.end) for each in tensors(data[:length])} <= expected


def test_references_in_circles() -> None:
    """A group that contains itself, and a B-tree that does, must come to an end."""

    def fill(file: Any) -> None:
        file["a/loop"] = file
        file["a/b"] = file["/"]
        file["a/x"] = np.ones(5)

    data = made(fill)
    assert found(data) == {"a.x": as_saved(np.ones(5))}
    tree = data.index(b"TREE")
    for level in range(256):  # its first child is itself
        looped = bytearray(data)
        looped[tree + 5] = level
        looped[tree + 32 : tree + 40] = tree.to_bytes(8, "little")
        assert found(bytes(looped)) == {}


def test_more_runs_than_anybody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many tensors the first must stand."""
    data = made(lambda file: [file.create_dataset(f"{at}", data=np.full(9, at)) for at in range(20)] and None)
    whole = tensors(data)
    monkeypatch.setattr(reader, "MAX_TENSORS", 5)
    assert tensors(data) and {*tensors(data)} <= {*whole} and len(tensors(data)) == 5


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """When too much would have to be read, what was found until then stands."""
    data = made(lambda file: [file.create_dataset(f"{at}", data=np.full(9, at)) for at in range(200)] and None)
    assert len(tensors(data)) == 200
    monkeypatch.setattr(reader, "MAX_BYTES", 150_000)
    assert 0 < len(tensors(data)) < 200
