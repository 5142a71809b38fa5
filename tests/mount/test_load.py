"""Signals and load: many processes at once, interrupted system calls, and programs that wait for a dead remote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptfs
from tests.support.machines import Machines, same_soon
from tests.support.mounts import Site, is_mounted, run, until
from tests.support.proxy import Faults

pytestmark = pytest.mark.timeout(170)

ROUNDS = int(os.environ.get("CKPTFS_TEST_ROUNDS", "2"))

MAKEDIRS = """
import os, shutil, sys, time
top, processes, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
start = time.time() + 1.0
children = []
for number in range(processes):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            time.sleep(max(0, start - time.time()))
            for each in range(rounds):
                path = os.path.join(top, f"round-{each}", "a", "b", "c")
                os.makedirs(path, exist_ok=True)
                assert os.path.isdir(path)
                own = os.path.join(path, f"own-{number}")
                os.makedirs(os.path.join(own, "deep", "er"))
                with open(os.path.join(own, "deep", "file"), "w") as file:
                    file.write(str(number))
                assert f"own-{number}" in os.listdir(path)
                shutil.rmtree(own)
                assert not os.path.exists(own)
            status = 0
        except BaseException as error:
            print(number, repr(error), flush=True)
        os._exit(status)
    children.append(pid)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def test_case_047_many_processes_make_the_same_directories(site: Site) -> None:
    """64 processes make one new four-level path, and trees of their own in it that they remove: no error."""
    site.mount()
    done = run([sys.executable, "-c", MAKEDIRS, str(site.mountpoint), "64", str(ROUNDS)], timeout_s=120)
    assert done.status == 0, done.said[:2000]
    for each in range(ROUNDS):
        assert os.listdir(site.mountpoint / f"round-{each}" / "a" / "b" / "c") == []
    site.umount()


INTERRUPTED = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
top = os.fsencode(sys.argv[1])
ticks = 0

def tick(*_):
    global ticks
    ticks += 1

signal.signal(signal.SIGALRM, tick)
signal.siginterrupt(signal.SIGALRM, False)  # SA_RESTART, as a profiler or a C library's timer has it
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)

def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        sys.exit(f"{name} {arguments}: {os.strerror(ctypes.get_errno())} after {ticks} signals")
    return result

