"""Tombstones go when every current head has merged them, and not before."""

from __future__ import annotations

from ckptfs.encoding.head import Head
from ckptfs.ids import ObjectId, Stamp, WriterId
from ckptfs.replica.tombstones import merged_by_all

A, B, C = (WriterId(bytes([each]) * 16) for each in (1, 2, 3))


def head(writer: WriterId, seq: int, **vector: int) -> Head:
    known = {"A": A, "B": B, "C": C}
    return Head(
        writer=writer,
        seq=seq,
        lanes={"": (ObjectId(bytes(32)), None)},
        vector={known[name]: value for name, value in vector.items()},
        previous=None,
        index=None,
        index_body=None,
        time_ns=0,
        stamp=Stamp(0),
        incomplete=False,
        counts={},
    )


def test_alone() -> None:
    """A lone writer's own tombstones may go once its head is acknowledged."""
    assert merged_by_all([head(A, 7)]) == {A: 7}


def test_somebody_has_not_merged() -> None:
    """A writer whose current head does not cover ours keeps our tombstones alive; what it covers may go."""
    assert merged_by_all([head(A, 7, B=2), head(B, 3, A=4)]) == {A: 4, B: 2}


def test_never_met() -> None:
    """A current head that knows nothing of us keeps every tombstone of ours."""
    assert merged_by_all([head(A, 7), head(C, 1)]) == {}


def test_covered_heads_do_not_count() -> None:
    """A writer that another head covers will learn of a removal from that head, even if it never comes back."""
    assert merged_by_all([head(A, 7, B=3), head(B, 3)]) == {A: 7, B: 3}
