"""`ckptfs du`, `diff`, `inspect` and `estimate`: what is in checkpoints, what they take, and how they differ."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptfs.client import Place, ask
from ckptfs.errors import CkptfsError, MountError, NameMissing, NotDirectory, StoreError

from .output import JSON, SHARE, files, print_table, shown, size
from .repairing import find_store
from .waiting import Waiting

if TYPE_CHECKING:
    from ckptfs.insight.accounting import Usage
    from ckptfs.insight.comparing import Comparison, Difference
    from ckptfs.insight.estimating import Estimates
    from ckptfs.insight.inspecting import ChunkView, FileView, TensorView
    from ckptfs.insight.usage import Series, UsageReport

Tell = Callable[[int, int], None]
"""Called with how much is done, of how much."""

_MOMENT_S = 1.0
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
                _learn(found, _files_teller(waiting))
                report = usage.look(found.store, found.inside, each_file=each_file, tell=_files_teller(waiting))
            else:
                report = usage.look(found, b"/", each_file=each_file, tell=_files_teller(waiting))
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


@click.command()
@click.argument("before")
@click.argument("after")
@click.option("--all", "every", is_flag=True, help="List what is identical, too.")
@JSON
def diff(before: str, after: str, every: bool, as_json: bool) -> None:
    """How AFTER differs from BEFORE, tensor by tensor: files or directories, in any mix of formats, anywhere.

    equal: the share of elements that are the same. moved: the norm of the difference over the norm before. compressed
    and delta: about what the changed parts would take on the remote, without and with a delta against BEFORE.
    """
    from ckptfs.insight.comparing import compare

    for path in (before, after):
        _learn_about(path, quiet=as_json)
    with Waiting("comparing", quiet=as_json) as waiting:
        found = compare(before, after, _bytes_teller(waiting))
    if as_json:
        click.echo(json.dumps({"before": before, "after": after, **found.document()}, indent=1))
        return
    listed = [each for each in found.differences if every or each.state != "identical"]
    if listed:
        several = len({each.file for each in found.differences}) > 1
        columns = ("file", "tensor", "dtype", "shape", "bytes", "state", "equal", "moved", "compressed", "delta")
        rows = [_difference_cells(each) for each in listed]
        words = ("tensor", "dtype", "shape", "state")
        print_table(columns[not several :], [row[not several :] for row in rows], words=words)
        click.echo()
    if found.prefix:
        click.echo(f"Names match without {found.prefix!r} in front of them.")
    click.echo(_summary(found) or f"{before} and {after}: nothing in them")


@click.command()
@click.argument("path", metavar="FILE")
@click.option("--chunks", "list_chunks", is_flag=True, help="List its chunks, too.")
@JSON
def inspect(path: str, list_chunks: bool, as_json: bool) -> None:
    """What is in FILE: its tensors and chunks, and where they are; outside a mount, how it would be cut."""
    from ckptfs.insight.inspecting import inspect as inspect_file

    _learn_about(path, quiet=as_json)
    found = inspect_file(path)
    if as_json:
        click.echo(json.dumps({"path": path, **found.document()}, indent=1))
        return
    _tell_file(path, found)
    if found.tensors:
        click.echo()
        columns = ("tensor", "dtype", "shape", "offset", "bytes", "chunks", "where", "encoded")
        rows = [_tensor_cells(each) for each in found.tensors]
        shown_of = len(columns) if found.is_sealed else columns.index("where")
        print_table(columns[:shown_of], [row[:shown_of] for row in rows], words=("dtype", "shape", "where"))
    if list_chunks and found.chunks:
        click.echo()
        headings = ("chunk", "offset", "bytes", "dtype", "where", "codec", "encoded")
        cells = [_chunk_cells(each) for each in found.chunks]
        shown_of = len(headings) if found.is_sealed else headings.index("where")
        print_table(headings[:shown_of], [row[:shown_of] for row in cells], words=("dtype", "where", "codec"))


@click.command()
@click.argument("directory")
@click.option("--sample", type=SHARE, metavar="SHARE", help="Look at this share, such as 10% [about 4 GiB].")
@JSON
def estimate(directory: str, sample: float | None, as_json: bool) -> None:
    """What the checkpoints in DIRECTORY would take in a mount.

    Per series: the sizes of the files, each chunk once, compressed, and with deltas against earlier checkpoints. Cuts,
    hashes and encodes them, or a sample; imports and changes nothing.
    """
    from ckptfs.insight.estimating import estimate as estimate_directory

    if not os.path.isdir(directory):
        raise NotDirectory(f"{directory}: {'is no directory' if os.path.exists(directory) else 'no such directory'}")
    with Waiting("estimating", quiet=as_json) as waiting:
        found = estimate_directory(directory, sample, tell=_bytes_teller(waiting))
    if as_json:
        click.echo(json.dumps({"path": directory, **found.document()}, indent=1))
    else:
        _tell_estimates(directory, found)
    for each in found.skipped:
        click.echo(f"skipped: {each}", err=True)


def _learn_about(path: str, *, quiet: bool) -> None:
    """As `_learn`, where *path* is in a mount whose store this user may look into. Reading works without."""
    from ckptfs.insight.sealed import place_of

    place = place_of(path)
    if place is not None and os.path.exists(path):
        try:
            with Waiting("looking up", quiet=quiet) as waiting:
                _learn(place, _files_teller(waiting))
        except (MountError, StoreError):
            return


def _learn(place: Place, tell: Tell) -> None:
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
            partial(_tell_left, tell, len(wanted)),
            directories=[number for kind, number in fresh if kind == "directories"],
            manifests=[number for kind, number in fresh if kind == "manifests"],
        )
        failures += answer["failures"]
        if answer["stopped"]:
            break
    if failures:
        click.echo(f"warning: not all can be looked up on the remote: {failures[0]}", err=True)


def _tell_left(tell: Tell, left: int, report: object) -> None:
    """A sign of life from the daemon: so much is to be looked up, as far as is known."""
    tell(0, left)


def _files_teller(waiting: Waiting) -> Tell:
    def tell(done: int, of: int) -> None:
        waiting.show({"pending_files": of - done, "pending_bytes": 0, "sent_bytes": 0, "last_error": None})

    return _after_a_moment(tell)


def _bytes_teller(waiting: Waiting) -> Tell:
    started_s = time.monotonic()

    def tell(done: int, of: int) -> None:
        eta_s = (of - done) * (time.monotonic() - started_s) / done if done else None
        report = {"pending_files": 0, "pending_bytes": of - done, "sent_bytes": done, "eta_s": eta_s}
        waiting.show({**report, "last_error": None})

    return _after_a_moment(tell)


def _after_a_moment(tell: Tell) -> Tell:
    """What is done at once needs no progress."""
    begins_s = time.monotonic() + _MOMENT_S

    def tell_later(done: int, of: int) -> None:
        if time.monotonic() > begins_s:
            tell(done, of)

    return tell_later


def _difference_cells(each: Difference) -> Sequence[str]:
    dtype, shape = each.dtype, _shape(each.shape)
    if each.was is not None:
        dtype = dtype if each.was[0] == dtype else f"{each.was[0]} > {dtype}"
        shape = shape if each.was[1] == each.shape else f"{_shape(each.was[1])} > {shape}"
    return (
        shown(each.file) or "-",
        _text(each.name),
        "-" if each.name is None else dtype,
        "-" if each.name is None else shape,
        size(each.size_bytes),
        each.state,
        _percent(each.equal),
        "-" if each.moved is None else f"{each.moved:.2e}" if each.moved else "0",
        _or_dash(each.encoded_bytes),
        _or_dash(each.delta_bytes),
    )


def _summary(found: Comparison) -> str:
    """How many of each kind; "" when there is nothing at all."""
    said = []
    for state in ("identical", "changed", "new", "gone"):
        chosen = [each for each in found.differences if each.state == state]
        if chosen:
            said.append(f"{len(chosen)} {state} ({size(sum(each.size_bytes for each in chosen))})")
    changed = [each for each in found.differences if each.delta_bytes is not None]
    if changed:
        compressed, delta = (sum(getattr(each, f"{kind}_bytes") for each in changed) for kind in ("encoded", "delta"))
        said.append(f"what changed takes about {size(compressed)} compressed, {size(delta)} as deltas")
    return ", ".join(said)


def _tell_file(path: str, found: FileView) -> None:
    holes = f", {size(found.hole_bytes)} of it holes" if found.hole_bytes else ""
    cut = f"{len(found.chunks)} chunks" if len(found.chunks) != 1 else "1 chunk"
    tensors = f"{len(found.tensors)} tensors" if len(found.tensors) != 1 else "1 tensor"
    click.echo(f"{path}: {size(found.size_bytes)}{holes}; {tensors}, {cut}")
    if not found.is_sealed:
        click.echo("Not sealed in a mount: this is how it would be cut.")
        return
    counts = Counter(each.codec for each in found.chunks if each.codec is not None)
    codecs = ", ".join(f"{count} {codec}" for codec, count in counts.most_common())
    click.echo(f"where: {found.where or '-'}" + (f"; encoded {size(found.encoded_bytes)} ({codecs})" if codecs else ""))


def _tensor_cells(tensor: TensorView) -> Sequence[str]:
    return (
        _text(tensor.name),
        tensor.dtype,
        _shape(tensor.shape),
        str(tensor.offset),
        size(tensor.size_bytes),
        str(tensor.chunks),
        tensor.where or "-",
        _or_dash(tensor.encoded_bytes),
    )


def _chunk_cells(chunk: ChunkView) -> Sequence[str]:
    return (
        (chunk.digest or "-")[:16],
        str(chunk.offset),
        size(chunk.size_bytes),
        chunk.dtype or "-",
        chunk.where or "-",
        chunk.codec or "-",
        _or_dash(chunk.encoded_bytes),
    )


def _tell_estimates(directory: str, found: Estimates) -> None:
    rows = [each.document() for each in found.series]
    if not rows:
        click.echo(f"{directory}: no files in it")
        return
    columns = ("logical_bytes", "deduplicated_bytes", "compressed_bytes", "delta_bytes")
    totals = [sum(row[column] for row in rows) for column in columns]

    def cells(sizes: Sequence[int]) -> list[str]:
        return [size(sizes[0]), *(f"{size(each)} {_share(each, sizes[0]):>6}" for each in sizes[1:])]

    print_table(
        ("series", "files", "states", "logical", "each chunk once", "+ compressed", "+ deltas"),
        [
            (
                "(no series)" if each.pattern is None else shown(each.pattern),
                str(each.files),
                "-" if each.pattern is None else str(len(each.states)),
                *cells([row[column] for column in columns]),
            )
            for each, row in zip(found.series, rows, strict=True)
        ],
        total=("together", str(sum(each.files for each in found.series)), "", *cells(totals)),
    )
    if found.share < 1:
        looked = size(sum(each.sampled_bytes for each in found.series))
        click.echo(f"\nEstimated from {found.share:.1%} of the tensors ({looked}); --sample 100% looks at all.")


def _tell_usage(path: str, report: UsageReport) -> None:
    if not report.rows:
        click.echo(f"{path}: nothing in it")
    else:
        columns = ("path", "files", "logical", "unique", "shared", "local", "remote", "encoded")
        rows = [(_name(row.path, row.kind), *_cells(row.usage)) for row in report.rows]
        print_table(columns, rows, total=("together", *_cells(report.total)))
        click.echo(f"\nNothing else needs {size(report.exclusive)} of it.")
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
        words=("saved",),
        rows=[
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


def _text(name: str | None) -> str:
    """A tensor's name, which a file may have made up of anything."""
    return shown(name.encode(errors="surrogatepass")) if name else "-"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _or_dash(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else size(size_bytes)


def _percent(share: float | None) -> str:
    """Never 100 % of what is not all."""
    if share is None:
        return "-"
    return f"{min(share, 0.9999) if share < 1 else 1.0:.2%}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
