"""Scrubbing this disk: read every image again, hash its chunks, and put back what is no longer what was sealed.

A damaged chunk is mended in place, from another image or the remote, in an order in which no kill makes anything worse:
the right bytes are in memory and verified; the image is free (nobody else has it open or mapped); the row that says the
chunk is there goes, durably; the bytes are written and flushed; the row comes back. What nobody has any more is named
and left as it is, but for that row: what is left of the file may be worth a lot to somebody.

Who calls: one task on the event loop; reading, hashing and writing are in threads. Programs go on meanwhile, so after
every await a file is looked at again: one that was written, replaced or removed since is no finding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from ckptfs.encoding.manifest import Content, decode_content
from ckptfs.errors import CkptfsError, FormatError
from ckptfs.filesystem import FileSystem
from ckptfs.ids import ChunkId, ImageId, digest
from ckptfs.local.catalog.contents import Location
from ckptfs.local.catalog.recovery import Recovery
from ckptfs.local.catalog.stock import Stock, StockFile
from ckptfs.local.leases import nobody_else_uses
from ckptfs.local.store import Store
from ckptfs.repair.copies import Copies, Raw
from ckptfs.repair.findings import FOUND, LOST, REPAIRED, Finding, Report
from ckptfs.repair.pace import Pace

log = logging.getLogger(__name__)

_READ_BYTES = 16 << 20
"""Hashed by one call of a thread."""
_TRIES, _TRY_AGAIN_S = 3, 1.0
"""How often, and how long after one another, an image that somebody has open is asked for."""


@dataclass(frozen=True)
class Placed:
    """A chunk that should be at *offset* of an image."""

    id: ChunkId
    offset: int
    length: int


class ImageScrub:
    """Looks at the images of one store."""

    def __init__(
        self, store: Store, filesystem: FileSystem, copies: Copies, pace: Pace, report: Report, *, repair: bool
    ) -> None:
        self._store = store
        self._filesystem = filesystem
        self._copies = copies
        self._pace = pace
        self._report = report
        self._repair = repair
        self._stock = Stock(store.catalog.db)
        self.mended: Callable[[StockFile], None] = lambda file: None
        """Called when bytes of a file's image were put back: what the kernel keeps of it may be the damaged ones."""
        self.learn_places: Callable[[int], Awaitable[None]] | None = None
        """Looks up where the remote has a published file version, where the catalog does not say."""

    async def look(self, file: StockFile) -> None:
        """Hash what the image of *file* should hold, and mend it."""
        body = self._store.contents.manifest(file.manifest).body if self._is_still(file) else None
        if file.image is None or body is None:
            return
        if not self._store.images.has(file.image) and self._is_still(file):
            self._gone(file, file.image)
            return
        try:
            content = await trio.to_thread.run_sync(decode_content, body)
        except FormatError as error:
            self._tell_unreadable(file, f"the chunk list of the file does not decode: {error}")
            return
        chunks = [each for each in self._expected(file.image, content) if self._pace.chooses()]
        self._report.files += bool(chunks)
        bad = await self._hash(file, file.image, chunks)
        if bad:
            await self._damaged(file, file.image, content, bad)

    def _expected(self, image: ImageId, content: Content) -> list[Placed]:
        chunks = zip(content.chunks, content.offsets(), strict=True)
        every = [Placed(chunk.id, at, chunk.length) for chunk, at in chunks]
        return self._here(image, every)

    def _here(self, image: ImageId, chunks: Sequence[Placed]) -> list[Placed]:
        """Those of *chunks* that the image should have, now: it may have given up others."""
        if self._store.contents.image_is_whole(image):
            return list(chunks)
        here = set(self._store.contents.locations_in(image))
        return [each for each in chunks if (each.offset, each.length) in here]

    async def _hash(self, file: StockFile, image: ImageId, chunks: Sequence[Placed]) -> list[Placed]:
        """Those of *chunks* whose bytes are others, twice."""
        bad: list[Placed] = []
        start = 0
        while start < len(chunks) and self._is_still(file):
            end, size = start, 0
            while end < len(chunks) and size < _READ_BYTES:
                size += chunks[end].length
                end += 1
            some = chunks[start:end]
            await self._pace.spend(size)
            suspects = await trio.to_thread.run_sync(self._hash_blocking, image, some)
            if suspects:  # a program may have opened it for writing just now
                suspects = await trio.to_thread.run_sync(self._hash_blocking, image, suspects)
            bad += suspects
            self._report.chunks += len(some)
            self._report.bytes += size
            self._pace.did(size)
            start = end
        return self._here(image, bad) if self._is_still(file) else []

    def _hash_blocking(self, image: ImageId, chunks: Sequence[Placed]) -> list[Placed]:
        try:
            fd = self._store.images.open(image)
        except OSError:  # gone: `_is_still` says whether that is as it should be
            return list(chunks)
        try:
            first, last = chunks[0].offset, chunks[-1].offset + chunks[-1].length
            # What memory still has says nothing about the disk.
            os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
            bad = [each for each in chunks if _read(fd, each) is None]
            os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
            return bad
        finally:
            os.close(fd)

    def _is_still(self, file: StockFile) -> bool:
        """Whether the image is sealed as that manifest, so that nobody may write it."""
        image = file.image
        return image is not None and self._store.contents.is_sealed_as(image, file.manifest)

    # Mending

    def _gone(self, file: StockFile, image: ImageId) -> None:
        """The image's file is not there: what the remote has is fetched again when it is read."""
        finding = self._found(file, image, "its file is gone from images/", "reading the file fails")
        if not file.published:
            finding.state, finding.repair = LOST, "the file is not on the remote yet, and was nowhere else"
        elif not self._repair:
            finding.repair = "a scrub that repairs has it read from the remote"
        elif file.ino is not None and self._filesystem.is_open(file.ino):
            finding.repair = "close the file and scrub again: it is read from the remote then"
        else:
            Recovery(self._store.catalog).forget_lost_image(image)
            finding.state, finding.repair = REPAIRED, "it is read from the remote from now on"

    def _found(self, file: StockFile, image: ImageId, what: str, meaning: str) -> Finding:
        finding = Finding(f"image {image:016x}", what, meaning, "", paths=self._paths(file))
        self._report.findings.append(finding)
        self._pace.progress.found += 1
        log.error("%s of %s: %s", finding.where, ", ".join(finding.paths), finding.what)
        return finding

    async def _damaged(self, file: StockFile, image: ImageId, content: Content, bad: list[Placed]) -> None:
        finding = self._found(
            file,
            image,
            f"{_spans(bad)} are not what was sealed{_tensors(content, bad)}",
            "programs that read there get other bytes than were saved",
        )
        if not self._repair:
            finding.repair = "a scrub that repairs looks for these bytes in other files and on the remote"
            return
        if file.published and self.learn_places is not None:
            try:
                await self.learn_places(file.manifest)
            except CkptfsError as error:
                log.warning("%s", error)
        lost, in_use = [], False
        for each in bad:
            raw = await self._copies.find(each.id, each.length, but_image=image)
            if raw is None:
                lost.append(each)
                self._store.contents.drop_location(each.id, Location(image, each.offset, each.length))
            elif not await self._mend(file, image, each, raw):
                in_use = True
        self._conclude(file, finding, lost, in_use)

    def _conclude(self, file: StockFile, finding: Finding, lost: list[Placed], in_use: bool) -> None:
        if lost:
            finding.state = LOST
            finding.repair = (
                f"{_spans(lost)}: no other file here and no pack of the remote has these bytes"
                + ("" if file.published else "; the file is not on the remote yet")
            )
        elif in_use:
            finding.state = FOUND
            finding.repair = "the bytes can be had, but the file is open or mapped: close it and scrub again"
        else:
            finding.state = REPAIRED
            finding.repair = "the bytes were put back from another copy"
            self.mended(file)

    async def _mend(self, file: StockFile, image: ImageId, chunk: Placed, raw: Raw) -> bool:
        """Write *raw* where it belongs; False when the image is in use. A file that changed since needs nothing."""
        for attempt in range(_TRIES):
            if attempt:
                await trio.sleep(_TRY_AGAIN_S)
            if not self._is_still(file) or not self._here(image, [chunk]):
                return True
            if self._is_free(file, image):
                break
        else:
            return False
        self._store.contents.drop_location(chunk.id, Location(image, chunk.offset, chunk.length))
        await self._store.sync.sync()
        try:
            await trio.to_thread.run_sync(self._write, image, chunk, raw)
        except FileNotFoundError:
            return True  # evicted or removed meanwhile
        if self._is_still(file):
            self._store.contents.add_locations(image, [(chunk.id, chunk.offset, chunk.length)])
        return True

    def _is_free(self, file: StockFile, image: ImageId) -> bool:
        if file.ino is not None and self._filesystem.is_open(file.ino):
            return False
        try:
            fd = self._store.images.open(image)
        except OSError:
            return False
        try:
            return nobody_else_uses(fd)
        except OSError:  # no leases here: then nobody has images open but us
            return True
        finally:
            os.close(fd)

    def _write(self, image: ImageId, chunk: Placed, raw: Raw) -> None:
        fd = self._store.images.open(image, writing=True)
        try:
            written = 0
            while written < len(raw):
                written += os.pwrite(fd, memoryview(raw)[written:], chunk.offset + written)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    # Telling

    def _tell_unreadable(self, file: StockFile, why: str) -> None:
        self._report.findings.append(
            Finding(f"manifest {file.manifest}", why, "the file cannot be checked", "run `ckptfs fsck`",
                    paths=self._paths(file))
        )  # fmt: skip

    def _paths(self, file: StockFile) -> tuple[str, ...]:
        names = self._store.names
        try:
            if file.ino is not None:
                return (os.fsdecode(names.path(file.ino)),)
            found = self._stock.cut_name(file.image) if file.image is not None else None
            if found is not None:
                path = names.path(found[0]).rstrip(b"/") + b"/" + found[1]
                return (f"{os.fsdecode(path)} (an earlier version, not published yet)",)
        except CkptfsError:
            pass  # removed meanwhile
        return ()


def _read(fd: int, chunk: Placed) -> bytes | None:
    try:
        raw = os.pread(fd, chunk.length, chunk.offset)
    except OSError as error:
        log.error("an image cannot be read at %d: %s", chunk.offset, error)
        return None
    return raw if digest(raw) == chunk.id else None


def _spans(chunks: Sequence[Placed]) -> str:
    """Where *chunks* lie, the first few."""
    shown = [f"{each.offset:,} to {each.offset + each.length:,}" for each in chunks[:3]]
    more = f" and {len(chunks) - 3} more" if len(chunks) > 3 else ""
    return f"bytes {', '.join(shown)}{more}"


def _tensors(content: Content, chunks: Sequence[Placed]) -> str:
    """The tensors that lie there, the first few."""
    names = [
        tensor.name
        for tensor in content.tensors
        if any(each.offset < tensor.end and tensor.start < each.offset + each.length for each in chunks)
    ]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f" (tensor{'s' if len(names) > 1 else ''} {shown})" if names else ""
