"""Byte planes, by the C module and by numpy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.encoding import planes

WAYS = [(planes.part_with_numpy, planes.join_with_numpy), (planes.part, planes.join)]


def test_the_c_module_was_built() -> None:
    """Where there is a compiler, which pyfuse3 needs anyway, it is what runs: else all below tests numpy twice."""
    assert planes.part is not planes.part_with_numpy
    assert planes.join is not planes.join_with_numpy


@pytest.mark.parametrize("way", WAYS, ids=["numpy", "in force"])
@given(data=st.binary(max_size=600), width=st.sampled_from([2, 4, 8]))
def test_there_and_back(way: tuple, data: bytes, width: int) -> None:
    """Plane i is every width-th byte from i on; joined they are the elements again, and nothing else is touched."""
    part, join = way
    count = len(data) // width
    out = bytearray(b"\xaa" * (len(data) + 3))
    part(data[: count * width], memoryview(out), width)
    parted = [bytes(out[at * count : (at + 1) * count]) for at in range(width)]
    assert parted == [data[at : count * width : width] for at in range(width)]
    assert out[count * width :] == b"\xaa" * (len(data) + 3 - count * width)
    back = bytearray(b"\xbb" * (len(data) + 3))
    join(parted, memoryview(back))
    assert back[: count * width] == data[: count * width]
    assert back[count * width :] == b"\xbb" * (len(data) + 3 - count * width)


def test_nothing_is_written_beyond_the_buffer() -> None:
    """Lengths that do not fit together are refused before anything is written."""
    out = bytearray(15)
    for call in (
        lambda: planes.part(bytes(16), memoryview(out), 4),
        lambda: planes.part(bytes(15), memoryview(out), 3),
        lambda: planes.join([bytes(4)] * 4, memoryview(out)),
        lambda: planes.join([bytes(2), bytes(3)], memoryview(out)),
        lambda: planes.join([bytes(1)] * 3, memoryview(out)),
        lambda: planes.join([], memoryview(out)),
    ):
        with pytest.raises(ValueError):
            call()
    assert out == bytes(15)
