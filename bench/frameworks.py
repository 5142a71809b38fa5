"""How training frameworks write named arrays: each a `Workload` over one big array or over a train state of many.

A library that is not installed is left out by `available`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .workloads import Workload

Arrays = dict[str, np.ndarray]

_LAYERS = 12


def one_array(size_bytes: int) -> Arrays:
    return {"array": np.random.default_rng().standard_normal(size_bytes // 4, np.float32)}


def train_state(size_bytes: int) -> Arrays:
    """Parameters of a transformer of twelve layers and their two moments: 360 arrays, from a few KB to many MB."""
    width = max(8, round((size_bytes / 4 / 3 / _LAYERS / 12) ** 0.5))  # 12 w^2 numbers a layer
    square, wide, vector = (width, width), (width, 4 * width), (width,)
    shapes: dict[str, tuple[int, ...]] = {f"attention.{name}": square for name in "qkvo"} | {
        "mlp.up": wide,
        "mlp.down": wide[::-1],
    }
    shapes |= {f"norm.{number}": vector for number in range(4)}
    random = np.random.default_rng()
    return {
        f"{part}.layer-{layer}.{name}": random.standard_normal(shape, np.float32)
        for part in ("params", "mu", "nu")
        for layer in range(_LAYERS)
        for name, shape in shapes.items()
    }


SHAPES: dict[str, Callable[[int], Arrays]] = {"array": one_array, "state": train_state}


class _Arrays(ABC):
    """What all of them share: content that changes, and comparing it. Loading gives the arrays by name."""

    name = suffix = ""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def change(self) -> None:
        for each in self._arrays.values():
            each *= np.float32(1.001)

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> Any: ...

    def matches(self, loaded: Any) -> bool:
        return loaded.keys() == self._arrays.keys() and all(
            np.array_equal(np.asarray(loaded[name]), each) for name, each in self._arrays.items()
        )


class Numpy(_Arrays):
    """np.save and np.load: of the array itself, or of a state as one pickled object."""

    name, suffix = "numpy", ".npy"

    def save(self, path: Path) -> None:
        if len(self._arrays) == 1:
            np.save(path, self._arrays["array"])
        else:
            np.save(path, np.array(self._arrays, dtype=object), allow_pickle=True)

    def load(self, path: Path) -> Any:
        if len(self._arrays) == 1:
            return {"array": np.load(path)}
        return np.load(path, allow_pickle=True).item()


class Torch(_Arrays):
    """torch.save and torch.load of a dictionary of tensors."""

    name, suffix = "torch", ".pt"

    def save(self, path: Path) -> None:
        import torch

        torch.save({name: torch.from_numpy(each) for name, each in self._arrays.items()}, path)

    def load(self, path: Path) -> Any:
        import torch

        return torch.load(path, weights_only=True)


class FlaxMsgpack(_Arrays):
    """flax.serialization: one message, built in memory and written whole."""

    name, suffix = "flax msgpack", ".msgpack"

    def save(self, path: Path) -> None:
        from flax import serialization

        path.write_bytes(serialization.msgpack_serialize(dict(self._arrays)))

    def load(self, path: Path) -> Any:
        from flax import serialization

        return serialization.msgpack_restore(path.read_bytes())


class Tensorstore(_Arrays):
    """One zarr array each, uncompressed, in one chunk; written and read all at once."""

    name, suffix = "tensorstore", ".zarr"

    def save(self, path: Path) -> None:
        writes = []
        for name, each in self._arrays.items():
            metadata = {"shape": each.shape, "chunks": each.shape, "dtype": each.dtype.str, "compressor": None}
            writes.append(self._open(path / name, create=True, metadata=metadata).write(each))
        for write in writes:
            write.result()

    def load(self, path: Path) -> Any:
        reads = {name: self._open(path / name).read() for name in self._arrays}
        return {name: read.result() for name, read in reads.items()}

    @staticmethod
    def _open(path: Path, **how: Any) -> Any:
        import tensorstore

        return tensorstore.open({"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}, **how}).result()


class Orbax(_Arrays):
    """Orbax's PyTreeCheckpointer, as it comes."""

    name, suffix = "orbax", ".orbax"

    def save(self, path: Path) -> None:
        self._checkpointer().save(path, dict(self._arrays))

    def load(self, path: Path) -> Any:
        return self._checkpointer().restore(path)

    @staticmethod
    def _checkpointer() -> Any:
        from orbax import checkpoint

        return checkpoint.PyTreeCheckpointer()


_LIBRARIES = {
    "numpy": (Numpy, ()),
    "torch": (Torch, ("torch",)),
    "flax": (FlaxMsgpack, ("flax",)),
    "tensorstore": (Tensorstore, ("tensorstore",)),
    "orbax": (Orbax, ("orbax", "jax")),
}


def available() -> list[str]:
    """The libraries that are installed."""
    return [name for name, (_, needed) in _LIBRARIES.items() if all(map(find_spec, needed))]


def missing() -> list[str]:
    return [name for name in _LIBRARIES if name not in available()]


class Build:
    """Makes a workload of a library and a shape; can be sent to another process, unlike what it makes."""

    def __init__(self, library: str, shape: str) -> None:
        self._library = library
        self._shape = shape

    def __call__(self, size_bytes: int) -> Workload:
        return _LIBRARIES[self._library][0](SHAPES[self._shape](size_bytes))

    @property
    def suffix(self) -> str:
        return _LIBRARIES[self._library][0].suffix
