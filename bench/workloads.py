"""What trainers do to a checkpoint: save it, load it. Real calls on real objects, whose content is new each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

_BLOCK_BYTES = 64 << 20


class Workload(Protocol):
    """One object in memory and the library that saves it."""

    name: str
    suffix: str

    def change(self) -> None:
        """Give every part other content: a save must not find its chunks stored already."""
        ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> Any:
        """What is timed."""
        ...

    def matches(self, loaded: Any) -> bool:
        """Whether *loaded* is what was saved, by every byte."""
        ...


class NumpyArray:
    """np.save and np.load of one float32 array."""

    name, suffix = "numpy", ".npy"

    def __init__(self, size_bytes: int) -> None:
        self._array = np.random.default_rng(1).standard_normal(size_bytes // 4, np.float32)

    def change(self) -> None:
        self._array *= np.float32(1.001)

    def save(self, path: Path) -> None:
        np.save(path, self._array)

    def load(self, path: Path) -> Any:
        return np.load(path)

    def matches(self, loaded: Any) -> bool:
        return bool(np.array_equal(loaded, self._array))


class TorchCheckpoint:
    """torch.save and torch.load of a transformer's state dict with that of its Adam optimizer."""

    name, suffix = "torch", ".pt"

    def __init__(self, size_bytes: int) -> None:
        import torch

        self._torch = torch
        torch.manual_seed(1)
        width = 1024 if size_bytes >= 1 << 29 else 256  # a layer of 1024 is 150 MB
        layers = max(1, round(size_bytes / (12 * width * width * 4 * 3)))  # 12 w^2 weights a layer, two moments each
        with torch.device("meta"):
            layer = torch.nn.TransformerEncoderLayer(width, 16, 4 * width)
        shapes = {name: value.shape for name, value in layer.state_dict().items()}
        model = {
            f"layers.{i}.{name}": torch.randn(shape) * 0.02 for i in range(layers) for name, shape in shapes.items()
        }
        parameters = [torch.nn.Parameter(value) for value in model.values()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        state = {
            i: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(each), "exp_avg_sq": torch.rand_like(each)}
            for i, each in enumerate(parameters)
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        self._state = {"model": model, "optimizer": optimizer.state_dict(), "epoch": 1}
        self._tensors = list(model.values()) + [
            value for each in self._state["optimizer"]["state"].values() for value in each.values()
        ]

    def change(self) -> None:
        for tensor in self._tensors:
            tensor.mul_(1.001)

    def save(self, path: Path) -> None:
        self._torch.save(self._state, path)

    def load(self, path: Path) -> Any:
        return self._torch.load(path, weights_only=True)

    def matches(self, loaded: Any) -> bool:
        found = list(loaded["model"].values()) + [
            value for each in loaded["optimizer"]["state"].values() for value in each.values()
        ]
        return len(found) == len(self._tensors) and all(
            self._torch.equal(one, other) for one, other in zip(found, self._tensors, strict=True)
        )


class SafetensorsFile:
    """save_file and load_file of safetensors: forty float32 matrices."""

    name, suffix = "safetensors", ".safetensors"

    def __init__(self, size_bytes: int) -> None:
        random = np.random.default_rng(1)
        rows = size_bytes // 4 // 1024 // 40
        self._weights = {f"layers.{i}.weight": random.standard_normal((rows, 1024), np.float32) for i in range(40)}

    def change(self) -> None:
        for value in self._weights.values():
            value *= np.float32(1.001)

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(self._weights, path)

    def load(self, path: Path) -> Any:
        from safetensors.numpy import load_file

        return load_file(path)

    def matches(self, loaded: Any) -> bool:
        return loaded.keys() == self._weights.keys() and all(
            np.array_equal(loaded[name], value) for name, value in self._weights.items()
        )


def save_streamed(path: Path, size_bytes: int, seed: int) -> None:
    """A .npy file of float32 weights, also of more than fits in memory; every *seed* has content of its own.

    At the speed of memory: a block of random weights is scaled a little for each further block, which changes every
    number and compresses as weights do.
    """
    length = min(_BLOCK_BYTES, size_bytes) // 4
    block = np.random.default_rng(seed).standard_normal(length, np.float32) * np.float32(0.02)
    with open(path, "wb", buffering=0) as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (size_bytes // 4,)}
        np.lib.format.write_array_header_1_0(file, header)
        left = size_bytes // 4 * 4
        while left:
            left -= file.write(memoryview(block).cast("B")[:left])
            block *= np.float32(1.001)


def available() -> dict[str, type[NumpyArray] | type[TorchCheckpoint] | type[SafetensorsFile]]:
    """The workloads whose libraries are installed."""
    from importlib.util import find_spec

    found: dict[str, Any] = {"numpy": NumpyArray}
    if find_spec("torch"):
        found["torch"] = TorchCheckpoint
    if find_spec("safetensors"):
        found["safetensors"] = SafetensorsFile
    return found
