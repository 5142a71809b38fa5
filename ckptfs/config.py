"""Settings, as frozen dataclasses; the reason stands beside every default.

`Settings` is what a store remembers between mounts (settings.json). `Tuning` is what tests make tiny so that kilobytes
cross every boundary, and what few users should touch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

KIB = 1 << 10
MIB = 1 << 20


def usable_cores() -> int:
    """Processors that this process may use; no more than eight are worth a thread each."""
    return min(8, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Tuning:
    """Sizes and times of the machinery."""

    piece_bytes: int = 1 * MIB
    """Step at which a long tensor is cut. 4 MiB found the same duplicates, but makes a partial load fetch more."""
    small_bytes: int = 64 * KIB
    """Neighbours below this share a chunk: a third of the chunks for 0.3 % of the dedup."""
    cdc_bytes: int = 64 * KIB
    """Average content-defined chunk in formats we do not parse; 1 MiB lost half of the dedup there."""
    cdc_chunks: int = 1 << 17
    """A file, or part of one, that would have more of them is cut into chunks twice, four times ... as long: a manifest
    of so many takes about 150 MiB to decode and use. Files of up to 8 GiB are cut at `cdc_bytes`."""
    pack_bytes: int = 16 * MIB
    """Encoded bytes per pack: large enough that a PUT's latency is small beside its transfer."""
    pack_bytes_large: int = 32 * MIB
    """The same when more than `large_after_bytes` is pending; fewer requests."""
    large_after_bytes: int = 4096 * MIB
    inline_bytes: int = 3 * KIB
    """A manifest or subtree up to this size (canonical JSON) travels inside its parent: saves a PUT and a GET."""
    tree_entries: int = 4096
    """Entries per tree object before it is split."""
    upload_threads: int = 4
    """Packs on their way at once ..."""
    upload_bytes: int = 96 * MIB
    """... and the bytes in them, at most: a third of what the daemon may take."""
    encode_threads: int = field(default_factory=lambda: max(2, usable_cores()))
    fetch_threads: int = 8
    """Range requests at once while reading from the remote."""
    fetch_bytes: int = 8 * MIB
    """Coalesced range requests grow up to this many encoded bytes. A request costs 3 ms of CPU time whatever its
    length: 1 GiB came in 4.7 s so, and in 6.0 s with twelve of 4 MiB at once."""
    fetch_gap_bytes: int = 128 * KIB
    """Bytes worth fetching in vain to save one request."""
    readahead_bytes: int = 64 * MIB
    """How far ahead of a sequential reader chunks are fetched, at most."""
    sync_every_s: float = 5.0
    """A closed file is durable after this long unasked, as on ext4."""
    retry_first_s: float = 0.5
    retry_most_s: float = 60.0
    """Backoff of a failing remote: first and largest wait."""
    read_timeout_s: float = 60.0
    """How long a read of bytes that only the remote has waits for it before EIO."""


@dataclass(frozen=True)
class Settings:
    """What a store remembers."""

    remote: str | None = None
    """URL of the remote: s3://bucket/prefix or file:///directory; None for a local store alone."""
    owner: str = "mine"
    """'mine', 'stored' or 'UID:GID'; see `ckptfs mount --help`."""
    allow_other: bool = False
    passthrough: str = "auto"
    """Whether the kernel reads and writes images itself: 'auto', 'on' (or do not mount) or 'off'."""
    settle_s: float = 5.0
    """Unrecognised layouts: publish after this long without a name created, renamed or removed."""
    lag_s: float = 2.0
    """Changes of other writers show in lookups older than this."""
    max_lag_s: float = 120.0
    """What is neither complete nor changing is published, marked incomplete, after this long."""
    log_after_s: float = 60.0
    """A file open for writing longer than this, and growing, is a log and holds nothing back."""
    log_seal_s: float = 60.0
    """A log is sealed at most this often ..."""
    log_seal_after_fsync_s: float = 10.0
    """... or this long after an fsync."""
    stop_timeout_s: float = 25.0
    """After SIGTERM, how long to go on draining; Kubernetes and Slurm kill after 30 s."""
    tuning: Tuning = field(default_factory=Tuning)
