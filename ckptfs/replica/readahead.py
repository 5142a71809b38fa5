"""How far ahead of a reader it is worth fetching. Pure; the hydrator does the fetching.

Two wishes are at odds. Who reads a whole file wants as much on its way as the line to the remote holds. Who reads a few
tensors, or a slice of one, must not pay for the rest, and looks the same until the moment it stops. So what is fetched
in vain is kept to a share of what was read, one sixteenth, and ends with the tensor; it still grows to megabytes within
a second of reading. Only a reader who came from the file's start over several tensors, or reads a file in which none
are known, is taken to want everything: then as much is fetched ahead as was read.
"""

from __future__ import annotations

from ckptfs.encoding.manifest import Content

CAUTIOUS_SHARE = 16
"""Bytes read for one that is fetched ahead."""
WHOLE_AFTER_TENSORS = 4
"""This many tensors read in one go from the file's start ..."""
WHOLE_AFTER_SHARE = 8
"""... and this part of the file (one eighth) mean that all of it will be read: "a few tensors" are less."""


def window_end(content: Content, run_start: int, position: int, most_bytes: int) -> int:
    """Where fetching for a reader may end who read [*run_start*, *position*) of the file without a jump.

    At the end of a chunk, and at most *most_bytes* behind *position*; *position* itself when nothing is to be fetched.
    """
    read_bytes = max(position - run_start, 0)
    if _wants_all(content, run_start, position):
        end = min(position + min(read_bytes, most_bytes), content.size)
    else:
        end = min(position + min(read_bytes // CAUTIOUS_SHARE, most_bytes), content.tensor_end(position))
    inside = content.at(position, end)
    if not inside:
        return position
    last = inside[-1]
    offsets = content.offsets()
    if offsets[last] + content.chunks[last].length > end:  # whole chunks only: a part costs as much
        return max(offsets[last], position)
    return end


def _wants_all(content: Content, run_start: int, position: int) -> bool:
    first = content.tensors[:WHOLE_AFTER_TENSORS]
    if not first:
        return run_start == 0
    if run_start > first[0].start or len(first) < WHOLE_AFTER_TENSORS:
        return False
    return position >= max(content.size // WHOLE_AFTER_SHARE, *(tensor.end for tensor in first))
