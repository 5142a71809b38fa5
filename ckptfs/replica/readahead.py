"""How far ahead of a reader it is worth fetching. Pure; the hydrator does the fetching.

Who reads a whole file wants as much on its way as the line to the remote holds. Who reads a few tensors, a slice of
one, or the first layers of a model, must not pay for the rest: `ckptfs.reading` says what readers have earned. Within
that, fetching ends with the tensor that is being read, unless the two before it were read whole, or two files of the
set: then the reader is led on into the next. Behind what is read through a map the kernel reads on, into a tensor that
nobody asked for: ahead of that nothing is fetched, but for who began with the file's start. A file in which no tensors
are known is read whole when it is read from its start: then as much is fetched ahead as was read. Several threads or
processes that share the work are one reader.
"""

from __future__ import annotations

from ckptfs.encoding.manifest import Content
from ckptfs.reading import Reading

ON_AFTER_TENSORS = 2
"""Who read so many in one go is led on into the next."""

_KERNEL_READS_BEFORE, _KERNEL_READS_ON = 512 << 10, 1 << 20
"""Bytes, at most, around what is read through a map: its read-ahead, which torch doubles by fadvise, and twice that."""


def window_end(content: Content, reading: Reading, position: int, most_bytes: int) -> int:
    """Where fetching for a reader who read up to *position* may end.

    At the end of a chunk, and at most *most_bytes* behind *position*; *position* itself when nothing is to be fetched.
    """
    begun = reading.run(position)
    if begun == 0 and not content.tensors:
        end = min(position + min(position - begun, most_bytes), content.size)
    else:
        led_on = reading.account.share == 1 or content.tensors_between(begun, position) >= ON_AFTER_TENSORS
        start = content.tensor_start(position)
        if not led_on and 0 < begun < start - _KERNEL_READS_BEFORE and position <= start + _KERNEL_READS_ON:
            return position
        last = content.size if led_on else content.tensor_end(position)
        end = min(position + min(reading.earned(position), most_bytes), last)
    inside = content.at(position, end)
    if not inside:
        return position
    last_chunk = inside[-1]
    offsets = content.offsets()
    if offsets[last_chunk] + content.chunks[last_chunk].length > end:  # whole chunks only: a part costs as much
        return max(offsets[last_chunk], position)
    return end
