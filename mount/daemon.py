"""The daemon's life: check everything, mount, serve, drain, unmount, leave a clean store.

One process, one trio loop. `ckptfs mount` starts it detached (or becomes it, with --foreground) and hears from it
through a `Reporter`: notes, then either ready or one error. Nothing is mounted before the store is open and the remote
has answered. The end comes in one of three ways:

- `ckptfs umount` drains through the control socket, then unmounts: the loop ends, and so do we, at once.
- Somebody unmounts by other means: what is pending is uploaded for up to `stop_timeout_s`, then we end.
- SIGTERM: the trainer got it too and saves *now*. We serve on and drain, until all is uploaded and nothing was open
  for writing for a while, or until `stop_timeout_s`; then we unmount. A second signal skips the waiting.

However it ends, the store is left clean and the log says what is safe and what is not.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import logging
import logging.handlers
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyfuse3
import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from ckptfs.engine import Engine, pending_parts
from ckptfs.errors import CkptfsError, MountError, RemoteError, RemoteUnusable
from ckptfs.local.store import Store
from ckptfs.remote.offline import OfflineStore
from ckptfs.remote.open import canonical_url, open_remote
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.replica.admission import admit, bind, bound_to, recognise
from ckptfs.replica.bound import BoundStore

from .control import ControlServer
from .mountpoint import raise_read_ahead
from .operations import MountOptions, Operations
from .order import EXIT_PENDING, LOG_FORMAT, LOG_NAME, REMEMBERED, Order, Reporter, owner_ids
from .passthrough import Passthrough, answer_with
from .requests import Requests

log = logging.getLogger(__name__)

_MAX_TASKS = 512
"""Requests under way at once; beyond it they wait in the kernel. Many more than the readers that a dead remote can
keep waiting, so that a stat is answered beside them; a task costs some KiB."""

_LOG_BYTES, _LOG_FILES = 10 << 20, 3  # a week of hourly incidents; never in the way of a checkpoint

_QUIET_S = 10.0
"""After SIGTERM, how long nothing may be open for writing before we believe that the trainer has saved: it may first
finish its step. Bounded by `stop_timeout_s`; `ckptfs umount` and a second signal do not wait for it."""

_PUBLISHED_S = 5.0
"""... and after how long what is there is published as it is, whole or not: until then by the usual rules."""

_LOOK_EVERY_S = 0.2
_WRITE_BACK_S = 5.0
_REMOTE_CHECK = Limits(0.5, 4.0, attempts=4, deadline_s=30.0)  # then a remote counts as unreachable: somebody waits
_FIRST_ANSWER_S = 30.0  # from mount(2) to the first answered stat
_HANDLERS_END_S = 5.0  # requests still being served when the loop is told to end; then they are cancelled
_COLLECT_AFTER = (2000, 10, 500)  # a full round after 10 million containers more; a middle one takes 3 ms
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_LARGE_BYTES = 8 << 20  # packs; chunks, which are smaller, are better kept for the next
_ANSWERS_S = 10.0  # for control clients to read the summary


class Daemon:
    """One mount, from its checks to its end. Built once the store is open; see `run`."""

    def __init__(self, order: Order, store: Store, remote: BoundStore | None) -> None:
        self.closing = trio.Event()
        self.ended = trio.Event()
        self.summary: Mapping[str, Any] = {}
        self.announced = False
        self._order = order
        self._store = store
        self._settings = store.settings
        self._engine = Engine(store, remote, read_only=order.read_only)
        self._passthrough = Passthrough(store.settings.passthrough, store.images.directory)
        self._mounted_at_s = time.time()
        self._mounted = False
        self._stopping = False
        self._waived = 0
        self._last_written = 0.0  # trio's clock
        self._hurry = trio.Event()
        self._fuse_scope = trio.CancelScope()

    # --- what control requests see of it ---

    def describe(self) -> dict[str, Any]:
        return {
            "mountpoint": self._order.mountpoint,
            "store": str(self._store.path),
            "pid": os.getpid(),
            "mounted_at_s": self._mounted_at_s,
            "mounted": self._mounted,
            "stopping": self._stopping,
            "read_only": self._order.read_only,
            "offline": self._order.offline,
            "remote": self._settings.remote,
            "settings": {
                **{name: getattr(self._settings, name) for name in REMEMBERED},
                "memory_bytes": self._settings.memory_in_force,
            },
            "passthrough": self._passthrough.describe(),
        }

    def waive_drain(self) -> None:
        self._waived += 1
        if not self._mounted:
            self._hurry.set()

    def demand_drain(self) -> None:
        self._waived -= 1

    # --- its life ---

    async def run(self, reporter: Reporter) -> None:
        """Mount, serve until the mount has ended, close the store. Raises MountError when it cannot be mounted."""
        control = ControlServer(self._store.path, Requests(self._engine, self).handlers())
        async with trio.open_nursery() as outer:
            await outer.start(control.run)
            try:
                await self._serve(reporter)
            finally:
                self.closing.set()
                control.retire()
                self._store.close()
                self.ended.set()
                outer.cancel_scope.deadline = trio.current_time() + _ANSWERS_S
        log.info("ended: %s", summary_line(self.summary))
        reporter.ended(summary_line(self.summary))

    async def _serve(self, reporter: Reporter) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_signals, nursery)
            await nursery.start(self._engine.run)
            self._mount()
            try:
                nursery.start_soon(self._announce, reporter)
                await self._fuse_loop()
            finally:
                self._mounted = False
                self._passthrough.end()
                pyfuse3.close(unmount=True)  # does nothing to a mountpoint that is already free
                log.info("unmounted %s", self._order.mountpoint)
            await self._engine.filesystem.release_all()
            if not self._stopping and not self._waived:
                await self._linger()
            self.summary = await self._summarise()
            self.closing.set()
            nursery.cancel_scope.cancel()

    def _mount(self) -> None:
        options = {"fsname=ckptfs", "subtype=ckptfs", "default_permissions"}
        if self._settings.allow_other:
            options.add("allow_other")
        if self._order.read_only:
            options.add("ro")
        operations = Operations(
            self._engine.filesystem,
            MountOptions(
                owner=owner_ids(self._settings.owner),
                state=self._engine.state_of,
                **({} if self._settings.remote is None else {"cache_s": self._settings.lag_s}),
            ),
        )
        if self._engine.replica is not None:
            self._engine.replica.on_remote_change = operations.changed_elsewhere
        self._passthrough.prepare()
        answer_with(operations)
        self._engine.filesystem.files.backing = self._passthrough
        try:
            pyfuse3.init(operations, self._order.mountpoint, options)
        except RuntimeError as error:
            raise MountError(
                f"the kernel or fusermount3 refused to mount {self._order.mountpoint}; "
                f"their reason is in {self._store.path / LOG_NAME}"
            ) from error
        self._mounted = True

    async def _announce(self, reporter: Reporter) -> None:
        """Say ready once the kernel has an answer from us.

        Another process asks. A thread of ours that waits for our own answer when we are killed would wait for ever: it
        keeps the connection open that would have to close, and the mount could neither be used nor unmounted.
        """
        command = ["stat", "--dereference", "--format=%d", "--", self._order.mountpoint]
        try:
            with trio.fail_after(_FIRST_ANSWER_S):
                answer = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
        except (OSError, subprocess.CalledProcessError, trio.TooSlowError) as error:
            raise MountError(f"{self._order.mountpoint} was mounted, but does not answer ({error})") from error
        self._passthrough.check()
        raise_read_ahead(int(answer.stdout), cold_only=self._passthrough.on)
        log.info("mounted %s, remote %s", self._order.mountpoint, self._settings.remote)
        reporter.ready(self._settings.remote)
        self.announced = True

    async def _fuse_loop(self) -> None:
        with self._fuse_scope:
            await pyfuse3.main(max_tasks=_MAX_TASKS)

    async def _watch_signals(self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self._stopping or not self._mounted:
                    log.warning("%s: stopping now", name)
                    self._hurry.set()
                    self._end_loop()
                else:
                    self._stopping = True
                    log.warning(
                        "%s: serving on until programs are done, for up to %.0f s; a second one stops at once",
                        name,
                        self._settings.stop_timeout_s,
                    )
                    nursery.start_soon(self._stop_gently)

    async def _stop_gently(self) -> None:
        try:
            await self._serve_on()
        except Exception:  # the next mount goes on with what is left
            log.exception("stopping at once")
        self._end_loop()

    async def _serve_on(self) -> None:
        """Return when nobody has written for a while and all is uploaded, or it is time.

        Checkpoints are published as ever, once they are whole; what is there when nobody writes any more, as it is.
        """
        deadline = trio.current_time() + self._settings.stop_timeout_s
        quiet_s = min(_QUIET_S, self._settings.stop_timeout_s)

        def quiet_since_s() -> float:
            return trio.current_time() - self._last_written

        with trio.move_on_at(deadline), self._engine.hurried():
            async with trio.open_nursery() as nursery:
                await nursery.start(self._watch_writers)
                while True:
                    await self._write_back()
                    if quiet_since_s() >= min(_PUBLISHED_S, quiet_s):
                        drained = await self._engine.drain(deadline - trio.current_time())
                        if drained and quiet_since_s() >= quiet_s:
                            break
                    await trio.sleep(_LOOK_EVERY_S)
                nursery.cancel_scope.cancel()

    async def _write_back(self) -> None:
        """Have the kernel hand over what was stored through maps of files that we serve: it tells nobody until then.

        Another process asks, as in `_announce`.
        """
        with trio.move_on_after(_WRITE_BACK_S):
            await trio.run_process(
                ["sync", "--file-system", "--", self._order.mountpoint], capture_stderr=True, check=False
            )

    async def _watch_writers(self, *, task_status: trio.TaskStatus[None]) -> None:
        self._last_written = trio.current_time()
        task_status.started()
        while True:
            idle_s = 0.0 if self._engine.writers_open() else self._engine.filesystem.unchanged_s
            self._last_written = max(self._last_written, trio.current_time() - idle_s)
            await trio.sleep(_LOOK_EVERY_S)

    def _end_loop(self) -> None:
        if self._mounted:
            pyfuse3.terminate()
            self._fuse_scope.deadline = trio.current_time() + _HANDLERS_END_S

    async def _linger(self) -> None:
        """After an unmount: upload what is pending, while there is time."""
        if self._engine.progress().is_clear:
            return
        log.info("uploading for up to %.0f s more", self._settings.stop_timeout_s)
        async with trio.open_nursery() as nursery:

            async def hurry() -> None:
                await self._hurry.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(hurry)
            with trio.move_on_after(self._settings.stop_timeout_s):
                await self._engine.drain(self._settings.stop_timeout_s)
            nursery.cancel_scope.cancel()

    async def _summarise(self) -> dict[str, Any]:
        status = await self._engine.status()
        progress = self._engine.progress()
        return {
            "remote": self._settings.remote,
            "store": str(self._store.path),
            "safe": status["safe"],
            "remote_wrong": status["remote_wrong"],
            "damaged": status["damaged"],
            "pending": pending_parts(progress),
            "at_risk": status["at_risk"],
            "newest_safe_set": status["newest_safe_set"],
            "last_error": status["last_error"],
            "sent_bytes": progress.sent_bytes,
            "remote_bytes": status["bytes"]["on_remote"],
        }


def summary_line(summary: Mapping[str, Any]) -> str:
    """One sentence on what is safe and what is not."""
    if not summary:
        return "ended before it served"
    if summary["remote"] is None:
        return f"everything is in the store {summary['store']}, and only there: there is no remote"
    left = summary["pending"]
    if not any(left.values()):
        if summary["remote_wrong"]:
            return f"nothing is known to be on {summary['remote']}: {summary['remote_wrong']}"
        if not summary["safe"]:
            packs = ", ".join(each["object"] for each in summary["damaged"][:3])
            return f"everything was sent to {summary['remote']}, but not all can be read back from there: {packs}"
        return f"everything is on {summary['remote']}"
    error = f" (last error: {summary['last_error']})" if summary["last_error"] else ""
    what = f"{left['files']} {'file' if left['files'] == 1 else 'files'}, {left['bytes']} bytes"
    if not left["files"] and not left["bytes"]:
        what = f"{left['changes']} changes of names"
    return f"{what} are only in the store {summary['store']}; the next mount goes on with them{error}"


def serve(order: Order, reporter: Reporter, *, foreground: bool) -> int:
    """Be the daemon; returns its exit status when the mount has ended.

    Everything that is wrong before the mount stands goes to *reporter*, as one line.
    """
    os.chdir("/")  # never keep a directory, least of all our own mount, busy
    os.umask(0o077)
    _raise_descriptor_limit()
    try:
        store = Store.open(Path(order.store))
    except (CkptfsError, OSError) as error:
        reporter.error(str(error))
        return 1
    _start_log(store.path, foreground)
    log.info("ckptfs daemon %d: %s", os.getpid(), order.dump())
    try:
        remote = _settle(store, order, reporter.note)
        daemon = Daemon(order, store, remote)
    except BaseException as error:
        store.close()
        log.error("not mounted: %s", error)
        reporter.error(_one_line(error))
        return 1
    _calm_collector()
    _give_memory_back()
    try:
        trio.run(daemon.run, reporter, strict_exception_groups=True)
    except BaseException as error:
        if daemon.announced or not all(isinstance(each, MountError) for each in _leaves(error)):
            log.critical("the daemon failed", exc_info=error)
        if not daemon.announced:
            log.error("not mounted: %s", _one_line(error))
            reporter.error(_one_line(error))
        else:
            reporter.ended(f"the daemon failed: {_one_line(error)}; see {store.path / LOG_NAME}")
        return 1
    return EXIT_PENDING if daemon.summary["remote"] is not None and not daemon.summary["safe"] else 0


def _calm_collector() -> None:
    """Keep the garbage collector's full rounds rare: each stops every thread.

    With the chunk lists of a large file in memory one took 0.2 to 0.3 s, several times while such a list was built.
    What garbage has cycles is nearly all young, and the young are still collected.
    """
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(*_COLLECT_AFTER)


def _give_memory_back() -> None:
    """Let large buffers go to the kernel when they are freed.

    glibc raises the size from which they do up to 32 MiB as they come and go, and keeps smaller ones in the arenas of
    whichever threads had them: after 6 GiB were uploaded, 265 MiB of nothing, instead of 51. Threads that share one
    arena fetch one after another into the same memory: 30 MiB less for a restore, and a twentieth less processor time.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)
    except AttributeError:
        pass  # another C library, with habits of its own


