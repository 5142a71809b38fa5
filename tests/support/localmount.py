"""A local store mounted by a subprocess, for tests of what the file system does without a remote.

    with LocalMount(tmp_path) as mount:
        (mount.path / "file").write_bytes(b"...")
        mount.remount()

The subprocess is this file run as a program: `python localmount.py STORE MOUNTPOINT [TUNING as JSON]`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TINY = {"piece_bytes": 4096, "small_bytes": 1024, "cdc_bytes": 2048}
"""Tuning with which a few kilobytes are many chunks."""

_START_S = 30.0
_STOP_S = 60.0


class LocalMount:
    """One mountpoint with its store, both below *directory*. Mounted while used as a context manager."""

    def __init__(self, directory: Path, *, tuning: Mapping[str, object] = TINY) -> None:
        self.path = directory / "mnt"
        self.store = directory / "store"
        self._log = directory / "daemon.log"
        self._tuning = json.dumps(dict(tuning))
        self._process: subprocess.Popen[bytes] | None = None
        self.path.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> LocalMount:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    def start(self) -> None:
        """Mount; returns when the mount answers."""
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, str(self.store), str(self.path), self._tuning],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._process = process
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        said = os.read(process.stdout.fileno(), 16) if ready else b""
        assert said == b"ready\n", f"the mount did not start; its log:\n{self.log()}"

    def stop(self) -> None:
        """Unmount cleanly; fails when the daemon had died, or logged a traceback."""
        process = self._process
        if process is None:
            return
        assert process.poll() is None, f"the daemon died; its log:\n{self.log()}"
        subprocess.run(["fusermount3", "-u", str(self.path)], check=True, timeout=_STOP_S)
        status = process.wait(_STOP_S)
        self._close()
        assert status == 0, f"the daemon ended with status {status}; its log:\n{self.log()}"
        assert "Traceback" not in self.log(), self.log()

    def remount(self) -> None:
        """Unmount and mount again: nothing is left in anybody's memory."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """SIGKILL the daemon, if it runs, and free the mountpoint."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)
            self._close()
            subprocess.run(
                ["fusermount3", "-u", "-z", str(self.path)], stderr=subprocess.DEVNULL, timeout=_STOP_S, check=False
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _close(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


def _serve(store_path: Path, mountpoint: str, tuning: Mapping[str, object]) -> None:
    import dataclasses

    import pyfuse3
    import trio

    from ckptfs.config import Tuning
    from ckptfs.engine import Engine
    from ckptfs.local.store import Store
    from ckptfs_mount.operations import MountOptions, Operations

    store = Store.open(store_path)
    store.save_settings(dataclasses.replace(store.settings, tuning=Tuning(**tuning)))  # type: ignore[arg-type]
    engine = Engine(store, None)
    operations = Operations(engine.filesystem, MountOptions(state=engine.state_of_inode))
    pyfuse3.init(operations, mountpoint, {"fsname=ckptfs", "subtype=ckptfs", "default_permissions", "allow_other"})

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            nursery.start_soon(answer)
            await pyfuse3.main(max_tasks=99)
            nursery.cancel_scope.cancel()

    async def answer() -> None:
        await trio.to_thread.run_sync(os.stat, mountpoint)
        os.write(1, b"ready\n")

    try:
        trio.run(run)
    finally:
        pyfuse3.close(unmount=True)
        store.close()


if __name__ == "__main__":
    import types

    try:
        import ckptfs.replica.replica  # noqa: F401
    except ImportError:
        sys.modules["ckptfs.replica.replica"] = types.SimpleNamespace(Replica=None)  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    os.umask(0o077)
    _serve(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
