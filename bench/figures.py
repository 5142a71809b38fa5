"""From single measurements to a table: whose turn it is, medians with their range."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)


def turns(contestants: Sequence[T], runs: int) -> Iterator[tuple[int, T]]:
    """(run, contestant) for every visit; each run begins with another one, so that a slow minute hits all alike."""
    for run in range(runs):
        first = run % len(contestants)
        for each in (*contestants[first:], *contestants[:first]):
            yield run, each


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the range where there is one."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def table(title: str, *headings: str) -> Table:
    """An empty table whose first column names the rows and whose other columns hold figures.

    The title is printed above it: as part of a narrow table it would be broken.
    """
    console.print(f"\n[italic]{title}[/]")
    found = Table()
    for number, heading in enumerate(headings):
        found.add_column(heading, justify="right" if number else "left")
    return found


def names(possible: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: a list of names with commas between them, all of them among *possible*."""

    def convert(text: str) -> list[str]:
        chosen = text.split(",")
        for each in chosen:
            if each not in possible:
                raise argparse.ArgumentTypeError(f"{each!r} is not among {', '.join(possible)}")
        return chosen

    return convert
