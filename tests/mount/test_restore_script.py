"""docs/restore.py, alone, restores what a real mount has put into a bucket: every byte, mode, time and attribute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Bucket
from tests.support.copies import download
from tests.support.machines import Machines, census

pytestmark = pytest.mark.timeout(150)

SCRIPT = Path(__file__).parents[2] / "docs" / "restore.py"


def fill(top: Path) -> None:
    """Every codec and format, and everything that a directory can hold for a user."""
    random = np.random.default_rng(1)
    weights = random.normal(size=(300, 257)).astype(np.float32)
    (top / "arrays").mkdir()
    np.save(top / "arrays" / "float32.npy", weights)
    np.save(top / "arrays" / "float64.npy", random.normal(size=5000))
    np.save(top / "arrays" / "int64.npy", np.arange(20_000))
    np.save(top / "arrays" / "bool.npy", random.random(9000) > 0.5)
    np.savez(top / "arrays" / "both.npz", a=weights, b=weights.astype(np.float16))
    np.savez_compressed(top / "arrays" / "packed.npz", a=weights)
    (top / "text.txt").write_text("the same line again\n" * 5000)
    (top / "random.bin").write_bytes(random.bytes(123_457))
    (top / "zeros").write_bytes(bytes(50_000))
    (top / "empty").touch()
    with open(top / "sparse", "wb") as file:
        file.seek(3_000_000)
        file.write(random.bytes(5000))
        file.truncate(5_000_000)
    with open(top / "all-hole", "wb") as file:
        file.truncate(1_000_000)
    os.symlink("text.txt", top / "link")
    os.symlink("/nowhere/at all", top / "dangling")
    os.link(top / "random.bin", top / "arrays" / "second-name.bin")
    os.setxattr(top / "text.txt", "user.note", b"\x00\xff bytes")
    os.setxattr(top / "arrays", "user.kind", b"directory")
    (top / "empty-directory").mkdir(mode=0o700)
    (top / "name with \xe4 and \n").write_bytes(b"odd name")
    with open(os.path.join(os.fsencode(top), b"not-utf8-\xff"), "wb") as file:
        file.write(b"odder name")
    for number in range(30):
        (top / "arrays" / f"small-{number:02}").write_bytes(b"%d" % number * 50)
    (top / "text.txt").chmod(0o640)
    (top / "empty").chmod(0o4755)
    os.utime(top / "text.txt", ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    os.utime(top / "link", ns=(5, 1_000_000_007), follow_symlinks=False)


def fill_frameworks(top: Path) -> None:
    """What torch and safetensors write; nothing where they are not installed."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    tensors = {
        f"layer.{number}.{name}": torch.randn(64, 65, dtype=dtype)
        for number in range(2)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
    (top / "torch").mkdir()
    safetensors.save_file(tensors, top / "torch" / "model.safetensors")
    torch.save({"model": tensors, "step": 3}, top / "torch" / "model.pt")
    torch.save(tensors, top / "torch" / "old.pt", _use_new_zipfile_serialization=False)


def directory_times(top: Path) -> dict[str, int]:
    return {os.path.relpath(directory, top): os.stat(directory).st_mtime_ns for directory, _, _ in os.walk(top)}


def attributes(top: Path) -> dict[str, dict[str, bytes]]:
    found = {}
    for directory, directories, files in os.walk(top):
        for name in directories + files:
            path = os.path.join(directory, name)
            names = [each for each in os.listxattr(path, follow_symlinks=False) if each.startswith("user.")]
            found[os.path.relpath(path, top)] = {each: os.getxattr(path, each, follow_symlinks=False) for each in names}
    return found


@pytest.mark.parametrize("frameworks", [False, True], ids=["files", "frameworks"])
def test_a_bucket_is_restored_without_ckptfs(
    machines: Machines, bucket: Bucket, tmp_path: Path, frameworks: bool
) -> None:
    """What a mount published is restored from a downloaded copy of the bucket by the script and its three packages."""
    site = machines.site("mnt")
    top = machines.mount(site)
    (fill_frameworks if frameworks else fill)(top)
    (top / "gone").write_bytes(b"1" * 10_000)
    (top / "gone").unlink()
    done = site.run("wait", str(top), "--timeout", "60s")
    assert done.status == 0, done.said
    download(bucket, tmp_path / "copy")
    restored = tmp_path / "restored"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ""}
    command = [sys.executable, "-P", str(SCRIPT), str(tmp_path / "copy"), str(restored)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd="/", check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert census(restored) == census(top)
    times = directory_times(top)
    assert {**directory_times(restored), ".": times["."]} == times  # no tree has the root's own
    assert attributes(restored) == attributes(top)
    if not frameworks:
        assert os.stat(restored / "random.bin").st_ino == os.stat(restored / "arrays" / "second-name.bin").st_ino
        assert os.stat(restored / "sparse").st_blocks * 512 < 1_000_000
