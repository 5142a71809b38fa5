"""What the `mount` command asks of the daemon, and how the daemon tells how it went. Both sides know this module.

Detached, they are two processes: the order travels as an argument, the report as JSON lines through a pipe.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ckptfs.errors import MountError

LOG_NAME = "daemon.log"
"""The daemon's log, in the store."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

EXIT_PENDING = 3
"""Exit status of commands that did what they should, but something is not safe yet."""


REMEMBERED = (
    "owner", "allow_other", "passthrough", "settle_s", "lag_s", "max_lag_s", "read_timeout_s", "reclaim_after_s",
    "evict_after_s", "stop_timeout_s", "memory_bytes",
)  # fmt: skip
"""Fields of an `Order` that become settings of the store, under the same names."""


@dataclass(frozen=True)
class Order:
    """What to mount; None leaves a setting as the store remembers it."""

    mountpoint: str
    store: str
    remote: str | None = None
    read_only: bool = False
    offline: bool = False
    """Leave the remote alone, and keep it in mind for the next mount."""
    allow_other: bool | None = None
    owner: str | None = None
    passthrough: str | None = None
    settle_s: float | None = None
    lag_s: float | None = None
    max_lag_s: float | None = None
    read_timeout_s: float | None = None
    reclaim_after_s: float | None = None
    evict_after_s: float | None = None
    stop_timeout_s: float | None = None
    memory_bytes: int | None = None

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Order:
        return cls(**json.loads(text))


def owner_ids(setting: str) -> tuple[int, int] | None:
    """The (uid, gid) that everything belongs to, None for what is stored. Raises MountError."""
    if setting == "stored":
        return None
    if setting == "mine":
        return os.geteuid(), os.getegid()
    uid, _, gid = setting.partition(":")
    if not (uid.isdecimal() and gid.isdecimal()):
        raise MountError(f"owner is mine, stored or UID:GID in digits, not {setting!r}")
    return int(uid), int(gid)


class Reporter(Protocol):
    """Who started the daemon and waits to hear how it went: notes, then ready or one error."""

    def note(self, text: str) -> None: ...
    def ready(self, remote: str | None) -> None: ...
    def error(self, text: str) -> None: ...
    def ended(self, text: str) -> None: ...


class PipeReporter:
    """Tells it through the writing end of a pipe, which it closes when there is nothing more to wait for."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd

    def note(self, text: str) -> None:
        self._write({"note": text})

    def ready(self, remote: str | None) -> None:
        self._write({"ready": True, "remote": remote})
        os.close(self._fd)

    def error(self, text: str) -> None:
        try:
            self._write({"error": text})
        except MountError:
            pass  # nobody is there to hear that it failed; the log has it
        os.close(self._fd)

    def ended(self, text: str) -> None:
        pass  # nobody waits for a detached daemon; its log has it

    def _write(self, message: Mapping[str, Any]) -> None:
        try:
            os.write(self._fd, json.dumps(message).encode() + b"\n")
        except BrokenPipeError as error:
            raise MountError("whoever asked for this mount is gone") from error
