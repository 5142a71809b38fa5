"""`ckptfs mount` and `auth`, and the hidden command that is the daemon."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from ckptfs.client import Conversation, Place, ask, locate
from ckptfs.config import LEAST_MEMORY_BYTES
from ckptfs.errors import CkptfsError, MountError, StoreError
from ckptfs.local.mountinfo import CKPTFS_TYPE
from ckptfs.local.probe import Probe, probe

from .. import mountpoint as mounts
from .. import placement
from ..order import EXIT_PENDING, LOG_NAME, Order, PipeReporter, owner_ids
from .output import DURATION, DURATION_OR_NEVER, SIZE, say, size, size_option

_LAST_BREATH_S = 5.0  # a killed daemon's lock goes when the kernel has taken its memory back


def _check_remote(ctx: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    from ckptfs.remote.open import parse

    try:
        if url is not None:
            parse(url)
    except CkptfsError as error:
        raise click.BadParameter(str(error)) from error
    return url


def _check_owner(ctx: click.Context, parameter: click.Parameter, owner: str | None) -> str | None:
    try:
        if owner is not None:
            owner_ids(owner)
    except CkptfsError as error:
        raise click.BadParameter(str(error)) from error
    return owner


def _check_memory(ctx: click.Context, parameter: click.Parameter, memory_bytes: int | None) -> int | None:
    if memory_bytes is not None and memory_bytes < LEAST_MEMORY_BYTES:
        raise click.BadParameter(
            f"{size(memory_bytes)} is not enough: give it {size_option(LEAST_MEMORY_BYTES)} or more."
        )
    return memory_bytes


def _check_read_timeout(ctx: click.Context, parameter: click.Parameter, seconds: float | None) -> float | None:
    if seconds == 0:
        raise click.BadParameter("without any time nothing could be read; write how long to wait, such as 10m.")
    return seconds


@click.command()
@click.argument("mountpoint")
@click.option(
    "--remote",
    metavar="URL",
    callback=_check_remote,
    help="Where to replicate to: s3://bucket/prefix or file:///directory.",
)
@click.option("--store", metavar="DIR", help="Where local bytes lie [default: $CKPTFS_STORE, or one per mountpoint].")
@click.option("--foreground", is_flag=True, help="Stay, log to stderr, and stop on Ctrl-C.")
@click.option("--read-only", is_flag=True, help="Change nothing, here or on the remote.")
@click.option("--offline", is_flag=True, help="Without the remote: show what the store has, and replicate later.")
@click.option("--allow-other/--no-allow-other", default=None, help="Let other users in [default: only when root].")
@click.option(
    "--owner",
    metavar="mine|stored|UID:GID",
    callback=_check_owner,
    help="Whom files belong to: the mounting user (default), or whoever is stored (default for root).",
)
@click.option(
    "--passthrough",
    type=click.Choice(["auto", "on", "off"]),
    envvar="CKPTFS_PASSTHROUGH",
    help="Let the kernel read and write local bytes itself: where it can (auto), or else do not mount (on).",
)
@click.option("--force", is_flag=True, help="Use a store on a disk that is not fit for one.")
@click.option("--settle", type=DURATION, help="Publish unrecognised layouts after this long without a new name [5s].")
@click.option("--lag", type=DURATION, help="How old the view of other writers may be [2s].")
@click.option("--max-lag", type=DURATION, help="Publish what stays incomplete after this long [120s].")
@click.option(
    "--read-timeout",
    type=DURATION,
    callback=_check_read_timeout,
    help="Reading what only the remote has fails (EIO) when it does not come for this long [60s].",
)
@click.option(
    "--reclaim-after",
    type=DURATION_OR_NEVER,
    help="So long after a file was saved, earlier ones give up what they have in common with it here; or never [10m].",
)
@click.option(
    "--evict-after",
    type=DURATION_OR_NEVER,
    help="So long after its last use a file is on the remote alone, but for the newest set; or never [never].",
)
@click.option("--stop-timeout", type=DURATION, help="After SIGTERM, serve and upload for at most this long [25s].")
@click.option(
    "--memory",
    "memory_bytes",
    type=SIZE,
    metavar="SIZE",
    callback=_check_memory,
    help="Memory that the daemon may take, such as 512M [256M; more with more than 32 GiB, up to 1G].",
)
def mount(
    mountpoint: str,
    remote: str | None,
    store: str | None,
    foreground: bool,
    read_only: bool,
    offline: bool,
    allow_other: bool | None,
    owner: str | None,
    passthrough: str | None,
    force: bool,
    settle: float | None,
    lag: float | None,
    max_lag: float | None,
    read_timeout: float | None,
    reclaim_after: float | None,
    evict_after: float | None,
    stop_timeout: float | None,
    memory_bytes: int | None,
) -> None:
    """Mount MOUNTPOINT; returns when the directory is ready.

    The store remembers the options: the next time, MOUNTPOINT is enough. On a mount that is already there, this hands
    the daemon this shell's AWS_* variables, and changes nothing else. After a crash it cleans up first.
    """
    remembered: dict[str, Any] = {
        "owner": owner,
        "allow_other": allow_other,
        "passthrough": passthrough,
        "settle_s": settle,
        "lag_s": lag,
        "max_lag_s": max_lag,
        "read_timeout_s": read_timeout,
        "reclaim_after_s": reclaim_after,
        "evict_after_s": evict_after,
        "stop_timeout_s": stop_timeout,
        "memory_bytes": memory_bytes,
    }
    mountpoint = mounts.resolve(os.path.expanduser(mountpoint))
    if mounts.clear_dead(mountpoint):
        say(f"cleaned up {mountpoint}: its daemon was killed")
    found = mounts.mounted_at(mountpoint)
    if found is not None and found.type == CKPTFS_TYPE:
        for_now = {"read_only": read_only, "offline": offline}
        _already_mounted(mountpoint, remote, store, foreground, for_now, remembered)
        return
    mounts.check_fuse(allow_other=bool(allow_other))
    chosen = placement.choose(mountpoint, store, anew=remote is not None)
    placement.check(mountpoint, chosen)
    placement.check_remote(mountpoint, remote)
    order = Order(
        mountpoint=mountpoint, store=str(chosen), remote=remote, read_only=read_only, offline=offline, **remembered
    )
    made, first = not chosen.exists(), not placement.is_store(chosen)
    created = mounts.prepare(mountpoint)
    try:
        _examine(chosen, force)
        _take_over(chosen)
        if foreground:
            sys.exit(_serve_here(order, first))
        where = _start(order)
    except BaseException as error:
        if created and mounts.mounted_at(mountpoint) is None:
            _remove_if_empty(mountpoint)
        if made and isinstance(error, CkptfsError) and LOG_NAME not in str(error):  # which would point into it
            placement.discard(chosen)
        raise
    _announce(order, where, first)


@click.command()
@click.argument("mountpoint")
def auth(mountpoint: str) -> None:
    """Hand the daemon of MOUNTPOINT the AWS_* variables of this shell.

    Exit status 3: it has them, and the remote does not answer to them.
    """
    place = locate(os.path.expanduser(mountpoint))
    answer = _hand_over(place)
    if answer is None:
        raise MountError("this shell has no AWS_* variables to hand over")
    if answer.get("refusal"):
        sys.exit(EXIT_PENDING)


@click.command(hidden=True)
@click.argument("report_fd", type=int)
@click.argument("order")
def daemon(report_fd: int, order: str) -> None:
    """Be the daemon of a mount, on behalf of `ckptfs mount`."""
    reporter = PipeReporter(report_fd)
    os.environ.update(json.loads(sys.stdin.read() or "{}"))
    from ..daemon import serve  # pyfuse3 and boto3 stay out of every other command

    sys.exit(serve(Order.load(order), reporter, foreground=False))


class _ForegroundReporter:
    """Tells the terminal."""

    def __init__(self, order: Order, first: bool) -> None:
        self._order = order
        self._first = first
        self.failure: str | None = None

    def note(self, text: str) -> None:
        click.echo(text)

    def ready(self, remote: str | None) -> None:
        _announce(self._order, remote, self._first)

    def error(self, text: str) -> None:
        self.failure = text

    def ended(self, text: str) -> None:
        click.echo(f"unmounted {self._order.mountpoint}: {text}")


def _already_mounted(
    mountpoint: str,
    remote: str | None,
    store: str | None,
    foreground: bool,
    for_now: dict[str, bool],
    remembered: dict[str, Any],
) -> None:
    """Hand over credentials. Raises MountError when the running mount is not what is asked for, in any option."""
    from ckptfs.remote.open import canonical_url

    place = locate(mountpoint)
    there = ask(place.store, "hello")
    if store is not None and Path(os.path.realpath(os.path.expanduser(store))) != place.store:
        raise MountError(f"{mountpoint} is mounted already, with the store {place.store}: unmount it first")
    if remote is not None and canonical_url(remote) != there["remote"]:
        raise MountError(f"{mountpoint} is mounted already, with {there['remote'] or 'no remote'}: unmount it first")
    if foreground:
        raise MountError(
            f"{mountpoint} is mounted already (pid {there['pid']}): unmount it first to serve it with --foreground"
        )
    for name, asked in for_now.items():
        if asked and not there[name]:
            raise MountError(
                f"{mountpoint} is mounted already, without {_option(name, True)}: unmount it first to change that"
            )
    for name, value in remembered.items():
        in_force = there["settings"].get(name)  # a daemon that was started before an upgrade does not know all
        if value is not None and value != in_force:
            raise MountError(
                f"{mountpoint} is mounted already, with {_option(name, in_force)}: unmount it first to change that"
            )
    say(f"{mountpoint} is mounted already (pid {there['pid']})")
    _hand_over(place)


def _option(name: str, value: Any) -> str:
    """The setting *name* as it is written on a command line."""
    option = name.removesuffix("_s").removesuffix("_bytes").replace("_", "-")
    if name.endswith("_bytes"):
        return f"--{option} {size_option(value)}"
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value:g}s" if isinstance(value, float) else f"--{option} {value}"


def _hand_over(place: Place) -> dict[str, Any] | None:
    """What the daemon answers; None when there is nothing to hand over."""
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    if not env:
        return None
    answer: dict[str, Any] = ask(place.store, "credentials", env=env)
    say(f"handed over {', '.join(answer['names'])}")
    if answer.get("refusal"):
        say(f"warning: {answer['refusal']}", err=True)
    return answer


def _examine(store: Path, force: bool) -> None:
    """Print what the store's disk is like; raises StoreError when it is not fit and *force* is not given."""
    try:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        found: Probe = probe(store)
    except OSError as error:
        if error.errno == errno.ENOSPC and placement.is_store(store):  # it was examined before, and keeps a reserve
            say(f"warning: the disk of the store {store} is full: nothing can be saved until there is room", err=True)
            return
        raise StoreError(f"the store {store} cannot be used: {error.strerror}") from error
    if found.refusal is not None and not force:
        raise StoreError(f"the store {store}: {found.refusal}; choose another (--store), or insist with --force")
    say(f"store   {store} ({found.filesystem}, {size(found.free_bytes)} free of {size(found.total_bytes)})")
    for warning in (*found.warnings, *([found.refusal] if found.refusal else [])):
        say(f"warning: {warning}", err=True)


