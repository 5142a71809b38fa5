"""What is saved on a mount is read back equal there, after a remount, and on a machine that has only the remote.

Every case is written into a directory of its own on one mount; then that is unmounted and mounted again, and a second
store is filled from the bucket alone. In all three places each case reads its files with the library that wrote them,
and bytes, modes, link counts, mtimes and extended attributes of all names are what they were.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.conftest import QUICK
from tests.frameworks.places import Seen, sha256, snapshot
from tests.support.mounts import Site
from tests.support.seaweed import Seaweed

h5py = pytest.importorskip("h5py")
torch = pytest.importorskip("torch")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(150)

TUNING = {"piece_bytes": 32 << 10, "small_bytes": 2 << 10, "cdc_bytes": 8 << 10, "pack_bytes": 1 << 20}
"""Small files are many chunks, and 17 MiB are not hundreds of objects."""
RECORD = 100
APPEND = """
import os, sys
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(path, "ab", buffering=0) as file:
    for number in range(count):
        file.write(f"{name} {number}".encode().ljust(99, b".") + b"\\n")
"""


def array(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def state(seed: int) -> dict[str, Any]:
    """A small model's and optimizer's state."""
    return {
        "weight": torch.from_numpy(array(seed, 64, 300)),
        "half": torch.from_numpy(array(seed + 1, 5000)).to(torch.bfloat16),
        "bias": torch.zeros(64),
        "step": torch.tensor(seed),
        "none": torch.empty(0, 4),
    }


def same_state(found: dict[str, Any], seed: int) -> None:
    expected = state(seed)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# Cases: each writes into an empty directory, and checks what it finds in one, wherever that is


class TorchSave:
    """torch.save: a file object, a path, saved over, with links beside it as timm and Lightning make them."""

    def write(self, here: Path) -> None:
        with open(here / "object.pt", "wb") as file:
            torch.save(state(1), file)
        torch.save(state(2), here / "model.pt")
        torch.save({"model": state(3), "epoch": 7}, here / "model.pt")
        torch.save(state(4), here / "legacy.pt", _use_new_zipfile_serialization=False)
        os.link(here / "model.pt", here / "last.pt")
        os.symlink("model.pt", here / "best.pt")
        os.chmod(here / "object.pt", 0o640)

    def check(self, here: Path) -> None:
        same_state(torch.load(here / "object.pt", weights_only=True), 1)
        for name in ("model.pt", "last.pt", "best.pt"):
            loaded = torch.load(here / name, weights_only=True)
            assert loaded["epoch"] == 7
            same_state(loaded["model"], 3)
        same_state(torch.load(here / "model.pt", weights_only=True, mmap=True)["model"], 3)
        same_state(torch.load(here / "legacy.pt", weights_only=True), 4)
        assert (here / "model.pt").stat().st_ino == (here / "last.pt").stat().st_ino


class NumpySave:
    """np.save, also past the 16 MiB from which it calls fallocate; savez; tofile into an appender."""

    def write(self, here: Path) -> None:
        np.save(here / "small.npy", array(1, 37, 41))
        np.save(here / "fortran.npy", np.asfortranarray(array(2, 37, 41)))
        np.save(here / "large.npy", np.arange(17 << 20, dtype=np.uint8))
        np.savez(here / "many.npz", a=array(3, 100, 100), b=array(4, 9), empty=np.zeros((0, 3)))
        np.savez_compressed(here / "packed.npz", a=array(3, 100, 100))
        with open(here / "appended", "ab") as file:
            file.write(b"head")
            file.flush()
            array(5, 1000).tofile(file)

    def check(self, here: Path) -> None:
        assert np.array_equal(np.load(here / "small.npy"), array(1, 37, 41))
        fortran = np.load(here / "fortran.npy")
        assert fortran.flags.f_contiguous and np.array_equal(fortran, array(2, 37, 41))
        large = np.load(here / "large.npy", mmap_mode="r")
        assert np.array_equal(large, np.arange(17 << 20, dtype=np.uint8))
        with np.load(here / "many.npz") as many:
            assert sorted(many) == ["a", "b", "empty"]
            assert np.array_equal(many["a"], array(3, 100, 100)) and np.array_equal(many["b"], array(4, 9))
        with np.load(here / "packed.npz") as packed:
            assert np.array_equal(packed["a"], array(3, 100, 100))
        assert (here / "appended").read_bytes() == b"head" + array(5, 1000).tobytes()


class Memmap:
    """np.memmap: w+, r+, r, c; read() sees what was stored through the map; truncate and map again to grow."""

    shape = (60, 500)

    def write(self, here: Path) -> None:
        mapped = np.memmap(here / "map", np.float32, "w+", shape=self.shape)
        mapped[:] = array(1, *self.shape)
        mapped.flush()
        assert (here / "map").read_bytes() == array(1, *self.shape).tobytes()
        del mapped
        again = np.memmap(here / "map", np.float32, "r+", shape=self.shape)
        again[7] = 7
        again.flush()
        del again
        private = np.memmap(here / "map", np.float32, "c", shape=self.shape)
        private[8] = 8  # must not reach the file
        del private
        os.truncate(here / "map", 2 * array(1, *self.shape).nbytes)
        grown = np.memmap(here / "map", np.float32, "r+", shape=(120, 500))
        grown[100] = 100
        del grown  # without flush: unmapping is enough

    def check(self, here: Path) -> None:
        expected = np.zeros((120, 500), np.float32)
        expected[:60] = array(1, *self.shape)
        expected[7], expected[100] = 7, 100
        mapped = np.memmap(here / "map", np.float32, "r", shape=(120, 500))
        assert np.array_equal(mapped, expected)
        assert (here / "map").read_bytes() == expected.tobytes()


class Safetensors:
    """save_file and load_file of torch and numpy; over an existing file; over the very file that was loaded."""

    def write(self, here: Path) -> None:
        safetensors_numpy.save_file({"a": array(1, 300, 70), "b": array(2, 3)}, here / "numpy.safetensors")
        safetensors_torch.save_file(state(1), here / "model.safetensors", metadata={"format": "pt"})
        loaded = safetensors_torch.load_file(here / "model.safetensors")
        same_state(loaded, 1)
        safetensors_torch.save_file(loaded, here / "model.safetensors")
        same_state(loaded, 1)  # still mapped, from the file that was replaced
        same_state(safetensors_torch.load_file(here / "model.safetensors"), 1)
        safetensors_torch.save_file(state(2), here / "model.safetensors")
        safetensors_torch.save_file(state(3), here / "private.safetensors")
        os.chmod(here / "private.safetensors", 0o600)
        assert sorted(os.listdir(here)) == ["model.safetensors", "numpy.safetensors", "private.safetensors"]

    def check(self, here: Path) -> None:
        same_state(safetensors_torch.load_file(here / "model.safetensors"), 2)
        same_state(safetensors_torch.load_file(here / "private.safetensors"), 3)
        found = safetensors_numpy.load_file(here / "numpy.safetensors")
        assert np.array_equal(found["a"], array(1, 300, 70)) and np.array_equal(found["b"], array(2, 3))


class Hdf5:
    """h5py: 'w' with 20 resizable datasets and flushes, then 'r+' and 'a'; it seeks back and takes locks."""

    def write(self, here: Path) -> None:
        with h5py.File(here / "data.h5", "w") as file:
            for number in range(20):
                file.create_dataset(f"set{number}", data=array(number, 10, 20), maxshape=(None, 20), chunks=(16, 20))
                file.flush()
            for number in range(20):
                file[f"set{number}"].resize(30, axis=0)
                file[f"set{number}"][10:] = array(100 + number, 20, 20)
                file.flush()
        with h5py.File(here / "data.h5", "r+") as file:
            file["set3"][0] = 3
            del file["set19"]
        with h5py.File(here / "data.h5", "a") as file:
            file.attrs["epoch"] = 4
            file.create_dataset("late", data=array(50, 5000))

    def check(self, here: Path) -> None:
        with h5py.File(here / "data.h5", "r") as file:
            assert sorted(file) == sorted([*(f"set{number}" for number in range(19)), "late"])
            for number in range(19):
                expected = np.concatenate([array(number, 10, 20), array(100 + number, 20, 20)])
                if number == 3:
                    expected[0] = 3
                assert np.array_equal(file[f"set{number}"][:], expected), number
            assert file.attrs["epoch"] == 4
            assert np.array_equal(file["late"][:], array(50, 5000))


def make_tree(root: Path) -> None:
    """A tree with what copying programs must keep: modes, old times, attributes, links, holes, odd names."""
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "model.bin").write_bytes(array(1, 20000).tobytes())
    (root / "sub" / "größe 1\n.json").write_text("{}")
    (root / "sub" / "zero").touch()
    with open(root / "sub" / "sparse", "wb") as file:
        file.write(b"begin")
        file.seek(300_000)
        file.write(b"end")
    os.link(root / "model.bin", root / "sub" / "same.bin")
    os.symlink("../model.bin", root / "sub" / "link")
    os.symlink("nowhere", root / "dangling")
    os.setxattr(root / "model.bin", "user.origin", b"run 7")
    os.setxattr(root / "sub", "user.note", b"\x00\xff")
    os.chmod(root / "model.bin", 0o440)
    os.chmod(root / "sub" / "zero", 0o755)
    os.chmod(root / "sub" / "empty", 0o2750)
    for at, path in enumerate(sorted(root.rglob("*"), reverse=True)):  # what is inside comes before its directory
        os.utime(path, ns=(10**18 + at, 10**18 + 111_111_111 * at + 7), follow_symlinks=False)
    os.utime(root, ns=(10**18, 10**18 + 5))


class Copies:
    """The same tree by copytree, cp -a, rsync -a and tar, there and back, with and without what each leaves out."""

    def __init__(self) -> None:
        self.source: dict[str, Seen] = {}

    def write(self, here: Path) -> None:
        origin = here.parent.parent / f"{here.name}-origin"  # beside the mount, on the plain disk
        make_tree(origin)
        self.source = snapshot(origin)
        shutil.copytree(origin, here / "copytree", symlinks=True)
        run("cp", "-a", origin, here / "cp")
        run("cp", "-a", here / "cp", here / "cp-inside")
        run("rsync", "-aHX", f"{origin}/", f"{here}/rsync/")
        run("rsync", "-aHX", "--inplace", f"{origin}/", f"{here}/rsync/")
        archive = here / "tree.tar"
        run("tar", "--xattrs", "-C", origin, "-cf", archive, ".")
        (here / "tar").mkdir()
        run("tar", "--xattrs", "-C", here / "tar", "-xpf", archive)
        with tarfile.open(here / "python.tar", "w") as made:
            made.add(here / "cp", ".")
        back = here.parent.parent / f"{here.name}-back"
        run("cp", "-a", here / "cp", back)
        assert snapshot(back) == self.source
        shutil.move(back, here / "moved")

    def check(self, here: Path) -> None:
        for name in ("cp", "cp-inside", "rsync", "tar"):
            assert snapshot(here / name) == self.source, name
        for name in ("copytree", "moved"):  # shutil knows no hard links
            found = snapshot(here / name)
            assert found.pop("model.bin").nlink == found.pop("sub/same.bin").nlink == 1
            assert found == {name: seen for name, seen in self.source.items() if name in found}
            assert len(found) == len(self.source) - 2
            assert sha256(here / name / "sub" / "same.bin") == self.source["model.bin"].content
        with tarfile.open(here / "python.tar") as made:
            member = made.extractfile("./model.bin")
            assert member is not None and member.read() == array(1, 20000).tobytes()


class Appender:
    """A TensorBoard-like log: kept open with flushes now and then; reopened ten times; shared by two processes."""

    def write(self, here: Path) -> None:
        with open(here / "events", "ab") as file:
            for number in range(50):
                file.write(f"event {number}\n".encode() * 20)
                if number % 10 == 9:
                    file.flush()
                    assert (here / "events").read_bytes() == events(number + 1)
        for number in range(10):
            with open(here / "reopened", "ab") as file:
                assert file.tell() == number * RECORD
                file.write(b"%d" % number * RECORD)
        writers = [
            subprocess.Popen([sys.executable, "-c", APPEND, str(here / "shared"), name, "1000"]) for name in "ab"
        ]
        assert [writer.wait(60) for writer in writers] == [0, 0]

    def check(self, here: Path) -> None:
        assert (here / "events").read_bytes() == events(50)
        assert (here / "reopened").read_bytes() == b"".join(b"%d" % number * RECORD for number in range(10))
        lines = (here / "shared").read_bytes().splitlines()
        assert len(lines) == 2000 and {len(line) for line in lines} == {RECORD - 1}
        for name in (b"a", b"b"):
            numbers = [int(line.split()[1].rstrip(b".")) for line in lines if line.startswith(name)]
            assert numbers == list(range(1000))


def events(count: int) -> bytes:
    return b"".join(f"event {number}\n".encode() * 20 for number in range(count))


class Parts:
    """Processes that write disjoint parts of one file, unaligned, each with an open of its own."""

    size = 400_003
    code = """
