"""Which tensors a file holds. Chooses the reader by the first bytes; the readers know the formats."""

from __future__ import annotations

import logging

from ckptfs.formats import numpy, safetensors, torchzip, ziparchive, zstdframes
from ckptfs.formats.base import Source, Tensor

log = logging.getLogger(__name__)


def recognise(source: Source) -> list[Tensor]:
    """The tensors of the file, in file order, disjoint and inside it; [] when it is unknown or damaged.

    Never raises for what the bytes are; an OSError of *source* passes through. Takes seconds and some 150 MB at worst,
    whatever the file claims; milliseconds for a real one.
    """
    try:
        magic = source.read(0, 9)
        if magic.startswith(numpy.MAGIC):
            return numpy.read_tensors(source)
        if magic.startswith(ziparchive.LOCAL_MAGIC):
            archives = ziparchive.read_archives(source)
            if any(member.name.endswith("/data.pkl") for members in archives for member in members):
                return torchzip.read_members(source, archives)
            return numpy.read_members(source, [member for members in archives for member in members])
        if magic.startswith(zstdframes.MAGIC):
            return zstdframes.read_tensors(source)
        if magic[8:9] == b"{":
            return safetensors.read_tensors(source)
    except OSError:
        raise
    except Exception as error:
        # Not FormatError alone: a file is cut by content when its description cannot be used, for whatever reason
        # (RecursionError and MemoryError of a parser among them). A save must never fail for how its bytes look.
        log.debug("not a format that can be read: %s", error)
    return []
