"""The same tensors are the same chunks in whatever file they lie: 99 % of their bytes, for each way of saving them."""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptfs.config import Tuning
from ckptfs.formats.base import BytesSource
from ckptfs.formats.cutting import cut
from ckptfs.formats.recognise import recognise
from ckptfs.ids import digest
from tests.support.apart import apart
from tests.support.ggml import gguf_file

State = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
Save = Callable[[State, Path], None]

torch = pytest.importorskip("torch")


@cache
def state() -> State:
    """Matrices of some hundred KiB to 3 MiB, and a few small ones."""
    rng = np.random.default_rng(7)
    shapes = [(1024, 300), (333, 777), (70_000,), (3000, 257), (12,), (64, 257), (1 << 19,), (384,)]
    return {f"layer.{at}.weight": rng.standard_normal(shape).astype("f4") for at, shape in enumerate(shapes)}


def torch_state(arrays: State) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_safetensors(arrays: State, path: Path) -> None:
    pytest.importorskip("safetensors.numpy").save_file(arrays, path)


def as_safetensors_with_metadata(arrays: State, path: Path) -> None:
    pytest.importorskip("safetensors.numpy").save_file(arrays, path, metadata={"format": "pt", "more": "x" * 999})


def as_torch(arrays: State, path: Path) -> None:
    torch.save(torch_state(arrays), path)


def as_torch_of_another_name(arrays: State, path: Path) -> None:
    torch.save(torch_state(arrays), path.with_name("another-name-for-the-archive.pt"))


def as_torch_in_another_order(arrays: State, path: Path) -> None:
    torch.save(dict(reversed(torch_state(arrays).items())), path)


def as_torch_with_a_longer_pickle(arrays: State, path: Path) -> None:
    torch.save({"config": {str(at): "x" * at for at in range(300)}, "model": torch_state(arrays)}, path)


def as_torch_with_another_group(arrays: State, path: Path) -> None:
    """As the optimizer's moments, in two groups of parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(array.shape)) for array in arrays.values()]
    optimizer = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}])
    for parameter, array in zip(parameters, arrays.values(), strict=True):
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.from_numpy(array)}
    torch.save({"optimizer": optimizer.state_dict(), "epoch": 3}, path)


def as_legacy_torch(arrays: State, path: Path) -> None:
    torch.save(torch_state(arrays), path, _use_new_zipfile_serialization=False)


def as_nemo(arrays: State, path: Path) -> None:
    """A tar archive of a configuration and a torch file."""
    weights = io.BytesIO()
    torch.save(torch_state(arrays), weights)
    with tarfile.open(path, "w:") as archive:
        for name, data in (("./model_config.yaml", b"name: m\n"), ("./model_weights.ckpt", weights.getvalue())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def as_npz(arrays: State, path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def as_dcp(arrays: State, path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about running without a process group
        dcp.save({"model": torch_state(arrays), "step": 5}, checkpoint_id=path, no_dist=True)


def as_dcp_of_several_files(arrays: State, path: Path) -> None:
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    writer = filesystem.FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": torch_state(arrays), "step": 5}, storage_writer=writer, no_dist=True)


def as_dcp_safetensors(arrays: State, path: Path) -> None:
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(torch_state(arrays), storage_writer=storage.HuggingFaceStorageWriter(str(path)), no_dist=True)


def as_hdf5(arrays: State, path: Path) -> None:
    """As Keras does: groups in groups, by the names of layers."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = list(arrays)
        for name, array in arrays.items():
            file.create_dataset("model_weights/" + name.replace(".", "/") + ":0", data=array)


