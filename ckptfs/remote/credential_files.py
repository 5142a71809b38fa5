"""The files that a profile's credentials come from, looked at before each request.

botocore reads them once per session, but whoever rotates keys (a cron job, Vault, a sidecar) writes them anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}

_State = tuple[int, int, int] | None


class CredentialFiles:
    """What the files that *environment* names, or the usual ones, were when this was made or last asked.

    None of them when *environment* is None. Any thread may ask.
    """

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        found = {} if environment is None else {environment.get(name) or usual: None for name, usual in _FILES.items()}
        self._paths = [os.path.expanduser(path) for path in found]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether one of them was written, replaced or removed since. Costs a stat each."""
        now = self._look()
        before, self._seen = self._seen, now
        return now != before

    def _look(self) -> list[_State]:
        return [_state(path) for path in self._paths]


def _state(path: str) -> _State:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
