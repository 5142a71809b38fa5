"""Comparing and estimating take little memory, however large the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

MIB = 1 << 20
FILE_BYTES = 128 * MIB
MOST_BYTES = 128 * MIB
"""Beyond what the modules take: batches, bases, and what is encoded, in a few threads. As much as one of the files."""

_PROGRAM = """
import resource, sys
from ckptfs.insight.comparing import compare
from ckptfs.insight.estimating import estimate
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(found,) = compare(sys.argv[1] + "/step-1.npy", sys.argv[1] + "/step-2.npy").differences
assert found.state == "changed" and found.delta_bytes < found.encoded_bytes
(series,) = estimate(sys.argv[1]).document()["series"]
assert series["delta_bytes"] < series["compressed_bytes"]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Two files of one tensor each, of which every element moved a little."""
    for step in (1, 2):
        shape = (FILE_BYTES // MIB, MIB // 4)
        array = np.lib.format.open_memmap(tmp_path / f"step-{step}.npy", "w+", np.float32, shape)
        for at, row in enumerate(array):
            row[:] = np.random.default_rng(at).random(MIB // 4, np.float32) * (1 + step * 1e-4)
        del array
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    for file in tmp_path.iterdir():
        file.unlink()  # pytest keeps directories for a while
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_BYTES
