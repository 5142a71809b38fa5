"""Publishing: one cut after another becomes visible on the remote, and nothing that it needs is missing by then.

    cut whole and sealed -> packs -> manifests -> trees -> index -> head committed here -> head put -> finished here

Each step waits for the remote's acknowledgement of the one before (invariant 3). Any failure of the remote is waited
out for ever, with growing pauses, and touches nothing local (invariant 8); what was acknowledged is not sent again.

Who calls: `run` is the one task that publishes; it owns the order. `wake` is called on the loop when there may be
something to do (a cut was taken, an image sealed), `retry_now` when the remote may work again (new credentials). Other
tasks wait in `drained` and `publish_now`. Cancelling `run` at any point loses nothing: it goes on from the catalog.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from ckptfs.background.caller import Background
from ckptfs.encoding.canonical import object_id, open_object, seal_object
from ckptfs.encoding.fields import MOST
from ckptfs.encoding.head import Head, decode_head, encode_head, head_key
from ckptfs.encoding.index import Index, decode_index, encode_index
from ckptfs.encoding.keys import index_key, manifest_key, pack_key
from ckptfs.errors import CkptfsError, ObjectExists, ObjectMissing, RemoteError
from ckptfs.ids import ImageId, Inode, ObjectId
from ckptfs.local.catalog.cuts import CutRow, Cuts, Subtree, Unneeded
from ckptfs.local.catalog.heads import HeadRow, Heads
from ckptfs.local.catalog.keyframes import Keyframes
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.store import Store
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.replica.admission import admit, bind, bound_to, recognise
from ckptfs.replica.bases import Bases
from ckptfs.replica.cuttrees import BuiltTrees, CutTrees, PackLost, files_in_order
from ckptfs.replica.indexes import IndexLearner
from ckptfs.replica.markers import Markers
from ckptfs.replica.puts import Puts
from ckptfs.replica.trees import Trees
from ckptfs.replica.upload import DamagedContent, UploadCounters, Uploader

log = logging.getLogger(__name__)

WHOLE_MOUNT = ""
"""The lane that every name is in."""
_TRUST_S = 3600.0
"""How long an acknowledged object that no head names is taken to be there still; gc's grace period is days."""
_ATTEMPTS = 4
"""Times that a request is made before the whole step counts as failed: an encoded pack is worth waiting a few seconds,
but not an outage, in which everybody waits together."""
_SEAL_S = 30.0
"""How often a cut that waits for sealing is looked at unasked."""
_MANIFESTS_AT_ONCE = 100
"""Inlined manifests recorded by one commit."""


@dataclass(frozen=True)
class Progress:
    """How much is left to do, for people who wait."""

    pending_bytes: int
    pending_files: int
    sent_bytes: int
    """Encoded, since this process began."""
    rate_bytes_s: float
    eta_s: float | None
    last_error: str | None
    pending_changes: int = 0
    """Directories, and names that were removed."""

    @property
    def is_clear(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.pending_files or self.pending_bytes or self.pending_changes)


