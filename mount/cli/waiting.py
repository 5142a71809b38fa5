"""What people see while a command waits for uploads: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from .output import pending

_LINE_EVERY_S = 5.0
_SAME_LINE_EVERY_S = 60.0  # nothing has changed: only a sign of life, in a log that somebody keeps
_BAR_WIDTH = 20  # leaves room for what is left, with rate and estimate, in 80 columns


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within, Ctrl-C raises KeyboardInterrupt, and what is yielded raises it again if it was lost.

    Python only prints an exception that is raised while it cleans up an object, wherever that happens to be.
    """
    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class Waiting:
    """A context manager; `show` takes the daemon's progress reports. Writes to stderr only."""

    def __init__(self, words: str, *, hint: str | None = None, quiet: bool = False) -> None:
        """*words* say what goes on; on a terminal *hint* says once what its user can do about it."""
        self._words = words
        self._hint = hint
        self._quiet = quiet
        self._line_s = 0.0
        self._line_about: object = None
        self._error: str | None = None
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
        else:
            self._print(report)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, report: dict[str, Any]) -> None:
        # The rate and the estimate change all the time, and say nothing new by themselves.
        about = [report.get(f"pending_{name}") for name in ("files", "bytes", "changes")] + [report.get("last_error")]
        pause_s = _SAME_LINE_EVERY_S if about == self._line_about else _LINE_EVERY_S
        if self._line_about is not None and time.monotonic() - self._line_s < pause_s:
            return
        self._line_s, self._line_about = time.monotonic(), about
        error = f"; last error: {report['last_error']}" if report.get("last_error") else ""
        click.echo(f"{self._words}: {pending(report)}{error}", err=True)

    def _draw(self, report: dict[str, Any]) -> None:
        from rich.text import Text

        if self._bar is None:
            self._start_bar()
        error = report.get("last_error")
        if error and error != self._error:  # above the bar, whole: within it, only its beginning would be seen
            self._bar.console.print(Text(f"last error: {error}"), soft_wrap=True)
        self._error = error
        total = report["sent_bytes"] + report["pending_bytes"]
        self._bar.update(self._task, completed=report["sent_bytes"], total=total or None, left=pending(report))

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._words, left="", total=None)
        if self._hint is not None:
            self._bar.console.print(Text(self._hint, style="dim"), soft_wrap=True)
            self._hint = None
