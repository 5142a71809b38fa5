"""Recognising what flax, llama.cpp, NeMo, Keras and old versions of torch write, and OCDBT data files."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ckptfs.formats import gguf
from ckptfs.formats.base import UNKNOWN, BytesSource, tidy
from ckptfs.formats.recognise import recognise
from tests.support.ggml import gguf_file


def found(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, the bytes in the file); checks what `recognise` promises of the order."""
    tensors = recognise(BytesSource(data))
    assert tidy(tensors, len(data)) == tensors
    return {tensor.name: (tensor.dtype, tensor.shape, data[tensor.start : tensor.end]) for tensor in tensors}


def saved(save: Any, *args: Any, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


def as_saved(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.name, array.shape, array.tobytes()


# Torch before ZIP archives


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_legacy_torch_save(protocol: int) -> None:
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
        "views": [base[2:6], base],
        "fp8": torch.ones(5).to(torch.float8_e5m2),
        "u16": torch.ones(5).to(torch.uint16),
        "empty": torch.ones(0),
    }
    save = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    result = found(saved(lambda file: torch.save(state, file, **save)))
    assert result["model.0.weight"] == as_saved(model[0].weight.detach().numpy())
    assert result["model.1.bias"][:2] == ("bfloat16", (3,))
    assert result["optimizer.state.0.exp_avg"] == as_saved(optimizer.state[model[0].weight]["exp_avg"].numpy())
    assert result["views.0"] == as_saved(base.numpy())
    assert result["fp8"][:2] == ("float8_e5m2", (5,))
    assert result["u16"] == ("uint16", (5,), np.ones(5, "u2").tobytes())
    assert len(result) == 4 + 2 * 3 + 4


def test_a_module_in_legacy_torch_save() -> None:
    """A whole module, saved with its class and source, must be found without running anything."""
    torch = pytest.importorskip("torch")
    data = saved(lambda file: torch.save(torch.nn.Linear(4, 2), file, _use_new_zipfile_serialization=False))
    assert sorted(value[:2] for value in found(data).values()) == [("float32", (2,)), ("float32", (2, 4))]


def test_legacy_torch_save_that_is_cut_off() -> None:
    """A storage that is not whole must make the file one of which nothing is known, and an empty one be none."""
    torch = pytest.importorskip("torch")
    data = saved(lambda file: torch.save({"a": torch.ones(9)}, file, _use_new_zipfile_serialization=False))
    assert [value[1] for value in found(data).values()] == [(9,)]
    for length in range(len(data)):
        assert found(data[:length]) == {}


# Archives of other files


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tar(kind: int) -> None:
    """Members of a tar archive must be read by their own reader, whatever the kind of its headers; others left."""
    array, other = np.arange(300.0), np.arange(5, dtype="i2")
    members = {
        "config.yaml": b"name: model\n",
        "first.npy": saved(np.save, array),
        "long/" * 19 + "n" * 60 + ".npz": saved(np.savez, w=other),
        "empty": b"",
        "second.npy": saved(np.save, other),
    }
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:", format=kind) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        archive.addfile(tarfile.TarInfo("folder/"))
    result = found(file.getvalue())
    assert result["first"] == as_saved(array) and result["second"] == as_saved(other)
    assert len(result) == 2, "an archive in an archive is not looked into"


def test_tar_that_is_damaged() -> None:
    """What is before the damage must be found."""
    array = np.arange(300.0)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as archive:
        for name in ("a.npy", "b.npy"):
            data = saved(np.save, array)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    whole = file.getvalue()
    at = whole.index(b"b.npy")
    assert list(found(whole)) == ["a", "b"]
    for damage in (b"c", b"\xff"):
        assert list(found(whole[:at] + damage + whole[at + 1 :])) == ["a"]
    assert list(found(whole[: at + 600])) == ["a"]
    assert found(b"x" + whole[1:]) == {}


def test_large_numbers_in_tar() -> None:
    """A length of 8 GiB and more is binary, or in an extended header."""
    array = np.arange(3.0)
    data = saved(np.save, array)
    member = tarfile.TarInfo("a.npy")
    member.size = len(data)
    header = bytearray(member.tobuf())
    header[124:136] = b"\x80" + len(data).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    assert found(bytes(header) + data) == {"a": as_saved(array)}
    member.size = 0
    member.pax_headers = {"comment": "a size=7\n", "size": str(len(data))}
    assert found(member.tobuf(tarfile.PAX_FORMAT) + data) == {"a": as_saved(array)}


def test_files_in_zip() -> None:
    """Stored members of any format must be found, as in a .keras; compressed ones must not."""
    h5py = pytest.importorskip("h5py")
    array = np.arange(300, dtype="f4")
    inner = io.BytesIO()
    with h5py.File(inner, "w") as file:
        file["layers/dense/0"] = array
    for method, expected in ((zipfile.ZIP_STORED, 1), (zipfile.ZIP_DEFLATED, 0)):
        outer = io.BytesIO()
        with zipfile.ZipFile(outer, "w", method) as archive:
            archive.writestr("config.json", "{}")
            archive.writestr("model.weights.h5", inner.getvalue())
        result = found(outer.getvalue())
        assert len(result) == expected
        assert not expected or result["model.weights.h5.layers.dense.0"] == as_saved(array)


# Flax


def test_flax() -> None:
    """Every array of a tree must be found, whatever else is in it."""
    serialization = pytest.importorskip("flax.serialization")
    jnp = pytest.importorskip("jax.numpy")
    tree = {
        "params": {"dense": {"kernel": np.arange(12.0).reshape(3, 4), "bias": jnp.ones(70_000, jnp.bfloat16)}},
        "step": np.int32(5),
        "rest": [1, -5, 1 << 40, 2.5, 1j, "x" * 300, b"y" * 70_000, None, True, {7: np.zeros((0, 3), "u1")}],
        "wide": {str(at): at for at in range(70_000)},
        "shape": np.ones((300, 2, 1), "f2"),
    }
    result = found(serialization.msgpack_serialize(tree))
    assert result.pop("params.dense.bias")[:2] == ("bfloat16", (70_000,))
    assert result == {
        "params.dense.kernel": as_saved(tree["params"]["dense"]["kernel"]),
        "rest.9.7": ("uint8", (0, 3), b""),
        "shape": as_saved(tree["shape"]),
    }
    assert found(serialization.to_bytes(np.arange(5)))[""] == as_saved(np.arange(5))


def test_flax_in_parts() -> None:
    """The parts of an enormous array must each be found."""
    serialization = pytest.importorskip("flax.serialization")
    array = np.arange(500, dtype="f4").reshape(5, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "MAX_CHUNK_SIZE", 400)
        result = found(serialization.msgpack_serialize({"a": array}))
    assert list(result) == [f"a.chunks.{at}" for at in range(5)]
    assert b"".join(value[2] for value in result.values()) == array.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a\xc7\x05\x01\x93\x91\x02\xa2f4",
        b"\x81\xa1a\xc7\x0e\x01\x93\x91\x02\xa5uint8\xc4\x02ab\0",
        b"\x81\xa1a\xc7\x0d\x01\x93\x91\x02\xa5uint8\xc4\x03ab",
        b"\x81\xa1a\xc7\x0d\x02\x93\x91\x02\xa5uint8\xc4\x02ab",
        b"\x81\xa1a\xc7\x0d\x01\x92\x91\x02\xa5uint8\xc4\x02ab",
        b"\x81\xa1a\xc7\x0d\x01\x93\x91\xff\xa5uint8\xc4\x02ab",
        b"\x81\xa1a\xc7\x0d\x01\x93\x02\x02\xa5uint8\xc4\x02ab",
        b"\x81\xa1a\xc1",
        b"\x82\xa1a\x01",
        b"\xdf\xff\xff\xff\xff" + b"\0" * 100,
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff" + b"\x90" * 500,
        b"\x81\xdb\xff\xff\xff\xff",
    ],
    ids=range(13),
)
def test_what_is_not_of_flax(data: bytes) -> None:
    """Values that are cut off, lie about their length, or are no arrays must give nothing."""
    assert found(b"\x81\xa1a\xc7\x0d\x01\x93\x91\x02\xa5uint8\xc4\x02ab") == {"a": ("uint8", (2,), b"ab")}
    assert found(data) == {}


