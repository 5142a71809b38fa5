"""The table of mounts, the examination of a store's disk, and the mountpoint's checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfs.errors import MountError
from ckptfs.local import mountinfo
from ckptfs.local import probe as probing
from ckptfs.local.mountinfo import Mount, mount_of, parse
from ckptfs.local.probe import probe
from ckptfs_mount import mountpoint

TABLE = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
36 27 0:44 / /mnt/with\040space\134and\011tab rw,nosuid,nodev - fuse.ckptfs ckptfs rw,user_id=0
37 27 0:45 /sub /bind rw - fuse.ckptfs ckptfs ro
38 27 0:46 / /bind rw master:2 propagate_from:1 - tmpfs none rw
39 27 0:47 / /bin\377 rw - overlay overlay rw
nonsense
"""


def test_the_table_is_read_with_its_escapes_and_optional_fields() -> None:
    """Octal escapes, any number of optional fields, odd bytes; other lines are left out."""
    found = parse(TABLE)
    assert len(found) == 6
    assert found[2].mountpoint == "/mnt/with space\\and\ttab"
    assert (found[1].type, found[1].source, found[1].device) == ("ext4", "/dev/vda", "254:0")
    assert found[3].root == "/sub" and "ro" in found[3].options
    assert found[5].mountpoint == os.fsdecode(b"/bin\xff")


def test_the_deepest_and_last_mount_shows_a_path() -> None:
    """A mount covers what is below it, not what merely begins like it; a later one hides an earlier one."""
    table = parse(TABLE)

    def kind(path: str) -> str:
        found = mount_of(path, table)
        assert found is not None
        return found.type

    assert kind("/mnt/with space\\and\ttab/x") == "fuse.ckptfs"
    assert kind("/bind/x") == "tmpfs" == kind("/bind")
    assert kind("/binder") == "ext4" == kind("/")
    assert mount_of("/x", []) is None


def test_this_machine_s_own_disk_is_examined_for_real(tmp_path: Path) -> None:
    """Wherever tests run: the type is the kernel's, every operation is tried, and nothing is left behind."""
    found = probe(tmp_path)
    expected = subprocess.run(
        ["stat", "-f", "-c", "%b %S", str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    )
    blocks, size = map(int, expected.stdout.split())
    assert found.total_bytes == blocks * size
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.filesystem in Path("/proc/filesystems").read_text()
    assert not found.refusal or "does not work" not in found.refusal
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "refused", "warned"),
    [
        ("ext4", "", ""), ("xfs", "", ""), ("btrfs", "", ""), ("nfs4", "network", ""), ("fuse.sshfs", "network", ""),
        ("tmpfs", "memory", ""), ("overlay", "", "overlayfs"), ("fuse.ntfs", "", "FUSE"),
    ],
)  # fmt: skip
def test_kinds_of_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: str, warned: str
) -> None:
    """Network and memory are refused, overlayfs and FUSE are warned of, disks pass."""
    mount = Mount("/", "/", kind, "none", "0:1", frozenset())
    monkeypatch.setattr(probing, "mount_of", lambda path: mount)
    monkeypatch.setattr(probing, "_LOW_BYTES", 0)
    found = probe(tmp_path)
    assert (refused in found.refusal if found.refusal else not refused), found
    assert (warned in found.warnings[0] if found.warnings else not warned), found


def test_an_operation_that_fails_is_a_refusal_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without hole punching cannot carry a store; a full disk says nothing about it."""

    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probing, "fallocate", unsupported)
    refusal = probe(tmp_path).refusal
    assert refusal is not None and "hole punching" in refusal and "fallocate" in refusal
    monkeypatch.setattr(probing, "fallocate", full)
    with pytest.raises(OSError, match="No space"):
        probe(tmp_path)


def test_users_of_a_directory_are_found_by_directory_file_and_map(tmp_path: Path) -> None:
    """A process is found by its working directory, an open file, or a map of a closed one; this process is not."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    codes = {
        "working directory": f"import os; os.chdir({str(tmp_path)!r})",
        str(path): f"f = open({str(path)!r})",
        f"{path} ": f"import mmap, os; fd = os.open({str(path)!r}, 0); m = mmap.mmap(fd, 0, prot=1); os.close(fd)",
    }
    with open(path):
        for why, code in codes.items():
            with subprocess.Popen(
                [sys.executable, "-c", f"{code}; print(flush=True); input()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            ) as process:
                assert process.stdin is not None and process.stdout is not None
                process.stdout.readline()
                (user,) = mountpoint.users(str(tmp_path))
                process.stdin.write(b"\n")
                process.stdin.flush()
            assert (user.pid, user.why) == (process.pid, why.strip())
    assert mountpoint.users(str(tmp_path)) == []


def test_a_mountpoint_is_created_or_an_empty_directory(tmp_path: Path) -> None:
    """Missing: created, and said so. Empty: taken. A file, something in it, a link to nowhere: refused."""
    assert mountpoint.prepare(str(tmp_path / "a" / "b"))
    assert not mountpoint.prepare(str(tmp_path / "a" / "b"))
    for path, words in ((tmp_path / "a", "not empty"), (tmp_path / "file", "not a directory")):
        if path.name == "file":
            path.touch()
        with pytest.raises(MountError, match=words):
            mountpoint.prepare(str(path))
    with pytest.raises(MountError, match="already holds a mount"):
        mountpoint.prepare("/proc")
    assert not mountpoint.is_dead(str(tmp_path))
    assert not mountpoint.clear_dead(str(tmp_path))


def test_links_on_the_way_are_followed(tmp_path: Path) -> None:
    """A mountpoint is known by its real path, however it was named."""
    (tmp_path / "real" / "mnt").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "direct").symlink_to("real/mnt")
    real = os.path.realpath(tmp_path / "real" / "mnt")
    assert mountpoint.resolve(str(tmp_path / "link" / "mnt")) == real
    assert mountpoint.resolve(str(tmp_path / "direct")) == real
    assert mountpoint.resolve(str(tmp_path / "link" / "new")) == os.path.realpath(tmp_path / "real" / "new")
    assert mountinfo.mount_of(real) is not None