def _take_over(store: Path) -> None:
    """Let a daemon that has no mount any more go on in us; raises StoreError when one still has."""
    if _lock_is_free(store):
        return
    try:
        there = ask(store, "hello")
    except MountError:
        there = None  # killed and not quite gone, or still starting: the lock decides
    if there is not None:
        if there["mounted"]:
            raise StoreError(
                f"the store {store} is in use by process {there['pid']}, which mounts it at {there['mountpoint']}"
            )
        with Conversation(store, "unmount", wait=False) as conversation:
            conversation.result()
            conversation.ended()
    deadline = time.monotonic() + _LAST_BREATH_S
    while not _lock_is_free(store) and time.monotonic() < deadline:
        time.sleep(0.05)


def _lock_is_free(store: Path) -> bool:
    try:
        fd = os.open(store / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _start(order: Order) -> str | None:
    """Start the daemon and wait until it is ready; its remote's URL. Raises MountError with what it says.

    It gets this shell's AWS_* variables through its stdin: what a process is started with, `ps e` shows for as long as
    it lives.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    reading, writing = os.pipe()
    log = os.open(Path(order.store) / LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfs_mount", "daemon", str(writing), order.dump()],
        cwd="/",  # -m puts the current directory first on the module path
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={name: value for name, value in os.environ.items() if name not in ours},
        pass_fds=(writing,),
        start_new_session=True,  # a terminal's Ctrl-C and hang-up are not for it
    )
    os.close(writing)
    os.close(log)
    try:
        assert process.stdin is not None
        try:
            with process.stdin as handed_over:
                handed_over.write(json.dumps(ours).encode())
        except BrokenPipeError:
            pass  # it ended already; the report says why
        with open(reading, encoding="utf-8") as report:
            for line in report:
                message: dict[str, Any] = json.loads(line)
                if "note" in message:
                    say(message["note"])
                elif "error" in message:
                    raise MountError(message["error"])
                elif "ready" in message:
                    remote: str | None = message["remote"]
                    return remote
    except KeyboardInterrupt:
        process.terminate()
        raise
    raise MountError(f"the daemon ended unexpectedly; see {Path(order.store) / LOG_NAME}")


def _serve_here(order: Order, first: bool) -> int:
    """Be the daemon; its exit status. Raises MountError when it could not mount."""
    from ..daemon import serve

    reporter = _ForegroundReporter(order, first)
    status = serve(order, reporter, foreground=True)
    if reporter.failure is not None:
        raise MountError(reporter.failure)
    return status


def _announce(order: Order, remote: str | None, first: bool) -> None:
    placement.remember(order.mountpoint, Path(order.store))
    if remote is None:
        hint = "; nothing leaves this machine (--remote URL replicates)" if first else ""
        say(f"remote  none: the store alone{hint}")
    else:
        say(f"remote  {remote}")
    say(f"mounted {order.mountpoint}")


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        pass
