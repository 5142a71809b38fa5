"""What people see while a command waits for uploads: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from .output import pending

_LINE_EVERY_S = 5.0


class Waiting:
    """A context manager; `show` takes the daemon's progress reports. Writes to stderr only."""

    def __init__(self, words: str, *, quiet: bool = False) -> None:
        self._words = words
        self._quiet = quiet
        self._last_line_s = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def show(self, report: dict[str, Any]) -> None:
        """Take one progress report; nothing pending shows nothing."""
        if self._quiet or not (report["pending_bytes"] or report["pending_files"] or report.get("pending_changes")):
            return
        if sys.stderr.isatty():
            self._draw(report)
        elif time.monotonic() - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            click.echo(f"{self._words}: {pending(report)}", err=True)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, report: dict[str, Any]) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._words, left="", total=None)
        total = report["sent_bytes"] + report["pending_bytes"]
        self._bar.update(self._task, completed=report["sent_bytes"], total=total or None, left=pending(report))