data = ctypes.create_string_buffer(200_000)
for number in range(int(sys.argv[2])):
    directory, path, other = (b"%s/%s-%d" % (top, kind, number) for kind in (b"d", b"f", b"g"))
    call("mkdir", directory, 0o755)
    fd = call("open", path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    written = 0
    while written < 200_000:
        written += call("write", fd, data, 200_000 - written)
    if number % 10 == 0:
        call("fsync", fd)
    call("ftruncate", fd, ctypes.c_long(100_000))
    call("close", fd)
    call("link", path, other)
    call("rename", path, directory + b"/in")
    call("symlink", b"in", directory + b"/link")
    for each in (directory + b"/in", directory + b"/link", other):
        call("unlink", each)
    call("rmdir", directory)
signal.setitimer(signal.ITIMER_REAL, 0)
print(ticks)
"""


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_timers_with_sa_restart_show_nothing(site: Site, passthrough: str) -> None:
    """A signal every half millisecond: no EINTR and, of a call that is made again, no EEXIST or ENOENT either."""
    site.mount("--passthrough", passthrough)
    done = run([sys.executable, "-c", INTERRUPTED, str(site.mountpoint), str(40 * ROUNDS)], timeout_s=120)
    assert done.status == 0, done.said
    assert int(done.out) > 100
    assert os.listdir(site.mountpoint) == []
    site.umount()


READERS = """
import os, sys, threading
threading.stack_size(256 << 10)

def read(path):
    try:
        open(path, "rb").read()
    except OSError:
        pass

paths = [f"{sys.argv[1]}/file-{n}" for n in range(int(sys.argv[2]))]
threads = [threading.Thread(target=read, args=(path,), daemon=True) for path in paths]
for each in threads:
    each.start()
print("reading", flush=True)
for each in threads:
    each.join()
"""


@pytest.mark.slow
def test_case_055_two_hundred_readers_of_a_dead_remote(machines: Machines) -> None:
    """While they wait, stat, save, df and status are instant; killed, they are gone soon; unmounting does not wait."""
    writer, way = machines.site("writer"), machines.proxy()
    top = machines.mount(writer)
    for number in range(200):
        (top / f"file-{number}").write_bytes(os.urandom(3000))
    assert writer.run("wait", str(top), "--timeout", "60s").status == 0
    reader = machines.site("reader", by=way, settings={"read_timeout_s": 8.0})
    there = machines.mount(reader)
    assert len(os.listdir(there)) == 200
    way.faults = Faults(mode="black_hole")
    command = [sys.executable, "-c", READERS, str(there), "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as readers:
        try:
            assert readers.stdout is not None and readers.stdout.readline() == "reading\n"
            time.sleep(1.0)
            for number in range(5):
                began = time.monotonic()
                assert (there / f"file-{number}").stat().st_size == 3000
                (there / f"mine-{number}").write_bytes(b"x" * 50_000)
                assert len((there / f"mine-{number}").read_bytes()) == 50_000
                os.statvfs(there)
                assert time.monotonic() - began < 3, "something local waited for the remote"
            assert reader.status()["path"] == "/"
            readers.send_signal(signal.SIGKILL)
            began = time.monotonic()
            readers.wait(40)
            assert time.monotonic() - began < 15, "a killed client waits at most for the end of its reads"
        finally:
            readers.kill()
    began = time.monotonic()
    reader.umount("--no-wait", status=3)
    assert time.monotonic() - began < 30
    assert not is_mounted(there)


SHARING = """
import hashlib, os, sys
top, writers, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
BLOCK = 256 << 10
blocks = megabytes * (1 << 20) // BLOCK

def block(number, at):
    return hashlib.blake2b(b"%d %d" % (number, at)).digest() * (BLOCK // 64)

def write(number):
    fd = os.open(f"{top}/{number}", os.O_CREAT | os.O_WRONLY)
    for at in range(blocks):
        data = block(number, at)
        assert os.pwrite(fd, data, at * BLOCK) == len(data)
        if at % 16 == 15:
            os.fsync(fd)
    os.close(fd)

def read(number):
    seen = 0
    while seen < blocks:
        try:
            fd = os.open(f"{top}/{number}", os.O_RDONLY)
        except FileNotFoundError:
            continue
        while (there := os.fstat(fd).st_size // BLOCK) > seen:
            for at in (seen, there - 1):
                assert os.pread(fd, BLOCK, at * BLOCK) == block(number, at), (number, at)
            seen += 1
        os.close(fd)

children = []
for work in (write, read):
    for number in range(writers):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                work(number)
                status = 0
            except BaseException as error:
                print(work.__name__, number, repr(error), flush=True)
            os._exit(status)
        children.append(pid)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def write_and_read_at_once(machines: Machines, passthrough: str, megabytes: int) -> None:
    site = machines.site("here", tuning={})
    top = machines.mount(site, "--passthrough", passthrough)
    command = [sys.executable, "-c", SHARING, str(top), "8", str(megabytes)]
    done = run(command, timeout_s=100 + megabytes)
    assert done.status == 0, done.said
    assert {each.stat().st_size for each in top.iterdir()} == {megabytes << 20}
    assert ckptfs.wait(top, "replicated", 100 + megabytes)
    same_soon(top, machines.mount(machines.site("there", tuning={})), 100 + megabytes)


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_eight_writers_and_a_reader_of_each_file(machines: Machines, passthrough: str) -> None:
    """Who reads a file while it grows finds every byte that was written, and so does another machine in the end."""
    write_and_read_at_once(machines, passthrough, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_eight_writers_of_large_files_and_a_reader_of_each(machines: Machines, passthrough: str) -> None:
    """The same with 2 GiB in all."""
    write_and_read_at_once(machines, passthrough, 256)


FORKING = """
import os, sys
top = sys.argv[1]
fd = os.open(top + "/shared", os.O_RDWR | os.O_CREAT, 0o644)
os.write(fd, b"parent")
for number in range(40):
    pid = os.fork()
    if not pid:
        os.pwrite(fd, bytes([65 + number % 26]) * 1000, 6 + 1000 * number)
        with open(f"{top}/child-{number}", "wb") as file:
            file.write(os.pread(fd, 6, 0))
        os._exit(0)
while True:
    try:
        assert os.wait()[1] == 0
    except ChildProcessError:
        break
assert os.fstat(fd).st_size == 40006
os.close(fd)
"""


def test_forking_with_files_open(site: Site) -> None:
    """Forty children share a descriptor and make files of their own: all is there, and nothing stays open."""
    site.mount()
    done = run([sys.executable, "-c", FORKING, str(site.mountpoint)], timeout_s=60)
    assert done.status == 0, done.said
    shared = (site.mountpoint / "shared").read_bytes()
    assert shared == b"parent" + b"".join(bytes([65 + number % 26]) * 1000 for number in range(40))
    assert all((site.mountpoint / f"child-{number}").read_bytes() == b"parent" for number in range(40))
    images = str(site.store / "images")
    until(lambda: not open_below(site.pid(), images), "the daemon to have no image open", 10)
    site.umount()


def open_below(pid: int, directory: str) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith(directory):
            found.append(target)
    return found
