"""`ckptfs scrub` and `ckptfs fsck`: whether everything is still what it was, and mending it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from ckptfs.client import Place, ask, locate
from ckptfs.errors import MountError, StoreError

from .. import mountpoint as mounts
from .. import placement
from ..order import EXIT_PENDING
from .output import JSON, SHARE, SIZE, files, size
from .waiting import Waiting

_LOOK_AGAIN_S = 1.0
"""Between two looks at a store that is in use: transactions and renames of files take less."""


@click.command()
@click.argument("path", default=".")
@click.option("--remote", is_flag=True, help="Read the remote's packs, manifests and trees too.")
@click.option("--sample", type=SHARE, metavar="SHARE", default=1.0, help="Look at a share only, such as 10%.")
@click.option("--rate", type=SIZE, metavar="SIZE", help="Read at most so many bytes a second, such as 50M.")
@click.option("--no-repair", is_flag=True, help="Only tell what is damaged.")
@JSON
def scrub(path: str, remote: bool, sample: float, rate: int | None, no_repair: bool, as_json: bool) -> None:
    """Read again what is stored below PATH, compare it with its digests, and mend what is damaged.

    PATH is a file or directory of a mount, which goes on working, or a store that is not mounted. What is damaged here
    is mended from other files or the remote; with --remote, what is damaged there is mended from here. Exit status 3:
    something stays damaged; its files are named.
    """
    request = {"remote": remote, "sample": sample, "rate_bytes_s": rate, "repair": not no_repair}
    store = find_store(path)
    with Waiting("scrubbing", quiet=as_json) as waiting:
        if isinstance(store, Place):
            inside = os.fsdecode(store.inside)
            report = ask(store.store, "scrub", waiting.show, path=inside, **request)
        else:
            report = _scrub_unmounted(store, request, waiting)
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _tell(report)
    if not report["sound"]:
        sys.exit(EXIT_PENDING)


@click.command()
@click.argument("path", metavar="STORE_OR_MOUNT", default=".")
@click.option("--repair", is_flag=True, help="Mend what can be mended; nobody may have the store mounted.")
@click.option("--local", is_flag=True, help="Leave the remote alone.")
@JSON
def fsck(path: str, repair: bool, local: bool, as_json: bool) -> None:
    """Compare the catalog of a store with itself, with the files in images/, and with what the remote lists.

    STORE_OR_MOUNT is a store, a mountpoint or something in a mount. Changes nothing without --repair. Reads no files:
    `ckptfs scrub` does. Exit status 3: something is wrong, or could not be looked at.
    """
    from ckptfs.repair.fsck import conclude

    from ..unmounted import log_into, look_at
    from ..unmounted import repair as repair_store

    place = find_store(path)
    store = place.store if isinstance(place, Place) else place
    found = look_at(store, asks_remote=not local)
    if isinstance(place, Place):
        if repair:
            raise MountError(
                f"{place.mountpoint} is mounted: unmount it first. What `ckptfs scrub` mends it mends in a mount, too"
            )
        if not found.is_sound:  # a moment in which a daemon was at work looks like damage
            time.sleep(_LOOK_AGAIN_S)
            again = look_at(store, asks_remote=not local)
            same = {(each.where, each.what) for each in again.findings}
            found.findings = [each for each in found.findings if (each.where, each.what) in same]
    elif repair:
        log_into(store)
        if not found.is_sound:
            mended = repair_store(store, found)
            found = conclude(found, mended, look_at(store, asks_remote=not local))
    if as_json:
        click.echo(json.dumps(found.document(), indent=1))
    else:
        _tell_findings(found.document())
        click.echo(f"{store}: {_verdict(found.document(), 'nothing is wrong')}")
    if not found.is_sound or found.skipped:
        sys.exit(EXIT_PENDING)


def find_store(path: str) -> Place | Path:
    """Where *path* is served by a daemon; or the store that it is, or had when it was mounted, which nobody serves.

    Raises MountError and StoreError, saying what *path* is not.
    """
    real = Path(os.path.realpath(os.path.expanduser(path)))
    if placement.is_store(real):
        there = _daemon_of(real)
        return real if there is None else Place(there["mountpoint"], real, b"/")
    try:
        return locate(path)
    except MountError as error:
        try:
            chosen = placement.choose(mounts.resolve(str(real)), None)
        except StoreError:
            raise error from None
        if not placement.is_store(chosen):
            raise MountError(f"{path}: neither in a ckptfs mount, nor a store, nor a mountpoint that had one") from None
        return chosen


def _daemon_of(store: Path) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = ask(store, "hello")
        return answer
    except MountError:
        return None


def _scrub_unmounted(store: Path, request: dict[str, Any], waiting: Waiting) -> dict[str, Any]:
    from ckptfs.engine import Engine
    from ckptfs.repair.pace import Scrubbing

    from ..requests import scrub_options, scrub_progress
    from ..unmounted import log_into, work_on

    progress = Scrubbing()
    log_into(store)

    async def work(engine: Engine) -> dict[str, Any]:
        return (await engine.scrub(b"/", scrub_options(request, alone=True), progress)).document()

    return work_on(
        store, work, lambda: waiting.show(scrub_progress(progress)), needs_remote=bool(request["remote"])
    )


def _tell(report: dict[str, Any]) -> None:
    _tell_findings(report)
    looked = f"{files(report['files'])}, {size(report['bytes'])} here"
    if report["packs"] or report["objects"]:
        looked += f"; {size(report['remote_bytes'])} in {report['packs']} packs and {report['objects']} small objects"
        looked += " on the remote"
    click.echo(f"looked at {looked}: {_verdict(report, 'everything is as it was saved')}")


def _tell_findings(report: dict[str, Any]) -> None:
    for finding in report["findings"]:
        click.echo(f"{finding['state']}: {finding['where']}: {finding['what']}")
        for each in finding["paths"]:
            click.echo(f"  {each}")
        click.echo(f"  {finding['meaning']}" + (f"; {finding['repair']}" if finding["repair"] else ""))
    for each in report["skipped"]:
        click.echo(f"not looked at: {each}")


def _verdict(report: dict[str, Any], sound: str) -> str:
    states = [finding["state"] for finding in report["findings"]]
    if not states:
        return sound
    counts = [(states.count(state), state) for state in ("repaired", "found", "lost")]
    words = {"repaired": "repaired", "found": "wrong and not repaired", "lost": "lost"}
    return ", ".join(f"{count} {words[state]}" for count, state in counts if count)