# GGUF


def test_gguf() -> None:
    """Every tensor must be found, with the shape in the order that numpy has it, plain or quantised."""
    plain = np.arange(60, dtype="f4").reshape(3, 20)
    tensors = {
        "token_embd.weight": ((3, 20), 0, plain.tobytes()),
        "blk.0.q": ((2, 64), 2, bytes(range(72))),
        "blk.0.bf16": ((5,), 30, bytes(10)),
        "new": ((5,), 77, bytes(50)),
        "last": ((256,), 14, bytes(210)),
    }
    for version in (2, 3):
        for alignment in (None, 32, 64, 8):
            result = found(gguf_file(tensors, version, alignment))
            assert result["token_embd.weight"] == as_saved(plain)
            assert result["blk.0.q"] == (UNKNOWN, (2, 64), bytes(range(72)))
            assert result["blk.0.bf16"] == ("bfloat16", (5,), bytes(10))
            assert result["new"][:2] == (UNKNOWN, (5,))
            assert len(result["new"][2]) == 50 + -50 % (alignment or 32), "with the padding: how long it is is not told"
            assert result["last"] == (UNKNOWN, (256,), bytes(210))
    assert found(gguf_file({})) == {}


def test_gguf_of_its_own_library(tmp_path: Path) -> None:
    """A file of llama.cpp's library must be read, and the sizes of blocks be those that it has."""
    library = pytest.importorskip("gguf")
    array = np.arange(6400, dtype="f4").reshape(100, 64)
    kinds = library.GGMLQuantizationType
    quantised = library.quants.quantize(array, kinds.Q8_0)
    writer = library.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(["a", "b", "c" * 300])
    writer.add_custom_alignment(256)
    writer.add_tensor("plain", array)
    writer.add_tensor("half", array.astype("f2"))
    writer.add_tensor("quantised", quantised, raw_dtype=kinds.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = found((tmp_path / "m.gguf").read_bytes())
    assert result["plain"] == as_saved(array) and result["half"] == as_saved(array.astype("f2"))
    assert result["quantised"] == (UNKNOWN, (100, 64), quantised.tobytes())
    ours = gguf._BLOCKS
    assert {int(kind): sizes for kind, sizes in library.GGML_QUANT_SIZES.items() if int(kind) in ours} == ours


def test_gguf_that_lies() -> None:
    """Counts, lengths and offsets beyond the file, and other versions, must be refused."""
    sound = gguf_file({"a": ((2, 5), 0, bytes(40))}, alignment=16)
    assert list(found(sound)) == ["a"]
    assert found(sound.replace(b"GGUF\3", b"GGUF\1")) == {}
    assert found(gguf_file({"a": ((2, 5), 0, bytes(30))})) == {}, "shorter than its shape"
    for at in (8, 16, 24):
        for value in (1 << 16, 1 << 62, (1 << 64) - 1):
            assert found(sound[:at] + value.to_bytes(8, "little") + sound[at + 8 :]) == {}
    assert (
        found(gguf_file({"a": ((2, 5), 0, bytes(40))}, alignment=16).replace(b"\4\0\0\0\20\0\0\0", b"\4" + bytes(7)))
        == {}
    )
    for length in range(len(sound) - 8):
        assert found(sound[:length]) == {}


# OCDBT


def frame(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


def node(length: int) -> bytes:
    return b"\x0c\xdb\x20\xde" + length.to_bytes(8, "little") + bytes(length - 12)


def test_values_of_ocdbt() -> None:
    """Each frame must be found, whatever its header says, between nodes and up to what is neither."""
    noise = np.random.default_rng(1).bytes(300_000)
    frames = [
        frame(noise),
        frame(b"x" * 200_000),
        frame(b""),
        frame(noise[:70_000], write_checksum=True),
        frame(noise[:90], write_content_size=False),
        zstandard.ZstdCompressor(level=1).compressobj().compress(b"") + frame(noise[:5000]),
    ]
    data = frames[0] + node(90) + b"".join(frames[1:]) + node(12) + bytes(700)
    assert [value[2] for value in found(data).values()] == frames
    assert {value[0] for value in found(data).values()} == {UNKNOWN}
    assert [value[2] for value in found(node(50) + frames[0]).values()] == frames[:1]


def test_a_value_keeps_its_name() -> None:
    """A frame must be called the same in whatever file and place it lies, and another frame otherwise."""
    frames = [frame(np.random.default_rng(at).bytes(900)) for at in range(3)]
    before, after = found(frames[0] + frames[1] + node(30)), found(node(90) + frames[2] + frames[0])
    assert len({*before, *after}) == 3
    assert [name for name in before if name in after] == [name for name in before if before[name][2] == frames[0]]


def test_one_frame_is_a_compressed_file() -> None:
    """It is cut by content, as before; so is what lies about its length."""
    one = frame(bytes(1000))
    for data in (one, one[:-1], node(50), one + b"rest of something", node(50)[:4] + bytes(8), one + one[:-2]):
        assert found(data) == {}


def test_shards_of_zarr3() -> None:
    """The index that ends a shard must be skipped, of one chunk or several; another ends what is found."""
    frames = [frame(bytes([at]) * 999 + np.random.default_rng(at).bytes(500 + at)) for at in range(4)]

    def index(*chunks: bytes) -> bytes:
        at, entries = 0, b""
        for chunk in chunks:
            entries += at.to_bytes(8, "little") + len(chunk).to_bytes(8, "little")
            at += len(chunk)
        return entries + b"crc!"

    data = frames[0] + index(frames[0]) + frames[1] + frames[2] + index(*frames[1:3]) + frames[3] + index(frames[3])
    assert [value[2] for value in found(data + node(40)).values()] == frames
    lying = frames[0] + frames[1] + index(frames[1], frames[0]) + frames[2]
    assert [value[2] for value in found(lying).values()] == frames[:2]
