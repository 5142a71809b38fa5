"""Damaged and hostile files: no tensors, no exception, bounded time and memory."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckptfs.formats import torchlegacy, torchpickle
from ckptfs.formats.base import UNKNOWN, BytesSource, FileSource, tidy
from ckptfs.formats.recognise import recognise

ROOT = Path(__file__).parents[2]


def recognised(data: bytes) -> list[tuple[str, str]]:
    tensors = recognise(BytesSource(data))
    assert tidy(tensors, len(data)) == tensors
    return [(tensor.name, tensor.dtype) for tensor in tensors]


def safetensors(header: object, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def npy(header: str, data: bytes = bytes(64)) -> bytes:
    text = header.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return file.getvalue()


def test_sound_examples() -> None:
    """The builders used below must make files that are recognised, or the refusals would prove nothing."""
    assert recognised(safetensors({"a": entry()})) == [("a", "float32")]
    assert recognised(safetensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   ')) == [("a", "float32")]
    assert recognised(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n")) == [("", "float32")]


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(offsets=(0, 9))},
        {"a": entry(offsets=(8, 0))},
        {"a": entry(offsets=(60, 68))},
        {"a": entry(offsets=(-8, 0))},
        {"a": entry(offsets=(0, 8, 16))},
        {"a": entry(offsets=None)},
        {"a": entry(shape=(True, 2))},
        {"a": entry(shape=(2.0,))},
        {"a": entry(shape=[1] * 100)},
        {"a": entry(shape="2")},
        {"a": entry(shape=(1 << 62, 1 << 62))},
        {"a": 5},
        {"a": entry(), "b": entry(offsets=(4, 12))},
        b'{"a": [',
        b"{" + b" " * 50,
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        b'{"a":{"dtype":"F32","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,8]}}',
        b"[]",
        b"{\xff}",
    ],
    ids=range(19),
)
def test_lying_safetensors(header: object) -> None:
    """Offsets that overlap or leave the file, sizes that do not fit the shape, and other JSON must be refused."""
    assert recognised(safetensors(header)) == []


def test_unknown_type_in_safetensors() -> None:
    """A tensor of a type of the future must still start a chunk."""
    assert recognised(safetensors({"a": entry("F2_NEW", (5, 5), (0, 7))})) == [("a", UNKNOWN)]


@pytest.mark.parametrize("length", [0, 1, 56, 1 << 20, 99_000_000, 1 << 62, (1 << 64) - 1])
def test_lying_safetensors_length(length: int) -> None:
    """A header length beyond the file must be refused before anything is read."""
    assert recognised(length.to_bytes(8, "little") + b'{"a":{}}' + bytes(30)) == []


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (200, 3), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 3), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': [2], }",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,), }",
        "{'descr': '<f4', 'shape': (2,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<f999999999', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': 'float', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os').getpid(),), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2+3,), }",
        "(" * 5000 + ")" * 5000,
        "not " * 2000 + "True",
        "{'descr': {}, 'fortran_order': False, 'shape': (2,) ",
        "\0" * 100,
        "{" * 9000,
    ],
    ids=range(16),
)
def test_lying_npy(header: str) -> None:
    """Headers that lie, or are more than numpy's literal, must be refused."""
    assert recognised(npy(header)) == []


def test_every_truncation() -> None:
    """A file that was cut off anywhere must have no tensors, or those that are whole."""
    pieces = [np.arange(9.0), np.arange(4)]
    file = io.BytesIO()
    np.savez(file, *pieces)
    for data in (safetensors({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16)), file.getvalue()):
        for length in range(len(data)):
            assert recognised(data[:length]) == []


def test_compressed_or_encrypted_members() -> None:
    """Members that are not stored as they are must be opaque."""
    file = io.BytesIO()
    np.save(file, np.arange(99.0))
    assert recognised(archive({"a.npy": file.getvalue()}, zipfile.ZIP_DEFLATED)) == []
    stored = archive({"a.npy": file.getvalue()})
    assert recognised(stored) == [("a", "float64")]
    at = stored.rfind(b"PK\x01\x02")
    assert recognised(stored[: at + 8] + b"\x01" + stored[at + 9 :]) == []


def test_members_that_overlap() -> None:
    """Two members over the same bytes must not become two tensors."""
    file = io.BytesIO()
    np.save(file, np.arange(99.0))
    data = bytearray(archive({"a.npy": file.getvalue(), "b.npy": file.getvalue()}))
    second = data.rfind(b"PK\x01\x02")
    data[second + 42 : second + 46] = bytes(4)  # b now lies where a does
    assert recognised(bytes(data)) == []


def test_zip64(tmp_path: Path) -> None:
    """Archives past 4 GiB, and those with ZIP64 records all the same, must be read; a sparse file stands in here."""
    path = tmp_path / "big.npz"
    array = np.arange(1000.0)
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as out:
        with out.open("small.npy", "w", force_zip64=True) as member:
            np.save(member, array)
        with out.open("late.npy", "w", force_zip64=True) as member:
            np.save(member, array)
    whole = path.read_bytes()
    assert [name for name, _ in recognised(whole)] == ["small", "late"]
    # The same archive with its second member 5 GiB later: what zipfile writes when the first is that long.
    gap = 5 << 30
    late = whole.find(b"PK\x03\x04", 4)
    central = whole.find(b"PK\x01\x02")
    entries = whole[central : whole.rfind(b"PK\x05\x06")]
    second = bytearray(entries[entries.find(b"PK\x01\x02", 4) :])
    first = entries[: -len(second)]
    second[42:46] = b"\xff" * 4
    extra = struct.pack("<HHQ", 1, 8, late + gap)
    assert second[30:32] == b"\0\0"
    second[30:32] = struct.pack("<H", len(extra))
    directory = first + bytes(second) + extra
    at = central + gap
    end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, len(directory), at)
    end += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + len(directory), 1)
    end += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0)
    with path.open("wb") as file:
        file.write(whole[:late])
        file.seek(late + gap)
        file.write(whole[late:central] + directory + end)
    with path.open("rb") as file:
        tensors = recognise(FileSource(file.fileno()))
        assert [tensor.name for tensor in tensors] == ["small", "late"]
        assert tensors[1].start > gap
        assert file.seek(tensors[1].start) and file.read(8000) == array.tobytes()
    assert zipfile.is_zipfile(path)


