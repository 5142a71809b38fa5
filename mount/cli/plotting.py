"""Series as a picture, by matplotlib, which is an optional dependency."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfs.errors import CkptfsError
from ckptfs.insight.usage import Series

from .output import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_WIDTH_INCHES, _HEIGHT_INCHES = 7.0, 3.5
_TICKS_MOST = 12
_SERIES_MOST = 8


def figure_class() -> Any:
    """matplotlib's Figure. Raises CkptfsError, saying what to install, when it is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CkptfsError("plots need matplotlib: pip install 'ckptfs[plot]'") from error
    return Figure


def plot(series: list[Series], path: Path) -> None:
    """Write a picture of the largest of *series*, one below the other, to *path*, whose suffix says in which format.

    What the states take together, one after the other: as files, each chunk once, and on the remote. Raises OSError.
    """
    drawn = sorted(series, key=lambda each: -each.usage.logical)[:_SERIES_MOST]
    figure: Figure = figure_class()(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * len(drawn)), layout="constrained")
    for axes, each in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        _draw(axes, each)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, series: Series) -> None:
    members = series.members
    logical = list(accumulate(member.logical for member in members))
    lines = [("logical: as files", logical),
             ("stored: each chunk once", list(accumulate(member.growth.added for member in members)))]  # fmt: skip
    if series.usage.encoded:
        encoded = list(accumulate(member.growth.added_encoded for member in members))
        lines.append(("on the remote, encoded", encoded))
    unit, unit_bytes = next((each for each in _UNITS if logical[-1] >= each[1]), _UNITS[-1])
    for label, values in lines:
        axes.plot(range(len(values)), [value / unit_bytes for value in values], marker="o", markersize=3, label=label)
    ticks = range(0, len(members), -(-len(members) // _TICKS_MOST))
    axes.set_xticks(list(ticks), ["/".join(map(str, members[at].numbers)) for at in ticks])
    axes.set_ylim(bottom=0)
    axes.set_title(_plain(shown(series.pattern)), loc="left", fontsize="medium")
    axes.set_xlabel("state")
    axes.set_ylabel(f"together, {unit}")
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib's mark for formulas
