"""Looking again and again in the background while a test does something else."""

from __future__ import annotations

import threading
from typing import TypeVar

T = TypeVar("T", bound="Poller")


class Poller:
    """A context manager that calls `look` in a thread, with pauses of `pause_s`, until the block ends."""

    pause_s = 0.0

    def look(self) -> None:
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether there is no use in looking again."""
        return False

    def __enter__(self: T) -> T:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a look does not end"

    @property
    def is_ending(self) -> bool:
        """Whether a long look may stop here."""
        return self._stop.is_set()

    def _run(self) -> None:
        while not self._stop.wait(self.pause_s) and not self.is_done():
            self.look()