def _settle(store: Store, order: Order, note: Callable[[str], None]) -> BoundStore | None:
    """Open the remote and see that it may be used; then the store remembers what *order* says.

    Raises MountError and RemoteError, and then nothing was created or remembered.
    """
    first = not (store.path / "settings.json").exists()
    known = store.settings
    url = canonical_url(order.remote) if order.remote is not None else known.remote
    if known.remote is not None and url != known.remote:
        raise MountError(
            f"the store {store.path} replicates to {known.remote}, not to {url}: "
            "choose another store (--store), or leave --remote out"
        )
    if order.owner is not None:
        owner_ids(order.owner)
    remote = _meet(store, url, order, note) if url is not None else None
    root = os.geteuid() == 0
    changes: dict[str, Any] = {name: value for name in REMEMBERED if (value := getattr(order, name)) is not None}
    if first:
        changes = {"owner": "stored" if root else "mine", "allow_other": root, **changes}
    wanted = dataclasses.replace(known, remote=url, **changes)
    if first or wanted != known:  # writing takes room, and the disk may be full
        store.save_settings(wanted)
    return remote


def _meet(store: Store, url: str, order: Order, note: Callable[[str], None]) -> BoundStore:
    """The remote at *url*: the one that the store is bound to, or the one that it is bound to from now on.

    Raises MountError and RemoteError.
    """
    known = bound_to(store.catalog)
    began_ns = time.time_ns()
    if order.offline:
        note(f"offline: {url} gets nothing, and what only it has cannot be read, until a mount without --offline")
        return BoundStore(OfflineStore(url), known)
    try:
        remote = open_remote(url, create=known is None and not order.read_only)
        asked = Retrying(remote, _REMOTE_CHECK)
        found = admit(asked, create=not order.read_only) if known is None else recognise(asked, known)
    except RemoteError as error:
        if known is None:
            raise
        text = str(error).removesuffix(".") + "."
        if isinstance(error, RemoteUnusable):
            text += " Bring the right one back, or begin anew with another store (--store)."
        raise MountError(
            f"{text} With --offline, what the store {store.path} has can be seen and copied without the remote."
        ) from error
    bind(store.catalog, found)
    if known is None and found.created_ns >= began_ns:
        note(f"{url} was empty: a new remote begins there")
    return BoundStore(remote, found.store)


def _one_line(error: BaseException) -> str:
    """The message for people: of a group, its first error of ours, or its first."""
    found = _leaves(error)
    chosen = next((each for each in found if isinstance(each, CkptfsError)), found[0])
    text = str(chosen) if isinstance(chosen, (CkptfsError, OSError)) else repr(chosen)
    return " ".join(text.split())


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]


def _start_log(store: Path, foreground: bool) -> None:
    handler = logging.handlers.RotatingFileHandler(store / LOG_NAME, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    if foreground:
        shown = logging.StreamHandler()
        shown.setLevel(logging.WARNING)
        shown.setFormatter(logging.Formatter("ckptfs: %(message)s"))
        root.addHandler(shown)
    logging.captureWarnings(True)
    for noisy in ("botocore", "boto3", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    faulthandler.enable()  # to stderr: of a detached daemon, the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where does it hang? kill -USR1


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        # Every open file holds its image's descriptor; shells' soft limit of 1024 is for programs that use select.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
