"""Image files: which directories a flush of new ones takes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptfs.ids import ImageId
from ckptfs.local.images import Images


class Flushes:
    """The directories that were flushed, in place of os.fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[str] = set()
        self.error: OSError | None = None
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        if self.error is not None:
            raise self.error
        self.seen.add(os.readlink(f"/proc/self/fd/{fd}"))

    def take(self) -> set[str]:
        seen, self.seen = self.seen, set()
        return seen


def create(images: Images) -> tuple[int, str]:
    image = images.create()
    image.close()
    return image.id, str(images.path(image.id).parent)


def test_the_directory_of_folders_is_flushed_only_after_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New images share a folder; the directory above it changes once in a thousand."""
    images = Images(tmp_path / "images")
    flushes = Flushes(monkeypatch)
    image, folder = create(images)
    images.sync_directories([image])
    assert flushes.take() == {folder, str(tmp_path / "images")}
    image, folder = create(images)
    images.sync_directories([image])
    assert flushes.take() == {folder}
    images = Images(tmp_path / "images")  # what another process left may not be flushed
    images.sync_directories([image])
    assert flushes.take() == {folder, str(tmp_path / "images")}
    folders = {folder}
    while folder in folders:
        image, folder = create(images)
    images.sync_directories([image])
    assert flushes.take() == {folder, str(tmp_path / "images")}


def test_a_flush_that_failed_is_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = Images(tmp_path / "images")
    flushes = Flushes(monkeypatch)
    image, folder = create(images)
    flushes.error = OSError(errno.EIO, "no disk")
    with pytest.raises(OSError, match="no disk"):
        images.sync_directories([image])
    flushes.error = None
    images.sync_directories([image])
    assert flushes.take() == {folder, str(tmp_path / "images")}


def test_a_folder_that_is_gone_keeps_nothing_from_being_durable(tmp_path: Path) -> None:
    """A power cut may have taken it, while the catalog still names an image there."""
    images = Images(tmp_path / "images")
    made = images.create()
    made.close()
    images.sync_directories([made.id, ImageId(made.id ^ 0x7F)])
