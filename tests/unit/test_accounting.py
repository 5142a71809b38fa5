"""Unique and shared bytes, and growth: compared with plain sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.insight.accounting import NOWHERE, Chunks, Growth, Usage, keys_of

LENGTHS = {key: 10 ** (key % 4) + key for key in range(12)}
VERSIONS = st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=1, max_size=6)


def chunks_of(versions: list[list[int]], here: set[int], packed: dict[int, int]) -> Chunks:
    made = [(np.array(each, np.uint64), np.array([LENGTHS[key] for key in each], np.int64)) for each in versions]
    remote = np.array(list(packed), np.uint64), np.array(list(packed.values()), np.int64)
    return Chunks(made, np.array(sorted(here), np.uint64), remote)


@given(
    VERSIONS,
    st.lists(st.tuples(st.integers(0, 5), st.integers(NOWHERE, 2)), max_size=8),
    st.sets(st.integers(0, 11)),
    st.dictionaries(st.integers(0, 11), st.integers(1, 50)),
)
def test_usage_is_what_sets_say(
    versions: list[list[int]], files: list[tuple[int, int]], here: set[int], packed: dict[int, int]
) -> None:
    """Every column of every group, the sum, and what would be freed, for any files, groups and places."""
    files = [(version % len(versions), label) for version, label in files]
    sizes = [sum(LENGTHS[key] for key in versions[version]) for version, _ in files]
    found, total, freed = chunks_of(versions, here, packed).usage(
        [version for version, _ in files], sizes, [label for _, label in files], 3
    )
    needs = [{key for version, label in files if label == group for key in versions[version]} for group in range(3)]
    outside = {key for version, label in files if label == NOWHERE for key in versions[version]}

    def measure(keys: set[int]) -> int:
        return sum(LENGTHS[key] for key in keys)

    for group, usage in enumerate(found):
        others = outside.union(*(needs[each] for each in range(3) if each != group))
        assert usage == Usage(
            files=sum(label == group for _, label in files),
            logical=sum(size for size, (_, label) in zip(sizes, files, strict=True) if label == group),
            unique=measure(needs[group] - others),
            shared=measure(needs[group] & others),
            local=measure(needs[group] & here),
            remote=measure(needs[group] & packed.keys()),
            encoded=sum(packed.get(key, 0) for key in needs[group]),
        )
    everything = set[int]().union(*needs)
    assert total.logical == sum(usage.logical for usage in found)
    assert total.unique == sum(usage.unique for usage in found)
    assert total.unique + total.shared == measure(everything)
    assert (total.local, total.remote) == (measure(everything & here), measure(everything & packed.keys()))
    assert total.encoded == sum(packed.get(key, 0) for key in everything)
    assert freed == measure(everything - outside)


@given(VERSIONS, st.dictionaries(st.integers(0, 11), st.integers(1, 50)))
def test_growth_is_what_no_earlier_member_had(versions: list[list[int]], packed: dict[int, int]) -> None:
    """Each chunk counts with the first member that needs it, in their order."""
    seen: set[int] = set()
    expected = []
    for version in versions:
        new = set(version) - seen
        expected.append(Growth(sum(LENGTHS[key] for key in new), sum(packed.get(key, 0) for key in new)))
        seen |= new
    assert chunks_of(versions, set(), packed).growth([[number] for number in range(len(versions))]) == expected


def test_nothing_is_nothing() -> None:
    """No versions, no groups, no members."""
    empty = Chunks([], keys_of([]), (keys_of([]), np.empty(0, np.int64)))
    assert empty.usage([], [], [], 0) == ([], Usage(0, 0, 0, 0, 0, 0, 0), 0)
    assert empty.growth([]) == []
    assert keys_of([bytes(range(32))]).tolist() == [int.from_bytes(bytes(range(8)), "little")]