import sys
path, first = sys.argv[1], int(sys.argv[2])
with open(path, "r+b") as file:
    for at in range(first * 7001, 400_003, 2 * 7001):
        file.seek(at)
        file.write(bytes([65 + first]) * min(7001, 400_003 - at))
"""

    def write(self, here: Path) -> None:
        with open(here / "checkpoint", "wb") as file:
            file.truncate(self.size)
        writers = [
            subprocess.Popen([sys.executable, "-c", self.code, str(here / "checkpoint"), str(number)])
            for number in range(2)
        ]
        assert [writer.wait(60) for writer in writers] == [0, 0]

    def check(self, here: Path) -> None:
        data = b"".join((b"A" if number % 2 == 0 else b"B") * 7001 for number in range(58))
        assert (here / "checkpoint").read_bytes() == data[: self.size]


CASES: list[Any] = [TorchSave, NumpySave, Memmap, Safetensors, Hdf5, Copies, Appender, Parts]
NUMBERS = {Hdf5: "022", Memmap: "024", Appender: "027", Copies: "032"}
"""Of the numbered cases."""


def name(case: type) -> str:
    return f"case_{NUMBERS[case]}_{case.__name__}" if case in NUMBERS else case.__name__


def run(*command: str | Path) -> None:
    done = subprocess.run([os.fspath(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@dataclass
class Trip:
    """Everything written once, and where it can be seen."""

    cases: dict[type, Any] = field(default_factory=dict)
    failures: dict[type, str] = field(default_factory=dict)
    """Tracebacks."""
    written: dict[type, dict[str, Seen]] = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)


@pytest.fixture(scope="module")
def trip(seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trip]:
    """All cases written on one mount, which was unmounted and mounted again; and a second store that got it all."""
    directory = tmp_path_factory.mktemp("trip")
    name = seaweed.create_bucket("frameworks")
    made = Trip()
    with (
        Site(directory, environment=seaweed.environment(), name="here", tuning=TUNING) as here,
        Site(directory, environment=seaweed.environment(), name="elsewhere", tuning=TUNING) as elsewhere,
    ):
        here.mount("--remote", f"s3://{name}/run", *QUICK)
        for case in CASES:
            place = here.mountpoint / case.__name__
            place.mkdir()
            made.cases[case] = case()
            try:
                made.cases[case].write(place)
                made.cases[case].check(place)
            except Exception:
                made.failures[case] = traceback.format_exc()
        made.written = {case: snapshot(here.mountpoint / case.__name__) for case in CASES}
        here.umount()
        here.mount()
        elsewhere.mount("--remote", f"s3://{name}/run", *QUICK)
        made.places = {"after a remount": here.mountpoint, "from the remote alone": elsewhere.mountpoint}
        yield made
        for site in (here, elsewhere):
            site.umount()
            assert "Traceback" not in site.log(), site.log()
    seaweed.delete_bucket(name)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_saved_on_a_mount_reads_back_equal(trip: Trip, case: type) -> None:
    """While it is written and right after, the case finds what it expects on the mount."""
    assert case not in trip.failures, trip.failures[case]


@pytest.mark.parametrize("place", ["after a remount", "from the remote alone"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_same_in_another_place(trip: Trip, case: type, place: str) -> None:
    """Bytes, modes, times, links and attributes are the same there, and the library that wrote them reads them."""
    if case in trip.failures:
        pytest.skip("not written")
    directory = trip.places[place] / case.__name__
    found, written = snapshot(directory), trip.written[case]
    assert found.keys() == written.keys()
    assert {name: (found[name], seen) for name, seen in written.items() if found[name] != seen} == {}
    trip.cases[case].check(directory)
