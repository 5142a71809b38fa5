"""`ckptfs umount`: leaving a mount, with everything on the remote or with word of what is not."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from ckptfs.client import Conversation, Place, StoreGone, locate
from ckptfs.errors import MountError
from ckptfs.local.mountinfo import CKPTFS_TYPE

from .. import mountpoint as mounts
from ..order import EXIT_PENDING
from .output import JSON, parts, size
from .waiting import Waiting, interruptible


@click.command()
@click.argument("mountpoint")
@click.option("--wait/--no-wait", default=True, help="Wait for uploads first [default: wait].")
@JSON
def umount(mountpoint: str, wait: bool, as_json: bool) -> None:
    """Unmount MOUNTPOINT, once everything is on the remote.

    Ctrl-C stops waiting and unmounts at once. Exit status 3: unmounted, but something is only in the store; the next
    mount goes on with it.
    """
    mountpoint = mounts.resolve(os.path.expanduser(mountpoint))
    if mounts.clear_dead(mountpoint):
        why = f"its daemon was killed; what was pending is in its store: `ckptfs mount {mountpoint}` goes on with it"
        sys.exit(_tell_end_without_daemon(mountpoint, why, as_json))
    found = mounts.mounted_at(mountpoint)
    if found is None or found.type != CKPTFS_TYPE:
        raise MountError(f"{mountpoint}: no ckptfs is mounted here")
    gone: StoreGone | None = None
    try:
        place = locate(mountpoint)
    except StoreGone as error:
        gone = error
    os.chdir("/")  # a shell in the mount keeps it busy, this command does not
    users = mounts.users(mountpoint)
    if users or mounts.mounts_below(mountpoint):
        raise mounts.MountBusy(mountpoint, users)
    if gone is not None:
        mounts.unmount(mountpoint)
        sys.exit(_tell_end_without_daemon(mountpoint, gone.what, as_json))
    sys.exit(_tell_end(mountpoint, _end(place, wait, quiet=as_json), as_json))


def _end(place: Place, wait: bool, *, quiet: bool) -> dict[str, Any]:
    """Wait for uploads if *wait*, unmount, and return the daemon's summary when the store is closed."""
    unmounted = False
    mount = mounts.mounted_at(place.mountpoint)
    others: list[mounts.User] = []
    with (
        Conversation(place.store, "unmount", wait=wait) as conversation,
        Waiting("uploading", hint="Ctrl-C unmounts without waiting; the next mount goes on", quiet=quiet) as waiting,
        interruptible() as check_interrupt,
    ):

        def follow(report: dict[str, Any]) -> None:
            nonlocal unmounted
            if report.get("ready"):
                waiting.end()
                mounts.unmount(place.mountpoint)
                unmounted = True
            elif "pending_bytes" in report:
                check_interrupt()
                waiting.show(report)
                if unmounted and mount is not None:
                    others[:] = mounts.elsewhere(mount.device)
                    if others:
                        raise _StillMounted

        try:
            summary: dict[str, Any] = conversation.result(follow)
            conversation.ended()
            return summary
        except _StillMounted:
            who = ", ".join(f"pid {user.pid} ({user.command}: {user.why})" for user in others)
            click.echo(
                f"unmounted {place.mountpoint} here; another mount namespace, such as a container's, still has it: "
                f"{who}. Its daemon serves and uploads until that one lets go",
                err=True,
            )
            sys.exit(EXIT_PENDING)
        except KeyboardInterrupt:
            if unmounted:
                click.echo(
                    f"unmounted {place.mountpoint}; its daemon still uploads what was closed last, for a while; "
                    "the next mount goes on with what is left",
                    err=True,
                )
                sys.exit(EXIT_PENDING)
    click.echo("not waiting any longer: unmounting now", err=True)
    return _end(place, wait=False, quiet=quiet)


class _StillMounted(Exception):
    """The mount goes on where this process does not see it."""


def _tell_end(mountpoint: str, summary: dict[str, Any], as_json: bool = False) -> int:
    """Print the summary; the exit status."""
    left = summary["pending"]
    damaged = [each for each in summary.get("damaged", ()) if each["here"]]  # an older daemon does not know it
    if as_json:
        click.echo(json.dumps({"mountpoint": mountpoint, "unmounted": True, **summary}))
        return EXIT_PENDING if any(left.values()) or summary.get("remote_wrong") or damaged else 0
    if summary["remote"] is None:
        click.echo(f"unmounted {mountpoint}; everything is in the store {summary['store']}, and only there")
        return 0
    if not any(left.values()) and summary.get("remote_wrong"):
        click.echo(
            f"unmounted {mountpoint}; NOTHING is known to be on {summary['remote']}: {summary['remote_wrong']} "
            f"What this mount has is in the store {summary['store']}"
        )
        return EXIT_PENDING
    if not any(left.values()) and damaged:
        packs = "a pack" if len(damaged) == 1 else f"{len(damaged)} packs"
        click.echo(
            f"unmounted {mountpoint}; everything was sent to {summary['remote']}, but what lies there in {packs} "
            f"cannot be read: mount it again; `ckptfs scrub --remote {mountpoint}` says which files, and mends them"
        )
        return EXIT_PENDING
    if not any(left.values()):
        sent = f" ({size(summary['sent_bytes'])} sent by this mount)" if summary["sent_bytes"] else ""
        click.echo(f"unmounted {mountpoint}; everything is on {summary['remote']}{sent}")
        return 0
    click.echo(
        f"unmounted {mountpoint}; NOT on {summary['remote']} yet: {parts(left)}. "
        f"They are in the store {summary['store']}; `ckptfs mount {mountpoint}` goes on with them"
        + (f". Last error: {summary['last_error']}" if summary["last_error"] else "")
    )
    return EXIT_PENDING


def _tell_end_without_daemon(mountpoint: str, why: str, as_json: bool) -> int:
    """Say that nobody could tell what is pending, and *why*; the exit status."""
    if as_json:
        click.echo(
            json.dumps({"mountpoint": mountpoint, "unmounted": True, "safe": False, "pending": None, "last_error": why})
        )
    else:
        click.echo(f"unmounted {mountpoint}: {why}")
    return EXIT_PENDING
