"""What fsck and scrub found: one finding for each thing that is wrong. Values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FOUND, REPAIRED, LOST = "found", "repaired", "lost"
"""States of a finding: it can be repaired; it was; nothing that is left can repair it."""


@dataclass
class Finding:
    """One thing that is wrong."""

    where: str
    """The image, remote object or table."""
    what: str
    """What is wrong with it, as a sentence."""
    meaning: str
    """What that means for who uses the mount."""
    repair: str
    """What a repair does, did, or why there is none."""
    state: str = FOUND
    paths: tuple[str, ...] = ()
    """Files concerned, as paths in the mount."""


@dataclass
class Report:
    """Everything that one run looked at, and what it found."""

    files: int = 0
    """Of which something was looked at."""
    chunks: int = 0
    """Hashed on this disk ..."""
    bytes: int = 0
    """... and how many bytes those are."""
    packs: int = 0
    """Read back from the remote ..."""
    remote_bytes: int = 0
    """... and how many bytes those are."""
    objects: int = 0
    """Small objects of the remote: manifests, trees, heads."""
    skipped: list[str] = field(default_factory=list)
    """What was not looked at, and why."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong any more."""
        return all(each.state == REPAIRED for each in self.findings)

    @property
    def lost(self) -> list[str]:
        """Paths of files of which something cannot be had any more."""
        return sorted({path for each in self.findings if each.state == LOST for path in each.paths})

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "sound": self.is_sound, "lost": self.lost}
