"""Every parser against bytes that were made to hurt: an answer or FormatError, in bounded time and memory.

The examples are the same in every run; CKPTFS_TEST_EXAMPLES makes more of them.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import tarfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.config import Tuning
from ckptfs.encoding import canonical, codec
from ckptfs.encoding.head import Head, decode_head, encode_head
from ckptfs.encoding.index import Index, decode_index, encode_index
from ckptfs.encoding.manifest import Chunk, Content, Manifest, Placed, TensorSpan, decode_manifest, encode_manifest
from ckptfs.encoding.pack import PackBuilder, read_index
from ckptfs.encoding.remote_format import RemoteFormat, decode_remote_format, encode_remote_format
from ckptfs.encoding.tree import Entry, Tree, decode_tree, encode_tree
from ckptfs.errors import FormatError
from ckptfs.formats import torchlegacy, torchpickle
from ckptfs.formats.base import BytesSource, tidy
from ckptfs.formats.cutting import cut
from ckptfs.formats.recognise import recognise
from ckptfs.ids import ChunkId, FileId, ObjectId, Stamp, WriterId
from tests.support.ggml import gguf_file

MIB = 1 << 20
EXAMPLES = int(os.environ.get("CKPTFS_TEST_EXAMPLES", "400"))
bounded = settings(max_examples=EXAMPLES, deadline=2000, derandomize=True, database=None,
                   suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
TINY = Tuning(piece_bytes=100, small_bytes=40, cdc_bytes=256)


# Files of programs


def safetensors_file() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [32], "data_offsets": [128, 192]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(192))


def npy_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(60, dtype=np.float32).reshape(3, 20))
    return file.getvalue()


def npz_file() -> bytes:
    file = io.BytesIO()
    np.savez(file, one=np.arange(30.0), two=np.arange(9, dtype=np.int32))
    return file.getvalue()


PROGRAM = (
    b"\x80\x02}q\x00(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\0\0\0storagectorch\nFloatStorage"
    b"\nX\x01\0\0\0000X\x03\0\0\0cpuK\x20tQK\0K\x04K\x08\x86K\x08K\x01\x86\x89NtRu."
)


def torch_file() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", PROGRAM)
        archive.writestr("m/byteorder", b"little")
        archive.writestr("m/data/0", bytes(range(128)))
    return file.getvalue()


def legacy_torch_file() -> bytes:
    head = b"\x80\x02" + torchlegacy.MAGIC + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    keys = pickle.dumps(["0"], 2)
    return head + PROGRAM + keys + (32).to_bytes(8, "little") + bytes(range(128))


def tar_file() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        for name, data in (("a.npy", npy_file()), ("b" * 120 + ".pt", torch_file())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def flax_file() -> bytes:
    array = b"\x93\x92\x03\xcc\x28\xa7float32\xc5" + (480).to_bytes(2, "big") + bytes(480)
    params = b"\xa6params\x81\xa1k\xc8" + len(array).to_bytes(2, "big") + b"\x01" + array
    return b"\x82" + params + b"\xa4step\x93\x05\xc0\xcb" + bytes(8)


def ocdbt_file() -> bytes:
    frames = [zstandard.ZstdCompressor().compress(bytes(range(at, at + 99))) for at in range(3)]
    return frames[0] + frames[1] + b"\x0c\xdb\x20\xde" + (40).to_bytes(8, "little") + bytes(28) + frames[2]


def hdf5_file(libver: str, many: int) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w", libver=libver) as out:
        out["plain"] = np.arange(30.0)
        out.create_dataset("chunked", data=np.ones((60, 2)), chunks=(20, 2))
        for at in range(many):
            out[f"group/{at}"] = np.full(3, at)
    return file.getvalue()


FILES = [
    safetensors_file(), npy_file(), npz_file(), torch_file(), legacy_torch_file(), tar_file(), flax_file(),
    gguf_file({"a": ((4, 8), 0, bytes(range(128))), "b": ((64,), 2, bytes(36))}), ocdbt_file(),
    hdf5_file("earliest", 3), hdf5_file("latest", 3), hdf5_file("latest", 20),
]  # fmt: skip
EVIL = st.sampled_from([
    b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\x80", b"[" * 40, b"{" * 40, b"-1", b"9" * 30, b'"', b"PK\x05\x06",
    b"PK\x01\x02", b"PK\x06\x06", b"\xfe\xff", b"(" * 40, b"(1,)*9**9", b"1e999", b"NaN", b"..", b"/", b"true",
])  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A sound file with some of it replaced, repeated, moved, cut off or doubled."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(["evil", "bytes", "copy", "cut", "number"]))
        if kind == "evil":
            data[at:to] = draw(EVIL)
        elif kind == "bytes":
            data[at:to] = draw(st.binary(max_size=8))
        elif kind == "copy":
            start = draw(st.integers(0, len(data)))
            data[at:at] = data[start : start + draw(st.integers(0, 200))]
        elif kind == "cut":
            del data[at : at + draw(st.integers(0, 300))]
        else:
            data[at : at + 8] = draw(st.integers(0, (1 << 64) - 1)).to_bytes(8, "little")
    return bytes(data)


class Counting(BytesSource):
    """Counts what is read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads = self.bytes = 0

    def read(self, offset: int, length: int) -> bytes:
        found = super().read(offset, length)
        self.reads += 1
        self.bytes += len(found)
        return found


