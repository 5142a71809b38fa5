"""ckptfs: a checkpoint file system.

Writes land on the local disk at its own speed; closed files are cut into content-addressed chunks and replicated to
object storage in the background. Most programs need none of this module: they use the mounted directory. It is for
those who mount from Python, or want to know when a checkpoint is safe:

    with ckptfs.mounted("~/ckpt", remote="s3://bucket/run") as path:
        train(output_dir=path)
        ckptfs.wait(path / "checkpoint-1000", timeout=600)
"""

from __future__ import annotations

from ckptfs.client import mounted, prefetch, publish, status, wait
from ckptfs.errors import CkptfsError, ContentUnavailable, MountError, RemoteError, StoreError, StoreFull

__version__ = "0.1.0"

__all__ = [
    "CkptfsError",
    "ContentUnavailable",
    "MountError",
    "RemoteError",
    "StoreError",
    "StoreFull",
    "mounted",
    "prefetch",
    "publish",
    "status",
    "wait",
]
