"""Which tensor is which in another checkpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.insight.matching import Matched, Named, match


def tensor(name: str | None, file: bytes = b"", shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> Named:
    return Named(file, name, dtype, shape)


def test_the_same_name_in_the_same_file() -> None:
    """Also with another shape: it is the same tensor, changed."""
    found = match([tensor("w"), tensor("b")], [tensor("b"), tensor("w", shape=(4,)), tensor("x")])
    assert found == Matched(pairs=[(1, 0), (0, 1)], gone=[], new=[2])


def test_shards_and_formats() -> None:
    """The same name in another file, where it is only one; where it is in several, nobody guesses."""
    before = [tensor("w", b"model-1-of-2"), tensor("b", b"model-2-of-2")]
    assert match(before, [tensor("b", b"model.pt"), tensor("w", b"model.pt")]).pairs == [(1, 0), (0, 1)]
    ranks = [tensor("w", b"rank_0"), tensor("w", b"rank_1")]
    assert match(ranks, [tensor("w", b"all")]) == Matched(gone=[0, 1], new=[0])
    assert match(ranks, ranks).pairs == [(0, 0), (1, 1)]


def test_one_prefix_on_one_side() -> None:
    """As wrappers add it; the rest of the name and the shape must be the same; a cast on the way does not matter."""
    plain = [tensor("a.weight"), tensor("a.bias", shape=(3,)), tensor("extra")]
    wrapped = [tensor("_orig_mod.module.a.weight"), tensor("_orig_mod.module.a.bias", shape=(3,), dtype="bfloat16")]
    found = match(plain, wrapped)
    assert (found.pairs, found.gone, found.prefix) == ([(0, 0), (1, 1)], [2], "_orig_mod.module.")
    assert match(wrapped, plain).pairs == [(0, 0), (1, 1)]
    other = [tensor("module.a.weight", shape=(9,)), tensor("module.a.bias")]
    assert match(plain, other).pairs == []


def test_a_chance_match_is_none() -> None:
    """One tensor of many that happens to end alike does not make a prefix."""
    before = [tensor(f"encoder.{number}") for number in range(9)] + [tensor("bias")]
    after = [tensor(f"decoder.x{number}") for number in range(9)] + [tensor("head.bias")]
    assert match(before, after) == Matched(gone=list(range(10)), new=list(range(10)))


def test_names_that_repeat_and_files_without_tensors() -> None:
    """Equal names of one file are paired in their order; files by their path alone."""
    twice = [tensor("w"), tensor("w"), tensor(None, b"config.json"), tensor(None, b"log")]
    found = match(twice, [tensor("w"), tensor(None, b"sub/config.json"), tensor("w"), tensor(None, b"log")])
    assert found == Matched(pairs=[(0, 0), (1, 2), (3, 3)], gone=[2], new=[1])


SIDES = st.lists(
    st.builds(
        Named,
        st.sampled_from([b"", b"f", b"g"]),
        st.sampled_from([None, "", "a", "b.a", "c.b.a", "c.a", "."]),
        st.sampled_from(["float32", "int8"]),
        st.sampled_from([(1,), (2,)]),
    ),
    max_size=8,
)


@given(SIDES, SIDES)
def test_each_is_in_one_place(before: list[Named], after: list[Named]) -> None:
    """Every tensor is paired once, or gone, or new; what is the same on both sides is paired with itself."""
    found = match(before, after)
    assert sorted([old for old, _ in found.pairs] + found.gone) == list(range(len(before)))
    assert sorted([new for _, new in found.pairs] + found.new) == list(range(len(after)))
    assert match(before, before).pairs == [(each, each) for each in range(len(before))]