class Publisher:
    """Publishes the cuts of one store on one remote.

    *cut_now* takes a cut at once and says whether there was anything to cut; *reseal* hands an image to sealing again;
    *released* is told what a finished cut has left. None of them may await.
    """

    def __init__(
        self,
        store: Store,
        remote: ObjectStore,
        *,
        cuts: Cuts,
        heads: Heads,
        packs: Packs,
        cut_now: Callable[[], bool] = lambda: False,
        reseal: Callable[[ImageId], None] = lambda image: None,
        released: Callable[[Unneeded], None] = lambda unneeded: None,
        background: Background | None = None,
    ) -> None:
        tuning = store.settings.tuned
        self._stopped = threading.Event()
        """Set when `run` ended: requests that it left in their threads are not repeated."""
        limits = Limits(tuning.retry_first_s, tuning.retry_most_s, attempts=_ATTEMPTS, cancel=self._stopped)
        remote = Retrying(remote, limits, on_retry=self._failing)
        self._store = store
        self._remote: ObjectStore = remote
        self._cuts = cuts
        self._heads = heads
        self._packs = packs
        self.cut_now = cut_now
        self.reseal = reseal
        self.released = released
        self.on_published: Callable[[], None] = lambda: None
        """Called when a head was acknowledged."""
        self.on_abandoned: Callable[[], None] = lambda: None
        """Called when a cut was given up, so that what it had is to be cut again."""
        self.counters = UploadCounters()
        self.last_error: str | None = None
        self.last_success_s: float | None = None
        """When the remote last acknowledged a head, seconds since 1970."""
        self._uploader = Uploader(
            contents=store.contents,
            cuts=cuts,
            packs=packs,
            bases=Bases(store.contents, packs, Keyframes(store.catalog)),
            images=store.images,
            remote=remote,
            tuning=tuning,
            counters=self.counters,
            acknowledged=self._saw_pack,
            background=background,
        )
        self._markers = Markers(cuts, store.contents, store.images)
        self._indexes = IndexLearner(store.catalog, packs, remote)
        self._putting = trio.CapacityLimiter(tuning.upload_threads)
        self._trees = CutTrees(
            contents=store.contents,
            cuts=cuts,
            packs=packs,
            read_tree=Trees(remote, self._putting).read,
            tuning=tuning,
        )
        self._wanted = trio.Event()
        self._hurry = trio.Event()
        self._finished = trio.Event()
        self._finished_cut = 0
        self._failures = 0
        self._raw_bytes_before = 0
        self._admitted = False
        self._seen_at: dict[ObjectId, float] = {}
        """Packs that no head names yet: when the remote was last known to have them."""
        self._done: set[str] = set()
        """Keys of small objects that were put for the cut that is being published."""
        self._began: tuple[int, float] | None = None
        self._built: tuple[int, dict[Inode, Subtree]] | None = None
        """The cut being published and its trees, from when its head is committed to when it is finished."""

    # Asking

    def wake(self) -> None:
        """There may be something to publish."""
        self._wanted.set()

    def retry_now(self) -> None:
        """The remote may work again: do not wait any longer."""
        self._hurry.set()
        self._wanted.set()

    @property
    def is_drained(self) -> bool:
        """Whether every cut that was taken is published."""
        return (
            self._heads.unacknowledged() is None and self._cuts.pending() is None and self._cuts.publishing() is None
        )

    async def drained(self) -> None:
        """Return when every cut that was taken is published."""
        self.retry_now()
        while not self.is_drained:
            await self._finished.wait()

    async def publish_now(self) -> None:
        """Cut at once, and return when the head that has this cut (or a newer one) is acknowledged."""
        self.cut_now()
        newest = self._cuts.pending() or self._cuts.publishing()
        self.retry_now()
        while newest is not None and self._finished_cut < newest.id and not self.is_drained:
            await self._finished.wait()

    def progress(self) -> Progress:
        files, size, images = self._cuts.unpublished()
        for image in images:
            try:
                size += self._store.images.status(image).st_size
            except FileNotFoundError:
                pass
        left = max(0, size - (self.counters.raw_bytes - self._raw_bytes_before))
        rate = self.counters.rate_bytes_s
        return Progress(left, files, self.counters.sent_bytes, rate, left / rate if rate > 0 else None, self.last_error)

    def _failing(self, error: RemoteError, wait_s: float) -> None:
        """A request failed and is repeated; called in its thread."""
        self.last_error = str(error)
        self.counters.repeated += 1  # two threads may count once: that it changes is enough

    # Running

    async def run(self) -> None:
        """Publish until cancelled."""
        self._stopped.clear()  # of an earlier run, which failed
        try:
            await self._run()
        finally:
            self._stopped.set()

    async def _run(self) -> None:
        while True:
            packs = self.counters.packs
            try:
                await self._step()
                self._failures = 0
                continue
            except PackLost as lost:
                log.warning("%s: it is sent again", lost)
                self._forget_attempt()
                continue
            except DamagedContent as damage:
                self._refuse(damage)
                continue
            except RemoteError as error:
                problem: CkptfsError = error
                log.log(logging.INFO if error.temporary else logging.ERROR, "publishing waits: %s", error)
            except Exception as error:  # a defect here must not end the mount: local work goes on, status shows it
                problem = error if isinstance(error, CkptfsError) else CkptfsError(f"{type(error).__name__}: {error}")
                log.exception("publishing failed")
            self.last_error = str(problem)
            self._failures = 1 if self.counters.packs > packs else self._failures + 1
            await self._pause()

    async def _pause(self) -> None:
        tuning = self._store.settings.tuning
        step_s = min(tuning.retry_most_s, tuning.retry_first_s * 2.0 ** min(self._failures - 1, 16))
        self._hurry = trio.Event()
        with trio.move_on_after(step_s * random.uniform(0.5, 1.0)):
            await self._hurry.wait()

    async def _step(self) -> None:
        """Do the next thing there is to do, or wait for one."""
        self._wanted = trio.Event()
        head = self._heads.unacknowledged()
        cut = self._cuts.publishing()
        if head is None and cut is None:
            cut = self._cuts.pending()
            if cut is not None and self._is_sealed(cut):
                self._cuts.begin(cut.id)
        if head is None and (cut is None or not self._is_sealed(cut)):
            with trio.move_on_after(_SEAL_S):
                await self._wanted.wait()
            return
        await self._admit()
        if head is None and cut is not None:
            head = await self._prepare(cut)
        if head is not None:
            await self._put_head(head)

    async def _admit(self) -> None:
        if self._admitted:
            return
        known = bound_to(self._store.catalog)
        remote = self._remote
        ask = partial(admit, remote, create=True) if known is None else partial(recognise, remote, known)
        bind(self._store.catalog, await trio.to_thread.run_sync(ask, abandon_on_cancel=True))
        self._admitted = True

    def _is_sealed(self, cut: CutRow) -> bool:
        """Whether every file of the cut is. Nothing is to wait for images whose flush failed or that cannot be read."""
        hopeless = self._store.sync.poisoned.keys() | self._store.unreadable
        while (image := self._cuts.first_unsealed(cut.id)) is not None:
            if image not in hopeless and self._store.images.has(image):
                return False
            log.error("image %016x cannot be sealed: its file is left out of what is published", image)
            self._cuts.leave_out(image)
        return True

    def _refuse(self, damage: DamagedContent) -> None:
        for manifest in damage.manifests:
            for image in self._cuts.refuse(manifest):
                log.error("image %016x does not give what was sealed: it is sealed anew before it is published", image)
                self.reseal(image)

    def _forget_attempt(self) -> None:
        cut = self._cuts.publishing()
        if cut is not None:
            self._cuts.forget_manifests(cut.id)
        self._done.clear()
        self._began = None

    # One publication

    async def _prepare(self, cut: CutRow) -> HeadRow | None:
        """Bring everything that the cut needs to the remote and commit its head; None when it needs no new head."""
        if self._began is None or self._began[0] != cut.id or trio.current_time() - self._began[1] > _TRUST_S:
            self._forget_attempt()
            self._began = (cut.id, trio.current_time())
            self._raw_bytes_before = self.counters.raw_bytes
        await self._look_for_packs()
        await self._indexes.learn()
        pending_bytes = self._cuts.unpublished_bytes(cut.id)
        files = files_in_order(self._cuts, cut.id, lambda directory: self._leaves_out(cut, directory))
        await self._uploader.upload(files, pending_bytes)
        await self._put_manifests(cut)
        async with self._puts() as puts:
            built = await self._trees.build(cut.id, puts.put)
        await self._look_for_packs()
        return await self._commit_head(cut, built)

    def _leaves_out(self, cut: CutRow, directory: Inode) -> bool:
        """Whether *directory* was rotated away before it was sent, and need not be sent any more."""
        gone = self._cuts.leave_out_removed(cut.id, directory, self._markers.may_name)
        if gone is None:
            return False
        self.released(gone)
        return True

    def _puts(self) -> Puts:
        return Puts(self._remote, self._done, self._store.settings.tuning.upload_threads, self._count_put)

    def _count_put(self) -> None:
        self.counters.puts += 1

    def _saw_pack(self, name: ObjectId) -> None:
        self._seen_at[name] = trio.current_time()

    async def _look_for_packs(self) -> None:
        """Check that packs which no head names are still there. Raises PackLost after forgetting those that are not."""
        lost = []
        for name in self._packs.unnamed():
            seen_at = self._seen_at.get(name)
            if seen_at is not None and trio.current_time() - seen_at < _TRUST_S:
                continue
            key = pack_key(name)
            size = await trio.to_thread.run_sync(self._remote.size, key, limiter=self._putting, abandon_on_cancel=True)
            if size is None:
                self._packs.forget(name)
                lost.append(name)
            else:
                self._saw_pack(name)
        if lost:
            raise PackLost(f"{len(lost)} packs are gone from {self._remote.url}")

    async def _put_manifests(self, cut: CutRow) -> None:
        contents = self._store.contents
        inlined: list[tuple[int, ObjectId, bytes | None]] = []

        def remember() -> None:
            with self._store.catalog.transaction():
                for row in inlined:
                    contents.set_manifest_published(*row)
            inlined.clear()

        async with self._puts() as puts:
            for file in files_in_order(self._cuts, cut.id):
                content = await self._uploader.content(file.manifest)
                name, body = await self._trees.manifest(file, content)
                if len(body) <= self._store.settings.tuning.inline_bytes:
                    inlined.append((file.manifest, name, body))
                else:
                    published = partial(contents.set_manifest_published, file.manifest, name, None)
                    await puts.put(manifest_key(name), body, published)
                if len(inlined) >= _MANIFESTS_AT_ONCE:
                    remember()
        remember()

    async def _commit_head(self, cut: CutRow, built: BuiltTrees) -> HeadRow | None:
        newest = self._heads.newest()
        before = _decode(newest) if newest is not None else None
        new_packs = self._packs.unnamed()
        vector = {writer: seq for writer, seq in cut.vector.items() if writer != self._store.writer}
        if newest is not None and before is not None and not new_packs:
            state = (before.lanes[WHOLE_MOUNT][0], before.vector, before.incomplete)
            if state == (built.root[0], vector, cut.incomplete):  # a name came and went, say
                self._finish(cut, newest.seq, built.trees, ())
                return None
        index, index_body = await self._index(before, new_packs)
        head = Head(
            writer=self._store.writer,
            seq=self._heads.next_seq(),
            lanes={WHOLE_MOUNT: built.root},
            vector=vector,
            previous=object_id(open_object(newest.body)) if newest is not None else None,
            index=index,
            index_body=index_body,
            time_ns=cut.taken_ns,
            stamp=cut.stamp,
            incomplete=cut.incomplete,
            counts={
                "directories": len(built.trees),
                "entries": built.entries,
                "files": built.files,
                "bytes": min(built.bytes, MOST),  # sparse files may have more between them
                "packs": len(new_packs),
            },
        )
        row = HeadRow(head.seq, seal_object(encode_head(head)))
        self._heads.commit(row.seq, row.body)
        self._built = (cut.id, built.trees)
        await trio.to_thread.run_sync(self._store.catalog.sync_wal)
        return row

    async def _index(self, before: Head | None, new_packs: list[ObjectId]) -> tuple[ObjectId | None, bytes | None]:
        """The index of what was added: digest, and JSON where inlined.

        An index that was inlined in the head before is taken over into this one, so that following `previous` never
        leads to an object that is not there.
        """
        if not new_packs:
            return (before.index, before.index_body) if before is not None else (None, None)
        packs = {}
        for pack in new_packs:
            packs[pack] = self._packs.chunks(pack)
            await trio.lowlevel.checkpoint()  # a large upload has thousands of packs: requests come first
        previous = before.index if before is not None else None
        if before is not None and before.index_body is not None:
            inlined = decode_index(before.index_body)
            packs = {**inlined.packs, **packs}
            previous = inlined.previous
        body = await trio.to_thread.run_sync(encode_index, Index(packs, previous))
        name = object_id(body)
        if len(body) <= self._store.settings.tuning.inline_bytes:
            return name, body
        async with self._puts() as puts:
            await puts.put(index_key(name), body)
        return name, None

    # The head

    async def _put_head(self, row: HeadRow) -> None:
        """Put a committed head, unchanged, until the remote has it; then finish its cut."""
        key = head_key(self._store.writer, row.seq)
        earlier = self._built is None  # committed by an earlier process, perhaps long ago
        if earlier and await self._get(key) is None and not await self._still_complete(row):
            return
        try:
            await trio.to_thread.run_sync(self._put_head_blocking, key, row.body, abandon_on_cancel=True)
        except ObjectExists:
            found = await self._get(key)
            if found is None:
                raise RemoteError(f"{key} is there and is not", key=key, temporary=True) from None
            if found != row.body:
                log.error("%s holds another store's head: this store was copied, and goes on as a new writer", key)
                self._store.new_writer()
                self._built = None
                return
        head = _decode(row)
        cut = self._cuts.publishing()
        trees = await self._trees_of(cut, head) if cut is not None else None
        self._finish(cut, row.seq, trees, self._packs.unnamed())

    def _put_head_blocking(self, key: str, body: bytes) -> None:
        self.counters.puts += 1
        self._remote.put(key, body, if_absent=True)

    async def _get(self, key: str) -> bytes | None:
        try:
            return await trio.to_thread.run_sync(self._remote.get, key, limiter=self._putting, abandon_on_cancel=True)
        except ObjectMissing:
            return None

    async def _still_complete(self, row: HeadRow) -> bool:
        """Whether what a head of an earlier process reaches is still there. If not, the head is given up for ever."""
        try:
            await self._look_for_packs()
            return True
        except PackLost as lost:
            log.warning("%s: head %d is given up, its state is published by the next one", lost, row.seq)
            self._heads.give_up(row.seq)
            self._forget_attempt()
            await trio.to_thread.run_sync(self._store.catalog.sync_wal)
            return False

    async def _trees_of(self, cut: CutRow, head: Head) -> dict[Inode, Subtree] | None:
        """The trees of the cut that *head* has; built again after a restart. None when they come out differently."""
        if self._built is not None and self._built[0] == cut.id:
            return self._built[1]

        async def put_nothing(key: str, body: bytes) -> None:
            pass

        built = await self._trees.build(cut.id, put_nothing)
        return built.trees if built.root[0] == head.lanes[WHOLE_MOUNT][0] else None

    def _finish(
        self,
        cut: CutRow | None,
        seq: int,
        trees: dict[Inode, Subtree] | None,
        packs: list[ObjectId] | tuple[ObjectId, ...],
    ) -> None:
        unneeded = Unneeded()
        with self._store.catalog.transaction():
            self._heads.acknowledged(seq)
            self._packs.named(packs, seq)
            if cut is not None:
                unneeded = self._cuts.finish(cut.id, seq, trees)
        if cut is not None and trees is None:
            self.on_abandoned()
        self.released(unneeded)  # after the commit: image files are deleted
        log.info("head %d published%s", seq, ", incomplete" if cut is not None and cut.incomplete else "")
        self._built = None
        self._began = None
        self._done.clear()
        for name in packs:
            self._seen_at.pop(name, None)
        self._raw_bytes_before = self.counters.raw_bytes
        self.last_error = None
        self.last_success_s = time.time()
        if cut is not None:
            self._finished_cut = max(self._finished_cut, cut.id)
        self._finished.set()
        self._finished = trio.Event()
        self.on_published()


def _decode(row: HeadRow) -> Head:
    return decode_head(open_object(row.body))
