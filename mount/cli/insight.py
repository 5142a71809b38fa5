"""`ckptfs du`: what files, directories and series take."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptfs.client import Place, ask
from ckptfs.errors import CkptfsError, NameMissing

from .output import JSON, files, print_table, shown, size
from .repairing import find_store
from .waiting import Waiting

if TYPE_CHECKING:
    from ckptfs.insight.accounting import Usage
    from ckptfs.insight.usage import Series, UsageReport

_ASKED_AT_ONCE = 1000
"""Directories or chunk lists that the daemon looks up in one request."""


@click.command()
@click.argument("path", default=".")
@click.option("--files", "each_file", is_flag=True, help="A line for each file below PATH, not for each name in it.")
@click.option("--plot", "picture", metavar="FILE", help="Draw how each series grew, as .png, .svg or .pdf.")
@JSON
def du(path: str, each_file: bool, picture: str | None, as_json: bool) -> None:
    """What PATH takes: as files, each chunk once, here and on the remote; and how series in it grow.

    PATH is a file or directory of a mount, or a store or mountpoint that is not mounted. logical: the sizes of the
    files. unique: bytes that nothing else in the mount needs. shared: bytes that something else needs, too; in the last
    line, what more than one of these lines, or something elsewhere, needs, once. local, remote: how many of the unique
    and shared bytes this disk and the remote have. encoded: what they take there.
    """
    from ckptfs.insight import usage

    if picture is not None:
        from . import plotting

        if Path(picture).suffix.lower() not in plotting.SUFFIXES:
            raise click.BadParameter(f"{picture!r} ends with none of {', '.join(plotting.SUFFIXES)}")
        plotting.figure_class()
    found = find_store(path)
    with Waiting("looking", quiet=as_json) as waiting:
        try:
            if isinstance(found, Place):
                _learn(found)
                report = usage.look(found.store, found.inside, each_file=each_file, tell=_teller(waiting))
            else:
                report = usage.look(found, b"/", each_file=each_file, tell=_teller(waiting))
        except NameMissing as error:
            raise NameMissing(f"{path}: no such file or directory") from error
    if picture is not None:
        if not report.series:
            raise CkptfsError(f"{path}: no series in it, of which {picture} could show how it grew")
        plotting.plot(list(report.series), Path(picture))
    if as_json:
        click.echo(json.dumps({"path": path, **report.document()}, indent=1))
    else:
        _tell_usage(path, report)


def _learn(place: Place) -> None:
    """Have the daemon look up what at or below *place* only the remote knows; what cannot be had is said on stderr."""
    from ckptfs.insight.usage import unlearned

    tried: set[tuple[str, int]] = set()
    failures: list[str] = []
    while True:  # directories hold directories
        directories, manifests = unlearned(place.store, place.inside)
        wanted = [("directories", each) for each in directories] + [("manifests", each) for each in manifests]
        fresh = [each for each in wanted if each not in tried][:_ASKED_AT_ONCE]
        if not fresh:
            break
        tried.update(fresh)
        answer = ask(
            place.store,
            "learn",
            directories=[number for kind, number in fresh if kind == "directories"],
            manifests=[number for kind, number in fresh if kind == "manifests"],
        )
        failures += answer["failures"]
    if failures:
        click.echo(f"warning: not all can be looked up on the remote: {failures[0]}", err=True)


def _teller(waiting: Waiting) -> Any:
    def tell(done: int, of: int) -> None:
        waiting.show({"pending_files": of - done, "pending_bytes": 0, "sent_bytes": 0, "last_error": None})

    return tell


def _tell_usage(path: str, report: UsageReport) -> None:
    if not report.rows:
        click.echo(f"{path}: nothing in it")
    else:
        columns = ("path", "files", "logical", "unique", "shared", "local", "remote", "encoded")
        rows = [(_name(row.path, row.kind), *_cells(row.usage)) for row in report.rows]
        print_table(columns, rows, total=("together", *_cells(report.total)))
        click.echo(f"\nRemoving all of it would free {size(report.freed)}.")
    for series in report.series:
        _tell_series(series)
    if report.unsealed:
        click.echo(f"{files(report.unsealed)} not sealed yet: all bytes count as unique.", err=True)
    if report.unknown:
        click.echo(f"The chunks of {files(report.unknown)} are not known here: all bytes count as unique.", err=True)
    if report.unseen:
        click.echo(f"Not counted: {report.unseen} directories that were not looked into on this machine.", err=True)


def _tell_series(series: Series) -> None:
    usage = series.usage
    click.echo(
        f"\n{shown(series.pattern)}: {len(series.members)} states, {size(usage.logical)} as files, "
        f"{size(usage.unique + usage.shared)} with each chunk once"
        + (f", {size(usage.encoded)} on the remote" if usage.encoded else "")
    )
    print_table(
        ("state", "saved", "logical", "added", "share", "encoded"),
        [
            (
                shown(member.path),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(member.mtime_ns / 1e9)),
                size(member.logical),
                size(member.growth.added),
                _share(member.growth.added, member.logical),
                size(member.growth.added_encoded),
            )
            for member in series.members
        ],
    )


def _name(path: bytes, kind: str) -> str:
    return shown(path) + ("/" if kind == "directory" else "")


def _cells(usage: Usage) -> Sequence[str]:
    sizes = (usage.logical, usage.unique, usage.shared, usage.local, usage.remote, usage.encoded)
    return (str(usage.files), *map(size, sizes))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
