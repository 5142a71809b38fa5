"""Numbers and times as people write and read them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptfs.config import NEVER_S

if TYPE_CHECKING:
    _ParamType = click.ParamType[float]
    _IntType = click.ParamType[int]
else:
    _ParamType = _IntType = click.ParamType  # not generic before click 8.3

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {unit: 1 << 10 * power for power, unit in enumerate(("", "K", "M", "G", "T"))}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|[smhd]?)\s*")


def say(text: str, *, err: bool = False) -> None:
    """Print what is good to know. That nobody can read it any more (`| head`, a full disk) is no reason to stop."""
    try:
        click.echo(text, err=err)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2 if err else 1)  # where what is still buffered goes


class Duration(_ParamType):
    """Seconds, or a number with ms, s, m, h or d."""

    name = "duration"
    written = "seconds, or 500ms, 30s, 5m, 2h, 1d"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no duration; write {self.written}", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class DurationOrNever(Duration):
    """A duration, or 'never': `ckptfs.config.NEVER_S`."""

    written = f"{Duration.written}, or never"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return NEVER_S if value == "never" else super().convert(value, param, ctx)


class Size(_IntType):
    """Bytes, or a number with K, M, G or T: powers of 1024, as everywhere in what we print."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no size; write 512M or 2G", param, ctx)
        return int(float(match[1]) * _SIZES[match[2].upper()])


class Share(_ParamType):
    """A share: 0.1 or 10%."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            self.fail(f"{value!r} is no share; write 0.1 or 10%", param, ctx)
        return share


_WIDE = 10_000
"""Columns of a terminal on which no table is cut."""

DURATION = Duration()
DURATION_OR_NEVER = DurationOrNever()
SIZE = Size()
SHARE = Share()

JSON = click.option("--json", "as_json", is_flag=True, help="For programs: one JSON document on stdout.")


def size(size_bytes: float | None) -> str:
    """Bytes in the largest unit (powers of 1024) that gives at least 1."""
    if size_bytes is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB" if size_bytes < 1024 else f"{size_bytes / 1024:.1f} PiB"


def size_option(size_bytes: int) -> str:
    """Bytes as `Size` reads them."""
    unit, factor = next(each for each in reversed(_SIZES.items()) if size_bytes % each[1] == 0)
    return f"{size_bytes // factor}{unit}"


def duration(seconds: float | None) -> str:
    """About how long; `?` when nobody knows."""
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def ago(moment_s: float | None) -> str:
    """How long before now *moment_s* (seconds since 1970) was."""
    return "never" if moment_s is None else f"{duration(max(0.0, time.time() - moment_s))} ago"


def files(count: int | None) -> str:
    return "files" if count is None else f"{count} file" if count == 1 else f"{count} files"


def parts(left: dict[str, int]) -> str:
    """What is left: files and their bytes, or else how many directories and removals."""
    if left["files"] and left["bytes"]:
        return f"{files(left['files'])}, {size(left['bytes'])}"
    if left["files"] or left["bytes"]:
        return size(left["bytes"]) if left["bytes"] else files(left["files"])
    return "1 change of names" if left["changes"] == 1 else f"{left['changes']} changes of names"


def pending(progress: dict[str, Any]) -> str:
    """What a progress report says is left, with an estimate."""
    counts = {name: progress.get(f"pending_{name}", 0) for name in ("files", "bytes", "changes")}
    if not any(counts.values()):
        return "nothing"
    left = parts(counts)
    if progress.get("rate_bytes_s"):
        left += f", {size(progress['rate_bytes_s'])}/s"
    if progress.get("eta_s") is not None:
        left += f", about {duration(progress['eta_s'])}"
    return left


def shown(path: bytes) -> str:
    """A path for a line of text: what does not print is escaped."""
    text = path.decode(errors="backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[str] = (),
    total: Sequence[str] | None = None,
) -> None:
    """The first column and those in *words* hold words, the others numbers. As wide as need be: paths stay whole."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        is_words = number == 0 or column in words
        table.add_column(Text(column, style="dim"), justify="left" if is_words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if total is not None:
        table.add_row(*(Text(each, style="bold") for each in total))
    Console(highlight=False, width=_WIDE).print(table)