def test_the_seeds_are_sound() -> None:
    """Or what follows would prove nothing."""
    assert [len(recognise(BytesSource(data))) for data in FILES] == [2, 1, 2, 1, 1, 2, 1, 2, 3, 5, 6, 23]


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@bounded
@given(mutated(FILES) | st.binary(max_size=300))
def test_a_damaged_file_costs_the_fallback_and_no_more(data: bytes) -> None:
    """No exception; tensors in order within the file; pieces that are exactly the file; few reads."""
    source = Counting(data)
    tensors = recognise(source)
    assert tidy(tensors, len(data)) == tensors
    assert source.bytes <= 10 * len(data) + 200_000 and source.reads < 4000
    pieces = cut(len(data), tensors, [(0, len(data))] if data else [], TINY, source.read)
    at = 0
    for piece in pieces:
        assert piece.start == at < piece.end
        at = piece.end
    assert at == len(data)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # pickletools, of strings; nobody is shown it
@bounded
@given(mutated([PROGRAM, pickle.dumps({"a": [1, (2.5, "x")], "b": b"y" * 40})]) | st.binary(max_size=200))
def test_a_damaged_pickle_runs_nothing(program: bytes) -> None:
    """The scanner gives an answer, or refuses; nothing is imported."""
    try:
        torchpickle.storage_uses(program)
    except (FormatError, ValueError):
        pass


@contextmanager
def within(seconds: float, memory_bytes: int) -> Iterator[None]:
    """The block takes no longer and has no more at once, as a thread sees that looks now and then."""
    page = os.sysconf("SC_PAGE_SIZE")
    statm = Path("/proc/self/statm")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * page

    gc.collect()
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    try:
        yield
    finally:
        elapsed = time.monotonic() - began
        done.set()
        watcher.join()
    assert elapsed < seconds
    assert peak[0] - before < memory_bytes


class Huge:
    """A file of 8 EiB that is *data*, and then *filling* for ever."""

    size = (1 << 63) - 1

    def __init__(self, data: bytes, filling: bytes = b"\0") -> None:
        self._data = data
        self._filling = filling
        self.bytes = 0

    def read(self, offset: int, length: int) -> bytes:
        assert length <= 64 * MIB, "whoever says how long a header is does not decide how much is read"
        self.bytes += length
        head = self._data[offset : offset + length]
        return head + self._filling * (length - len(head))


