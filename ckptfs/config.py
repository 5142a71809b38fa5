"""Settings, as frozen dataclasses; the reason stands beside every default.

`Settings` is what a store remembers between mounts (settings.json). `Tuning` is what tests make tiny so that kilobytes
cross every boundary, and what few users should touch. What it says of memory follows from `Settings.memory_bytes`, by
`within_memory`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KIB = 1 << 10
MIB = 1 << 20

LEAST_MEMORY_BYTES = 192 * MIB
"""Half of what is shared out by default: three packs on their way, and a short read-ahead."""
_DEFAULT_MEMORY_BYTES, _LARGEST_DEFAULT_BYTES = 256 * MIB, 1024 * MIB
_MEMORY_SHARE = 128
"""By default we take one part in so many of the machine's memory, within these bounds."""
_STANDING_BYTES = 128 * MIB
"""What the daemon and its background process take before they hold a byte of anybody's files."""
_LONGEST_FETCH_BYTES = 16 * MIB
_CONNECTIONS = 32
"""More than the remote's client keeps open would be made anew for each request."""


def default_memory_bytes() -> int:
    """256 MiB; more on machines with more than 32 GiB, up to 1 GiB."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(machine // _MEMORY_SHARE, _DEFAULT_MEMORY_BYTES), _LARGEST_DEFAULT_BYTES)


def within_memory(memory_bytes: int) -> Mapping[str, int]:
    """The fields of a `Tuning` that share out *memory_bytes*, which the daemon and its background process may take.

    Uploading and reading seldom need the most at the same moment, and packs on their way back are gone in a moment, so
    that together these may be more than there is: at 256 MiB, uploads take 96 MiB, and range requests 80 MiB.
    """
    shared = max(memory_bytes, LEAST_MEMORY_BYTES) - _STANDING_BYTES
    return {
        "upload_bytes": shared * 3 // 4,
        "fetch_threads": min(shared // (16 * MIB), _CONNECTIONS),
        "fetching_bytes": shared * 5 // 8,
        "fetch_bytes": min(shared // 8, _LONGEST_FETCH_BYTES),
        "readahead_bytes": shared // 2,
        "kept_bytes": shared * 5 // 16,
        "kept_ahead_bytes": shared * 3 // 16,
    }


def usable_cores() -> int:
    """Processors that this process may use; no more than eight are worth a thread each."""
    return min(8, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Tuning:
    """Sizes and times of the machinery."""

    piece_bytes: int = 1 * MIB
    """Step at which a long tensor is cut. 4 MiB found the same duplicates, but makes a partial load fetch more."""
    edge_bytes: int = 272 * KIB
    """At either end of a tensor of 2 MiB and more: where a program maps a file, the kernel reads 256 KiB before what
    it touches, which would fetch a whole piece of the neighbour. At most half of `piece_bytes`."""
    rim_bytes: int = 16 * KIB
    """At either end of that, again: torch reads each tensor's header, of 64 bytes and more, when it maps a file."""
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
    """Packs on their way at once in the beginning (the remote decides how it goes on), and small objects always ..."""
    upload_most: int = _CONNECTIONS
    """... packs at most ..."""
    upload_bytes: int = 96 * MIB
    """... and the bytes in all that are in memory, at most."""
    encode_threads: int = field(default_factory=lambda: max(2, usable_cores()))
    delta: bool = True
    """Whether a chunk may be sent as its difference to the same part of an earlier checkpoint."""
    light_bytes: int = 4 * MIB
    """Hashing or encoding no more than this begins no process: it takes some 20 ms, and a process 300 ms to begin."""
    fetch_threads: int = 8
    """Range requests at once while reading from the remote."""
    fetching_bytes: int = 80 * MIB
    """... and the bytes in all that they bring into memory."""
    fetch_bytes: int = _LONGEST_FETCH_BYTES
    """Coalesced range requests grow up to this many encoded bytes, and those for what deltas are against as much. A
    request costs 1.8 ms of CPU time whatever its length, and the server about as much."""
    fetch_gap_bytes: int = 128 * KIB
    """Bytes worth fetching in vain to save one request."""
    readahead_bytes: int = 64 * MIB
    """How far ahead of a sequential reader chunks are fetched, at most."""
    kept_bytes: int = 40 * MIB
    """Raw chunks kept in memory while the disk has no room for them ..."""
    kept_ahead_bytes: int = 24 * MIB
    """... of which so much was fetched ahead, or is on its way: six times what a line of 1 Gb/s and 30 ms holds."""
    sync_every_s: float = 3.0
    """Flushing everything is begun this often, unasked: a closed file is promised to be durable after 5 s."""
    retry_first_s: float = 0.5
    retry_most_s: float = 60.0
    """Backoff of a failing remote: first and largest wait. What the disk does not give is read again after this."""


NEVER_S = -1.0
"""Stands for a time that does not come, where a setting is remembered and told as JSON."""


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
    read_timeout_s: float = 60.0
    """How long somebody who reads what only the remote has waits for it before EIO: longer than a restart of a store or
    of a network takes, shorter than what watches over a job waits."""
    reclaim_after_s: float = 600.0
    """When two files have bytes in common, how long after the newer one was changed the older one gives up its copy
    here; `NEVER_S`: never."""
    evict_after_s: float = NEVER_S
    """How long after its last use a file that is replicated gives up its bytes here, though there is room; `NEVER_S`:
    only where a save needs the room."""
    stop_timeout_s: float = 25.0
    """After SIGTERM, how long to go on draining; Kubernetes and Slurm kill after 30 s."""
    memory_bytes: int | None = None
    """What the daemon and its background process may take together, with packs on their way; None for a share of what
    the machine has."""
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def memory_in_force(self) -> int:
        """Bytes."""
        return default_memory_bytes() if self.memory_bytes is None else self.memory_bytes

    @property
    def tuned(self) -> Tuning:
        """`tuning`, with what follows from the memory that we may take, where nobody set it to something else."""
        usual = Tuning()
        shares = within_memory(self.memory_in_force).items()
        changes: dict[str, Any] = {
            name: value for name, value in shares if getattr(self.tuning, name) == getattr(usual, name)
        }
        return replace(self.tuning, **changes)
