"""Holes of files that only the remote has, and of those that came from there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import ckptfs
from tests.support.machines import Machines


def data_spans(path: Path) -> list[tuple[int, int]]:
    spans, at = [], 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            spans.append((start, at))
    return spans


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_holes_are_found_before_the_bytes_are_here(machines: Machines, tmp_path: Path, passthrough: str) -> None:
    """Another machine sees data and holes where they were written, whether the bytes came or not."""
    near = machines.mount(machines.site("near"), "--passthrough", passthrough)
    plain = tmp_path / "plain"
    for path in (plain, near / "sparse"):
        with open(path, "wb") as file:
            file.truncate(1 << 20)
            os.pwrite(file.fileno(), b"x" * 5000, 100_000)
            os.pwrite(file.fileno(), b"y" * 50_000, 500_000)
    wanted = data_spans(plain)
    assert len(wanted) == 2
    assert data_spans(near / "sparse") == wanted
    assert ckptfs.wait(near, "replicated", 60)
    far = machines.mount(machines.site("far"), "--passthrough", passthrough)
    assert data_spans(far / "sparse") == wanted, "nothing of it is here yet"
    assert (far / "sparse").read_bytes() == plain.read_bytes()
    assert data_spans(far / "sparse") == wanted, "all of it came"
