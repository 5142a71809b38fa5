"""HDF5 files of any layout that h5py writes: what is found lies where the HDF5 library itself says."""

from __future__ import annotations

import io
from typing import Any

import h5py
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.formats.base import BytesSource
from ckptfs.formats.recognise import recognise
from ckptfs.spans import SpanSet

VERSIONS = ["earliest", ("v108", "v108"), ("v110", "v110"), ("v114", "v114"), "latest"]


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of create_dataset: contiguous or chunked, fixed or growing along any dimension."""
    shape = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    kind: dict[str, Any] = {"shape": shape, "dtype": draw(st.sampled_from(["f4", "f8", "i2", "u1", ">f4", "V2"]))}
    if 0 not in shape and draw(st.booleans()):
        kind["chunks"] = tuple(draw(st.integers(1 + size // 6, size)) for size in shape)
        if draw(st.booleans()):
            kind["maxshape"] = tuple(draw(st.sampled_from([None, size + 7, size])) for size in shape)
    return kind


def expected(dataset: Any) -> SpanSet:
    """The bytes of the dataset in its file, as the library tells; of chunks, all their bytes."""
    if dataset.chunks is None:
        start = dataset.id.get_offset()
        return SpanSet([] if start is None else [(start, start + dataset.nbytes)])
    found = [dataset.id.get_chunk_info(at) for at in range(dataset.id.get_num_chunks())]
    return SpanSet((each.byte_offset, each.byte_offset + each.size) for each in found)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(layouts(), min_size=1, max_size=5),
    st.sampled_from(VERSIONS),
    st.booleans(),
    st.sampled_from([0, 512, 4096]),
)
def test_datasets_lie_where_the_library_says(
    kinds: list[dict[str, Any]], libver: Any, track_order: bool, block: int
) -> None:
    """Every byte that is found is a dataset's; all are found but what pads the last chunk of rows; names are right."""
    file = io.BytesIO()
    with h5py.File(file, "w", libver=libver, track_order=track_order, userblock_size=block) as out:
        for at, kind in enumerate(kinds):
            dataset = out.create_dataset(f"group{at % 2}/{at}", **kind)
            if dataset.size:
                dataset[...] = np.zeros(kind["shape"], kind["dtype"])
    data = file.getvalue()
    tensors = recognise(BytesSource(data))
    with h5py.File(io.BytesIO(data)) as read:
        for at in range(len(kinds)):
            dataset = read[f"group{at % 2}/{at}"]
            mine = SpanSet((each.start, each.end) for each in tensors if each.name == f"group{at % 2}.{at}")
            theirs = expected(dataset)
            assert all(theirs.covers(start, end) for start, end in mine)
            assert mine.total in (dataset.nbytes, theirs.total)