@pytest.mark.parametrize(
    ("data", "filling"),
    [
        ((1 << 62).to_bytes(8, "little") + b"{", b" "),
        ((99_000_000).to_bytes(8, "little") + b"{", b" "),
        ((20_000_000).to_bytes(8, "little") + b'{"', b"["),
        ((20_000_000).to_bytes(8, "little") + b'{"a":', b"["),
        ((20_000_000).to_bytes(8, "little") + b'{"a":', b"{"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f(", b"("),
        (b"\x93NUMPY\x03\x00\x00\x00\x10\x00{", b"["),
        (b"PK\x03\x04", b"P"),
        (b"\x80\x02" + torchlegacy.MAGIC, b"]"),
        (b"\x80\x02" + torchlegacy.MAGIC, b"N"),
        (b"\x80\x02" + torchlegacy.MAGIC + pickle.dumps(1, 2) * 3 + b"\x80\x02" + b"X" + b"\xff" * 4, b"N"),
        (b"\xdf\xff\xff\xff\xff", b"\0"),
        (b"\xdf\xff\xff\xff\xff", b"\x91"),
        (b"\xdd\xff\xff\xff\xff", b"\xd9\0"),
        (b"GGUF\3\0\0\0" + (90_000).to_bytes(8, "little") + (1 << 62).to_bytes(8, "little"), b"\0"),
        (b"GGUF\3\0\0\0" + (90_000).to_bytes(8, "little") + bytes(8), b"\0"),
        (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(15) + b"\x09\0\0\0\x08\0\0\0" + b"\xff" * 7 + b"\0", b"\0"),
        (b"\x28\xb5\x2f\xfd\x20\x05", b"\0"),
        (b"\x0c\xdb\x20\xde" + b"\x0c" + bytes(7), b"\x0c\xdb\x20\xde\x0c\0\0\0\0\0\0\0"),
        (b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08" + bytes(9), b"\1"),
        (b"\x89HDF\r\n\x1a\n\3\x08\x08" + bytes(9), b"OHDR\2\3\xff\xff\xff\0"),
        (tar_file()[:512], b"0"),
    ],
    ids=range(22),
)  # fmt: skip
def test_lengths_that_a_file_claims(data: bytes, filling: bytes) -> None:
    """A header that says it is enormous, in a file that is: seconds, and tens of MiB."""
    source = Huge(data, filling)
    with within(20, 200 * MIB):
        assert recognise(source) == []
    assert source.bytes < 200 * MIB


def zip_bomb(count: int) -> bytes:
    """*count* central records of 46 bytes that all mean the same local header."""
    local = b"PK\x03\x04" + bytes(22) + b"\x01\0\0\0" + b"x"
    record = b"PK\x01\x02" + bytes(42)
    directory = record * count
    end64 = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes(12) + count.to_bytes(8, "little") * 2
    end64 += len(directory).to_bytes(8, "little") + len(local).to_bytes(8, "little")
    locator = b"PK\x06\x07" + bytes(4) + (len(local) + len(directory)).to_bytes(8, "little") + b"\1\0\0\0"
    end = b"PK\x05\x06" + bytes(4) + b"\xff" * 12 + bytes(2)
    return local + directory + end64 + locator + end


def test_archives_of_a_million_members() -> None:
    """More members than anybody has, and members that are all the same bytes: seconds."""
    data = zip_bomb(700_000)
    with within(30, 600 * MIB):
        assert recognise(BytesSource(data)) == []


# Objects of the remote


CHUNKS = tuple(Chunk(ChunkId(bytes([number]) * 32), 100 + number, "float32") for number in range(1, 4))
CONTENT = Content(
    sum(chunk.length for chunk in CHUNKS) + 50, ((0, 50),), CHUNKS, (TensorSpan("t", "float32", (5,), 50, 70),)
)
BASE = ChunkId(b"b" * 32)
MANIFEST = Manifest(
    CONTENT,
    tuple(Placed(ObjectId(b"p" * 32), at, 90, 7, base) for at, base in ((0, None), (90, BASE), (180, BASE))),
    {BASE: Placed(ObjectId(b"q" * 32), 5, 80, 3, None)},
)
TREE = Tree(FileId(b"d" * 16), (
    Entry(b"dir", Stamp(5), FileId(b"e" * 16), 0o40755, changed=Stamp(5), tree=ObjectId(b"t" * 32)),
    Entry(b"file", Stamp(5), FileId(b"f" * 16), 0o100644, size=5, changed=Stamp(5), manifest=ObjectId(b"m" * 32)),
    Entry(b"gone", Stamp(6)),
))  # fmt: skip
HEAD = Head(WriterId(b"w" * 16), 3, {"": (ObjectId(b"t" * 32), None)}, {WriterId(b"v" * 16): 4}, ObjectId(b"h" * 32),
            None, None, 7, Stamp(9), False, {"files": 3})  # fmt: skip


def a_pack() -> tuple[bytes, Index]:
    builder = PackBuilder()
    for chunk in CHUNKS:
        builder.add(chunk.id, chunk.length, codec.RAW, bytes(chunk.length))
    name, data, rows = builder.finish()
    return bytes(data), Index({name: rows}, None)


PACK, INDEX = a_pack()
OBJECTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "manifest": (encode_manifest(MANIFEST), decode_manifest),
    "tree": (encode_tree(TREE), decode_tree),
    "head": (encode_head(HEAD), decode_head),
    "index": (encode_index(INDEX), decode_index),
    "remote": (encode_remote_format(RemoteFormat(uuid.UUID(int=7), 5)), decode_remote_format),
}
VALUES = st.sampled_from([
    None, True, -1, 0, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 200, "", "..", "a/b", "\0", "x" * 300, "0" * 64, [], {},
    [[]], [{}] * 50, {"b64": "Li4="}, [1] * 50, [[0, 1 << 63]], {"a": {"a": {}}},
])  # fmt: skip


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything within a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places_in(value[key], (*path, key))


@pytest.mark.parametrize("kind", OBJECTS)
@bounded
@given(data=st.data())
def test_objects_that_say_nonsense(kind: str, data: st.DataObject) -> None:
    """One or more values of a sound object replaced, removed or added: FormatError, or what decodes says the same."""
    body, decode = OBJECTS[kind]
    value = json.loads(body)
    for _ in range(data.draw(st.integers(1, 3))):
        every = list(places_in(value))
        *path, last = data.draw(st.sampled_from(every))
        inner = value
        for key in path:
            inner = inner[key]
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "replace":
            inner[last] = copy.deepcopy(data.draw(VALUES))
        elif action == "remove":
            del inner[last]
        elif isinstance(inner, dict):
            inner["zz"] = copy.deepcopy(data.draw(VALUES))
        else:
            inner.append(copy.deepcopy(data.draw(VALUES)))
        if not list(places_in(value)):
            break
    if kind == "remote":  # else its check would refuse everything
        value = {key: each for key, each in value.items() if key != "check"}
        value["check"] = canonical.object_id(canonical.dumps(value)).hex()
    try:
        decode(canonical.dumps(value))
    except FormatError:
        pass


@bounded
@given(mutated([PACK]) | st.binary(max_size=200))
def test_packs_that_are_none(data: bytes) -> None:
    """A damaged end of a pack is refused, or tells of chunks that lie in the pack."""
    try:
        rows = read_index(data, len(data))
    except FormatError:
        return
    assert all(0 <= row.offset <= row.offset + row.length <= len(data) for row in rows)


@bounded
@given(mutated([canonical.seal_object(body) for body, _ in OBJECTS.values()]))
def test_frames_that_are_none(data: bytes) -> None:
    """A damaged frame is refused, or is what it was."""
    try:
        opened = canonical.open_object(data)
    except FormatError:
        return
    assert opened in [body for body, _ in OBJECTS.values()]


@pytest.mark.parametrize("body", [b"[" * 3_000_000, b"[" + b"{}," * 5_000_000 + b"0]", b'{"a":' * 200_000,
                                  b"9" * 3_000_000, b'"' + b'\\"' * 2_000_000, b"[" + b"-1," * 8_000_000 + b"0]"],
                         ids=range(6))  # fmt: skip
def test_json_bombs(body: bytes) -> None:
    """Deep, wide, long: refused in seconds, or a value that no decoder takes."""
    with within(30, 700 * MIB):
        for kind in ("tree", "remote"):
            with pytest.raises(FormatError):
                OBJECTS[kind][1](body)


def test_decompression_bombs() -> None:
    """Frames of a few KiB that unpack to gigabytes, as objects and as chunks: refused before anything is unpacked."""
    packed = zstandard.ZstdCompressor(level=19, write_checksum=True, write_content_size=True).compress(bytes(300 * MIB))
    frames = [packed, packed[:4] + b"\xe4" + (1 << 62).to_bytes(8, "little") + packed[13:]]
    with within(20, 20 * MIB):
        for frame in frames:
            with pytest.raises(FormatError):
                canonical.open_object(frame)
            for number in codec.CODECS:
                for length in (1, 1000, 4 * MIB):
                    with pytest.raises(FormatError):
                        codec.decode(number, frame, length)
