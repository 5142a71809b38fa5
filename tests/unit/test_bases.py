"""Which files go on what others began."""

from __future__ import annotations

import pytest

from ckptfs.encoding.manifest import Chunk, Content, TensorSpan
from ckptfs.ids import ChunkId, digest
from ckptfs.replica.bases import MIN_BYTES, Keys, keys


def content(lengths: tuple[int, ...] = (MIN_BYTES, MIN_BYTES)) -> Content:
    """A file of one tensor, in pieces."""
    chunks = tuple(Chunk(ChunkId(digest(b"%d" % at)), length, "float32") for at, length in enumerate(lengths))
    size = sum(lengths)
    return Content(size, (), chunks, (TensorSpan("weight", "float32", (size // 4,), 0, size),))


def first(path: bytes) -> Keys:
    return next(keys(content(), path))


@pytest.mark.parametrize(
    ("before", "after", "stranger"),
    [
        (b"checkpoint-100/model.pt", b"checkpoint-200/model.pt", b"checkpoint-200/ema.pt"),
        (b"seed1/checkpoint-100/model.pt", b"seed1/checkpoint-200/model.pt", b"seed2/checkpoint-100/model.pt"),
        (b"version_0/epoch=1-step=10.ckpt", b"version_0/epoch=2-step=20.ckpt", b"version_1/epoch=1-step=10.ckpt"),
        (b"100/rank_0.pt", b"200/rank_0.pt", b"100/rank_1.pt"),
        (b"iter_0000100/mp_rank_00/a.pt", b"iter_0000200/mp_rank_00/a.pt", b"iter_0000100/mp_rank_01/a.pt"),
        (b"save-100/optim_0.pt", b"save-200/optim_0.pt", b"save-100/optim_1.pt"),
        (b"model-1.pt", b"model-2.pt", b"ema-2.pt"),
        (b"latest/model.pt", b"latest/model.pt", b"best/model.pt"),
    ],
)
def test_a_member_is_nearer_to_its_series_than_a_stranger(before: bytes, after: bytes, stranger: bytes) -> None:
    """The stranger's tensors have the same names, and it was sent last."""
    found, other = first(before), first(stranger)
    nearest = next(key for key in first(after) if key in found + other)
    assert nearest in found and nearest not in other
    assert found[-1] == first(after)[-1] == other[-1], "a tensor's name, where nothing else is known"


def test_pieces_are_told_apart() -> None:
    """By their place in the tensor; what is short, or of no known type, has no keys."""
    here, behind = keys(content(), b"model.pt")
    assert not set(here) & set(behind)
    assert next(keys(content((MIN_BYTES - 4, MIN_BYTES)), b"model.pt")) == ()
    nameless = content()
    assert list(keys(Content(nameless.size, (), nameless.chunks), b"model.pt")) == [(), ()]
