"""What passthrough changes: the kernel serves whole images; maps and survivors write them without our being told."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import ckptfs
from tests.support.machines import Machines
from tests.support.maps import mapped
from tests.support.mounts import Site, until

STATE = "user.ckptfs.state"
MIB = 1 << 20
QUICK = ("--settle", "100ms", "--lag", "100ms")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
KEEP_SIZE, PUNCH_HOLE = 1, 2

HOLDER = """
import os, sys
from pathlib import Path
from tests.support.maps import mapped
path, way = Path(sys.argv[1]), sys.argv[2]
new = open(path, "w+b", buffering=0)
new.truncate(1 << 20)
with mapped(path, writable=True) if way == "map" else new as held:
    if way == "map":
        new.close()
    print("holding", flush=True)
    for line in sys.stdin:
        at, text = line.split()
        if way == "map":
            held[int(at) : int(at) + len(text)] = text.encode()
        else:
            os.pwrite(held.fileno(), text.encode(), int(at))
        print("written", flush=True)
"""
"""Holds a file of 1 MiB, as a map alone or as a descriptor too, and writes what it is told to, where it is told to."""


class Holder:
    """A process that holds a file and can write it."""

    def __init__(self, path: Path, way: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), way],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("holding")

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, at: int, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{at} {text}\n")
        self._process.stdin.flush()
        self._answer("written")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def _answer(self, expected: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{expected}\n"


@contextmanager
def holding(path: Path, way: str = "map") -> Iterator[Holder]:
    holder = Holder(path, way)
    try:
        yield holder
    finally:
        holder.end()


@pytest.fixture
def served(site: Site) -> Site:
    """A mount with passthrough; the tests that need one are skipped where the kernel does not offer it."""
    site.mount()
    if not site.has_passthrough():
        pytest.skip(f"no passthrough here: {site.status()['mount']['passthrough']['reason']}")
    return site


def state(path: Path) -> str:
    return os.getxattr(path, STATE).decode()


def test_status_says_whether_and_why_not(site: Site) -> None:
    """`--passthrough=off` is remembered and told; `auto` says on, or why not."""
    site.mount("--passthrough", "off")
    assert site.status()["mount"]["passthrough"] == {"state": "off", "reason": "not asked for"}
    assert "passthrough  off: not asked for" in site.run("status", str(site.mountpoint)).out
    site.umount()
    site.mount()
    assert site.status()["mount"]["passthrough"]["state"] == "off", "the store remembers it"
    site.umount()
    site.mount("--passthrough", "auto")
    found = site.status()["mount"]["passthrough"]
    assert found["state"] == "on" or found["reason"]


def test_on_refuses_to_mount_where_it_cannot_work(site: Site) -> None:
    """A store on overlayfs: `on` is one clear line and no mount, `auto` serves the bytes itself."""
    layers = site.store.parent / "layers"
    for name in ("lower", "upper", "work", "merged"):
        (layers / name).mkdir(parents=True)
    options = ",".join(f"{name}dir={layers / name}" for name in ("lower", "upper", "work"))
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(layers / "merged")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("overlayfs cannot be mounted here")
    try:
        site.store = layers / "merged" / "store"
        refused = site.try_mount("--passthrough", "on")
        assert refused.status != 0 and "--passthrough=on: the store lies on overlayfs" in refused.said
        assert not os.path.ismount(site.mountpoint)
        site.mount("--passthrough", "auto")
        assert "overlayfs" in site.status()["mount"]["passthrough"]["reason"]
        (site.mountpoint / "file").write_bytes(b"content")
        assert (site.mountpoint / "file").read_bytes() == b"content"
        site.umount()
    finally:
        site.__exit__()
        # a process of the daemon's that is just ending may still be in there
        until(lambda: subprocess.run(["umount", str(layers / "merged")]).returncode == 0, "the overlay to be free", 20)


def test_a_map_that_outlives_its_descriptor_keeps_the_file_unfinished(served: Site) -> None:
    """What is stored through the map after the last close is in what is sealed."""
    path = served.mountpoint / "array"
    with ExitStack() as stack:
        with open(path, "wb") as file:
            np.ones(MIB, np.uint32).tofile(file)
            file.flush()
            data = stack.enter_context(mapped(path, writable=True))
        array = data.cast("I")
        array[0] = 5
        assert not ckptfs.wait(path, "sealed", 1)
        assert state(path) == "writing"
        array[-1] = 7
        array.release()
        data.release()
    until(lambda: state(path) == "sealed", "the map's end to be noticed", 10)
    served.umount()
    served.mount()
    assert np.fromfile(path, np.uint32).tolist()[:2] == [5, 1]
    assert np.fromfile(path, np.uint32).tolist()[-2:] == [1, 7]


def test_a_map_is_published_when_it_ends(machines: Machines) -> None:
    """Elsewhere the file appears with everything that was stored through the map, and not before."""
    near, far = machines.site("near"), machines.site("far")
    here, there = machines.mount(near), machines.mount(far)
    with holding(here / "file") as holder:
        holder.write(1000, "early")
        (here / "beside").write_bytes(b"whole")
        assert not ckptfs.wait(here / "file", "replicated", 1)
        holder.write(500_000, "late")
        assert not (there / "file").exists()
    assert ckptfs.wait(here, "replicated", 30)
    until((there / "file").exists, "the file on the other machine")
    data = (there / "file").read_bytes()
    assert (len(data), data[1000:1005], data[500_000:500_004]) == (MIB, b"early", b"late")
    assert (there / "beside").read_bytes() == b"whole"


def test_a_sealed_file_is_written_through_a_map(site: Site) -> None:
    """np.memmap r+ on a sealed file: it is un-sealed, and sealed again with what was stored."""
    site.mount()
    path = site.mountpoint / "array"
    np.arange(MIB, dtype=np.uint32).tofile(path)
    for turn in range(3):
        assert ckptfs.wait(path, "sealed", 30)
        array = np.memmap(path, np.uint32, "r+")
        array[turn] = 1_000_000 + turn
        array.flush()
        del array
        assert np.fromfile(path, np.uint32)[turn] == 1_000_000 + turn
    assert ckptfs.wait(path, "sealed", 30)
    site.umount()
    site.mount()
    assert np.fromfile(path, np.uint32)[:4].tolist() == [1_000_000, 1_000_001, 1_000_002, 3]


def test_a_reader_sees_what_a_later_writer_writes(site: Site) -> None:
    """A sealed file is open and mapped for reading; another descriptor then writes, truncates and extends it."""
    site.mount()
    path = site.mountpoint / "file"
    path.write_bytes(b"a" * 100_000)
    assert ckptfs.wait(path, "sealed", 30)
    with open(path, "rb", buffering=0) as reader, mmap.mmap(reader.fileno(), 0, access=mmap.ACCESS_READ) as shared:
        assert shared[:4] == b"aaaa"
        with open(path, "r+b", buffering=0) as writer:
            writer.write(b"b" * 10)
            assert os.pread(reader.fileno(), 11, 0) == b"b" * 10 + b"a"
            assert shared[:11] == b"b" * 10 + b"a"
            writer.truncate(50_000)
            writer.seek(0, os.SEEK_END)
            writer.write(b"c" * 100)
            assert os.fstat(reader.fileno()).st_size == 50_100 == path.stat().st_size
            assert os.pread(reader.fileno(), 1000, 50_000) == b"c" * 100
    assert ckptfs.wait(path, "sealed", 30)
    assert path.read_bytes() == b"b" * 10 + b"a" * 49_990 + b"c" * 100


def test_sizes_and_times_of_a_file_being_written_are_fresh(site: Site) -> None:
    """stat by path shows what a descriptor wrote and what a map stored just before."""
    site.mount()
    path = site.mountpoint / "file"
    with open(path, "w+b", buffering=0) as file:
        for size in range(1000, 5000, 1000):
            file.write(b"x" * 1000)
            assert path.stat().st_size == size
        with mmap.mmap(file.fileno(), 4000) as shared:
            for _ in range(3):
                file.flush()
                os.fsync(file.fileno())  # the first store into a clean page tells the time
                os.utime(path, ns=(0, 1_000_000_000))
                shared[0:5] = os.urandom(5)
                shared.flush()
                assert path.stat().st_mtime_ns > 1_000_000_000
    assert path.stat().st_size == 4000


@pytest.mark.parametrize("way", ["map", "descriptor"])
def test_a_survivor_of_the_daemon_goes_on_writing(served: Site, way: str) -> None:
    """A program that the killed daemon served writes on; its file is sealed when it ends, with all that it wrote."""
    path = served.mountpoint / "file"
    with holding(path, way) as holder:
        holder.write(0, "before")
        (served.mountpoint / "beside").write_bytes(b"whole")
        served.kill()
        holder.write(1000, "orphaned")
        served.mount()
        assert ckptfs.wait(served.mountpoint / "beside", "sealed", 30)
        assert state(path) == "writing"
        assert path.read_bytes()[1000:1008] == b"orphaned"
        with open(path, "r+b", buffering=0) as file:  # the new daemon's own users write along
            os.pwrite(file.fileno(), b"new", 2000)
        holder.write(3000, "later")
        assert path.read_bytes()[2000:2003] == b"new"
        assert state(path) == "writing"
    until(lambda: state(path) == "sealed", "the survivor's end to be noticed", 10)
    served.umount()
    served.mount()
    data = path.read_bytes()
    written = [data[at : at + 8].rstrip(b"\0") for at in (0, 1000, 2000, 3000)]
    assert written == [b"before", b"orphaned", b"new", b"later"]


def test_a_survivor_does_not_hold_back_what_is_whole(machines: Machines) -> None:
    """With a remote: a map from before the kill keeps its own file back, and the rest is published around it."""
    near, far = machines.site("near"), machines.site("far")
    here = machines.mount(near)
    if not near.has_passthrough():
        pytest.skip("no passthrough here")
    with holding(here / "held") as holder:
        near.kill()
        here = machines.mount(near)
        (here / "after").write_bytes(b"whole")
        holder.write(10, "late")
        published = near.run("publish", str(here))
        assert published.status == 3 and "/held is open for writing" in published.err
        there = machines.mount(far)
        assert (there / "after").read_bytes() == b"whole"
        assert not (there / "held").exists() or (there / "held").read_bytes() == b""
    assert ckptfs.wait(here, "replicated", 30)
    until(lambda: (there / "held").exists() and (there / "held").read_bytes()[10:14] == b"late", "the held file")


def test_a_map_keeps_its_process_named_at_umount(served: Site) -> None:
    """The kernel would let go of a mount of which only maps are left; what they still store would be lost to it."""
    with holding(served.mountpoint / "file") as holder:
        refused = served.run("umount", str(served.mountpoint))
        assert refused.status != 0 and str(holder.pid) in refused.said
    until(lambda: state(served.mountpoint / "file") == "sealed", "the map's end to be noticed", 10)
    served.umount()


def test_fallocate(served: Site) -> None:
    """On a file being written: room, size and holes as on the disk, and EOPNOTSUPP, never ENOSYS, where we serve it."""
    path = served.mountpoint / "file"
    with open(path, "w+b", buffering=0) as file:
        fd = file.fileno()
        os.posix_fallocate(fd, 0, MIB)
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (MIB, MIB // 512)
        assert _libc.fallocate(fd, KEEP_SIZE, MIB, MIB) == 0
        assert os.fstat(fd).st_size == MIB
        file.write(b"x" * MIB)
        assert _libc.fallocate(fd, KEEP_SIZE | PUNCH_HOLE, 65536, 65536) == 0
        assert path.read_bytes() == b"x" * 65536 + bytes(65536) + b"x" * (MIB - 131072)
    assert ckptfs.wait(path, "sealed", 30)
    with open(path, "r+b", buffering=0) as file:  # sealed, so that we serve it
        assert _libc.fallocate(file.fileno(), KEEP_SIZE, 0, MIB) == -1
        assert ctypes.get_errno() == 95
    with open(served.mountpoint / "other", "wb", buffering=0) as file:
        assert _libc.fallocate(file.fileno(), KEEP_SIZE, 0, MIB) == 0, "the kernel still asks"


def test_a_file_becomes_whole_while_it_is_open(machines: Machines) -> None:
    """Elsewhere: read while it is fetched, mapped across the moment it is whole, opened again before and after."""
    near, far = machines.site("near"), machines.site("far")
    here, there = machines.mount(near), machines.mount(far)
    data = np.random.default_rng(5).bytes(2 * MIB)
    (here / "file").write_bytes(data)
    assert ckptfs.wait(here, "replicated", 30)
    until((there / "file").exists, "the file")
    with open(there / "file", "rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as part:
        assert part[MIB : MIB + 100] == data[MIB : MIB + 100]
        with open(there / "file", "rb") as second:
            assert second.read() == data
        assert part[:] == data
        with open(there / "file", "rb") as third:
            assert third.read() == data
    store = far.store / "images"
    until(lambda: any(f.stat().st_blocks * 512 >= 2 * MIB for f in store.glob("*/*")), "the image to be whole")
    with open(there / "file", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"changed", 1000)
    assert ckptfs.wait(there, "replicated", 30)
    until(lambda: (here / "file").read_bytes()[1000:1007] == b"changed", "the change")
    assert (there / "file").read_bytes() == data[:1000] + b"changed" + data[1007:]


def replace_by_truncation(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def replace_by_rename(path: Path, data: bytes) -> None:
    (path.parent / "aside").write_bytes(data)
    (path.parent / "aside").rename(path)


@pytest.mark.parametrize("replace", [replace_by_truncation, replace_by_rename])
def test_a_map_for_reading_outlives_the_file(served: Site, replace: Callable[[Path, bytes], None]) -> None:
    """As safe_open and torch.load(mmap=True) leave one: the tensors stay as they were when the path is saved anew."""
    path = served.mountpoint / "model"
    old, new = os.urandom(MIB), os.urandom(MIB)
    path.write_bytes(old)
    assert ckptfs.wait(path, "sealed", 30)
    with mapped(path) as data:
        replace(path, new)
        assert data == old
        assert ckptfs.wait(path, "sealed", 30)
        assert data == old and path.read_bytes() == new


def test_without_the_c_module_everything_works(site: Site) -> None:
    """Not built: the daemon serves the bytes, and status says why."""
    blocked = site.store.parent / "blocked"
    (blocked / "sitecustomize").mkdir(parents=True)
    (blocked / "sitecustomize" / "__init__.py").write_text(
        "import sys\nsys.modules['ckptfs_mount._passthrough'] = None  # importing it raises ImportError\n"
    )
    done = site.try_mount(PYTHONPATH=str(blocked))
    assert done.status == 0, done.said
    found = json.loads(site.run("status", "--json", str(site.mountpoint)).out)["mount"]["passthrough"]
    assert found["state"] == "off" and "not built" in found["reason"]
    data = os.urandom(300_000)
    (site.mountpoint / "file").write_bytes(data)
    array = np.memmap(site.mountpoint / "file", np.uint8, "r+")
    array[5] = 1
    del array
    assert (site.mountpoint / "file").read_bytes() == data[:5] + b"\1" + data[6:]
    site.umount()