def torch_archive(program: bytes, **storages: bytes) -> bytes:
    return archive({"x/data.pkl": program, **{f"x/data/{key[1:]}": data for key, data in storages.items()}})


def test_pickle_is_not_run(tmp_path: Path) -> None:
    """A pickle that would execute something must be read without doing so; its storages stay findable."""
    witness = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (witness,))

    for protocol in range(6):
        data = torch_archive(pickle.dumps({"x": Evil()}, protocol), _0=bytes(100))
        assert recognised(data) == [("0", UNKNOWN)]
        assert not witness.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"\x80\x02" + b"0" * 10,
        b"\x80\x02(lp0\nh\x07.",
        b"}" * 10 + b"u.",
        b"t.",
        b"\x87.",
        b"Q.",
        b"(" * 100_000,
        b"]2" * 1000 + b"a" * 900 + b".",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8e" + b"\xff" * 8,
        b"I" + b"9" * 100_000 + b"\n.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"pnot a number\n.",
        b"NR.NNb.(o.",
    ],
    ids=range(17),
)
def test_senseless_pickles(program: bytes) -> None:
    """Whatever the pickle is, the storages themselves must still be found."""
    assert recognised(torch_archive(program, _0=bytes(8), _1=bytes(4))) == [("0", UNKNOWN), ("1", UNKNOWN)]
    assert torchpickle.storage_uses(program) == []


def test_pickle_that_contains_itself() -> None:
    """Cycles and shared values nested to a billion paths must be walked once."""
    loop: list[object] = []
    loop.append(loop)
    shared: object = loop
    for _ in range(60):
        shared = [shared, shared]
    assert torchpickle.storage_uses(pickle.dumps(shared)) == []


def test_a_size_that_does_not_fit_the_type() -> None:
    """A storage whose length is no multiple of what the pickle says must be bytes of unknown type."""
    program = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
        b"0X\x03\0\0\0cpuK\x02tQK\0K\x02\x85K\x01\x85\x89NtR."
    )
    assert recognised(torch_archive(program, _0=bytes(8))) == [("0", "float32")]
    assert recognised(torch_archive(program, _0=bytes(7))) == [("0", UNKNOWN)]


def tar(count: int) -> bytes:
    """Members of no bytes."""
    member = tarfile.TarInfo("x").tobuf()
    return member * count


def hdf5_in_circles() -> bytes:
    """A group whose B-tree has 30 levels, of which each has 32 children that are the next."""
    file = io.BytesIO()
    with h5py.File(file, "w") as out:
        out["a"] = np.ones(3)
    data = bytearray(file.getvalue())
    root = data.index(b"TREE")
    nodes = len(data)
    for level in reversed(range(31)):
        child = (nodes + (30 - level) * 544 + 544).to_bytes(8, "little")
        data += b"TREE\0" + bytes([level, 32, 0]) + b"\xff" * 16 + (bytes(8) + child) * 32 + bytes(8)
    data[root : root + 544] = data[nodes : nodes + 544]
    data += b"SNOD\1\0\0\0"  # the child of those below, with no names in it
    return bytes(data) + bytes(4 << 20)


WORST = """
import resource, sys
from ckptfs.formats.base import FileSource
from ckptfs.formats.recognise import recognise
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        assert recognise(FileSource(file.fileno())) == [], path
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_time_and_memory_are_bounded(tmp_path: Path) -> None:
    """The worst headers that fit the limits must take seconds and less than 200 MB, and give nothing."""
    worst = [
        safetensors(b'{"a":' + b"[" * 1_400_000),
        safetensors(b'{"a":[' + b"{}," * 700_000 + b"0]}"),
        safetensors(b'{"a":[' + b"0," * 1_400_000 + b"0]}"),
        torch_archive(b"\x80\x02" + b"]" * 3_000_000),
        torch_archive(b"\x80\x02" + b"(" * 1_500_000 + b"t" * 1_500_000),
        b"\x80\x02" + torchlegacy.MAGIC + pickle.dumps(1, 2) * 2 + b"\x80\x02" + b"]" * 3_000_000,
        b"\xdd\xff\xff\xff\xff" + b"\x81\xa1a\x90" * 700_000,
        b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(15) + struct.pack("<IIQ", 9, 8, 1 << 20) + bytes(9 << 20),
        b"\x28\xb5\x2f\xfd\x20\x05" + bytes(4_000_000),
        tar(10_000),
        hdf5_in_circles(),
    ]
    paths = [tmp_path / str(at) for at in range(len(worst))]
    for path, data in zip(paths, worst, strict=True):
        path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", WORST, *paths], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    assert int(done.stdout) < 200_000