def as_latest_hdf5(arrays: State, path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w", libver="latest") as file:
        for name, array in arrays.items():
            file[name] = array


def as_chunked_hdf5(arrays: State, path: Path) -> None:
    """In chunks of rows, which follow each other in the file."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=(-(-len(array) // 7), *array.shape[1:]))


def as_keras(arrays: State, path: Path) -> None:
    """A stored ZIP archive of a configuration and an HDF5 file."""
    zipfile = pytest.importorskip("zipfile")
    inner = path.with_suffix(".inner")
    as_hdf5(arrays, inner)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(inner, "model.weights.h5")
    inner.unlink()


def as_flax(arrays: State, path: Path) -> None:
    path.write_bytes(apart(flax_bytes, arrays, None, needs=("flax",)))


def flax_bytes(arrays: State, part_bytes: int | None) -> bytes:
    """As flax saves *arrays*, with parts of *part_bytes*."""
    from flax import serialization

    serialization.MAX_CHUNK_SIZE = part_bytes or serialization.MAX_CHUNK_SIZE
    return bytes(serialization.to_bytes({"params": arrays, "step": 5}))


def as_gguf(arrays: State, path: Path) -> None:
    path.write_bytes(gguf_file({name: (array.shape, 0, array.tobytes()) for name, array in arrays.items()}))


WAYS: list[Save] = [
    as_safetensors, as_safetensors_with_metadata, as_torch, as_torch_of_another_name, as_torch_in_another_order,
    as_torch_with_a_longer_pickle, as_torch_with_another_group, as_legacy_torch, as_nemo, as_npz, as_dcp,
    as_dcp_of_several_files, as_dcp_safetensors, as_hdf5, as_latest_hdf5, as_chunked_hdf5, as_keras, as_flax,
    as_gguf,
]  # fmt: skip


def chunks(data: bytes, tuning: Tuning | None = None) -> dict[bytes, int]:
    """Digest and length of every chunk of a file."""
    source = BytesSource(data)
    pieces = cut(len(data), recognise(source), [(0, len(data))], tuning or Tuning(), source.read)
    return {digest(data[piece.start : piece.end]): piece.end - piece.start for piece in pieces}


@cache
def plain_chunks(tuning: Tuning | None = None) -> frozenset[bytes]:
    """The chunks of the arrays' own bytes, each in a file of nothing else."""
    found: set[bytes] = set()
    for array in state().values():
        file = io.BytesIO()
        np.save(file, array)
        found |= chunks(file.getvalue(), tuning).keys()
    return frozenset(found)


STATE_BYTES = sum(array.nbytes for array in state().values())


@pytest.mark.parametrize("save", WAYS, ids=lambda save: save.__name__)
def test_a_state_is_the_same_chunks_however_it_is_saved(save: Save, tmp_path: Path) -> None:
    """At least 99 % of the tensors' bytes are chunks that the arrays have where each is alone in a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the frameworks, when they are imported
        save(state(), tmp_path / "state")
    found: dict[bytes, int] = {}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            found |= chunks(path.read_bytes())
    assert sum(length for name, length in found.items() if name in plain_chunks()) >= 0.99 * STATE_BYTES


def test_arrays_that_flax_saves_in_parts() -> None:
    """Arrays of more than 1 GiB are saved in parts of that; here all sizes are 512 times smaller."""
    data = apart(flax_bytes, state(), 1 << 21, needs=("flax",))
    tuning = Tuning(piece_bytes=1 << 11, edge_bytes=384, small_bytes=128)
    found = chunks(data, tuning)
    assert b"__msgpack_chunked_array__" in data
    assert sum(length for name, length in found.items() if name in plain_chunks(tuning)) >= 0.99 * STATE_BYTES


def save_with_orbax(directory: Path) -> None:
    """Two saves each with zarr 2 and zarr 3, of which some arrays are the same."""
    from orbax import checkpoint as ocp

    frozen, rng = {name: array for name, array in state().items() if array.nbytes > 100_000}, np.random.default_rng(8)
    for zarr3 in (False, True):
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=zarr3))
        for step in range(2):
            head = rng.standard_normal((256, 300 + 300 * step)).astype("f4")
            checkpointer.save(directory / f"{zarr3}-{step}", {"a": head, "frozen": frozen, "z": head + 1})


def test_frozen_arrays_of_two_saves_of_orbax(tmp_path: Path) -> None:
    """Of what did not change between two saves, 95 % of the bytes are chunks that the first save made."""
    apart(save_with_orbax, tmp_path, needs=("orbax", "jax"))
    made: list[dict[bytes, int]] = []
    for zarr3 in (False, True):
        for step in range(2):
            root = tmp_path / f"{zarr3}-{step}"
            files = (path.read_bytes() for path in root.rglob("*") if path.is_file())
            made.append(dict(pair for data in files for pair in chunks(data).items()))
        first, second = made[-2:]
        shared = sum(length for name, length in second.items() if name in first)
        compressed = sum(second.values()) - 2 * 256 * 600 * 4 * 0.9  # noise compresses to 92 or 93 % of it
        assert shared >= 0.95 * compressed
