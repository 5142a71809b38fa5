"""Pieces of tensors through the states of a series."""

from __future__ import annotations

from ckptfs.encoding.manifest import Chunk, Content, TensorSpan
from ckptfs.ids import ChunkId
from ckptfs.pieces import MIN_BYTES, Keys, Pieces, pays

PIECE = 4 * MIN_BYTES


def content(name: str = "weight", shape: tuple[int, ...] = (PIECE, 2), dtype: str | None = "float32") -> Content:
    """A header, a tensor of two pieces and its short rest, and something behind it."""
    lengths = ((100, None), (PIECE, dtype), (PIECE, dtype), (MIN_BYTES - 1, dtype), (PIECE, None))
    chunks = tuple(Chunk(ChunkId(bytes([at]) * 32), *each) for at, each in enumerate(lengths))
    end = 100 + 2 * PIECE + MIN_BYTES - 1
    return Content(end + PIECE, (), chunks, (TensorSpan(name, "float32", shape, 100, end),))


def keys(file: Content, path: bytes) -> list[Keys]:
    pieces = Pieces(path, file.tensors)
    return [pieces.keys(at, each.length, each.dtype) for each, at in zip(file.chunks, file.offsets(), strict=True)]


def test_pieces_of_tensors_have_keys() -> None:
    """Not what lies between tensors, nor what is too short; and each piece its own."""
    found = keys(content(), b"model.pt")
    assert [len(each) for each in found] == [0, 2, 2, 0, 0]
    assert len({key for each in found for key in each}) == 4


def test_members_of_a_series_share_keys() -> None:
    """By what counts steps; another rank, another directory or another run has only the tensor in common."""

    def first(path: bytes) -> tuple[bytes, ...]:
        return keys(content(), path)[1]

    for one, other in (
        (b"run/checkpoint-100/optimizer.pt", b"run/checkpoint-2000/optimizer.pt"),
        (b"global_step5/mp_rank_01_model_states.pt", b"global_step7/mp_rank_01_model_states.pt"),
        (b"epoch=1-step=10.ckpt", b"epoch=2-step=20.ckpt"),
        (b"last.ckpt", b"last.ckpt"),
    ):
        assert first(one) == first(other), (one, other)
    for one, other in (
        (b"global_step5/mp_rank_00_model_states.pt", b"global_step5/mp_rank_01_model_states.pt"),
        (b"a/checkpoint-1/model.pt", b"b/checkpoint-1/model.pt"),
        (b"last.ckpt", b"best.ckpt"),
    ):
        assert first(one)[0] != first(other)[0] and first(one)[1] == first(other)[1], (one, other)


def test_another_tensor_has_no_key_in_common() -> None:
    """Another name, shape or place in the tensor; the same tensor elsewhere in the file is the same."""
    known = {key for each in keys(content(), b"a") for key in each}
    for other in (content("bias"), content(shape=(2, PIECE))):
        assert not known & {key for each in keys(other, b"a") for key in each}
    moved = content()
    shifted = Content(
        moved.size + 50,
        ((0, 50),),
        moved.chunks,
        tuple(TensorSpan(each.name, each.dtype, each.shape, each.start + 50, each.end + 50) for each in moved.tensors),
    )
    assert known == {key for each in keys(shifted, b"a") for key in each}


def test_when_a_delta_pays() -> None:
    """When it is clearly less than none, and less than what the keyframe and its deltas took so far, on average."""
    assert pays(0.83, 0.6, 1000, 830.0)
    assert not pays(0.83, 0.82, 1000, 830.0)
    assert not pays(0.83, 0.6, 1000, 600.0)
    assert not pays(1.0, 0.98, 1000, 1e9)
