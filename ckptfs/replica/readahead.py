"""How far ahead of a reader it is worth fetching. Pure; the hydrator does the fetching.

Two wishes are at odds. Who reads a whole file wants as much on its way as the line to the remote holds. Who reads a few
tensors, or a slice of one, must not pay for the rest, and looks the same until the moment it stops. So what is fetched
in vain is kept to a share of what was read, one sixteenth, and ends with the tensor; it still grows to megabytes within
a second of reading. A reader who came from the file's start over several tensors is led on into the next, by a sixth of
what it read; and when it has come far, or reads a file in which no tensors are known, it is taken to want everything:
then as much is fetched ahead as was read.
"""

from __future__ import annotations

from ckptfs.encoding.manifest import Content

CAUTIOUS_SHARE = 16
"""Bytes read for one that is fetched ahead ..."""
EAGER_SHARE = 6
"""... and of a reader who came over several tensors."""
EAGER_AFTER_TENSORS = 2
"""So many, read in one go from the file's start."""
WHOLE_AFTER_TENSORS = 4
"""This many tensors read in one go from the file's start ..."""
WHOLE_AFTER_SHARE = 8
"""... and this part of the file (one eighth) mean that all of it will be read: "a few tensors" are less."""


def window_end(content: Content, run_start: int, position: int, most_bytes: int) -> int:
    """Where fetching for a reader may end who read [*run_start*, *position*) of the file without a jump.

    At the end of a chunk, and at most *most_bytes* behind *position*; *position* itself when nothing is to be fetched.
    """
    read_bytes = max(position - run_start, 0)
    if _came_over(content, run_start, position, WHOLE_AFTER_TENSORS) and (
        position >= content.size // WHOLE_AFTER_SHARE or not content.tensors
    ):
        end = min(position + min(read_bytes, most_bytes), content.size)
    elif _came_over(content, run_start, position, EAGER_AFTER_TENSORS):
        end = min(position + min(read_bytes // EAGER_SHARE, most_bytes), content.size)
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


def _came_over(content: Content, run_start: int, position: int, tensors: int) -> bool:
    """Whether the reader came from the file's start over its first *tensors* without a jump."""
    first = content.tensors[:tensors]
    if not first:
        return run_start == 0
    return len(first) == tensors and run_start <= first[0].start and position >= max(each.end for each in first)
