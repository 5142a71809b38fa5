"""Settings that follow from others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptfs.config import LEAST_MEMORY_BYTES, MIB, Settings, Tuning, default_memory_bytes, within_memory
from ckptfs.local.store import Store
from ckptfs_mount.cli.output import SIZE, size_option


def test_what_is_shared_out_by_default_are_the_defaults() -> None:
    usual = Tuning()
    assert all(getattr(usual, name) == value for name, value in within_memory(256 * MIB).items())
    assert Settings(memory_bytes=256 * MIB).tuned == usual


@pytest.mark.parametrize("mib", [192, 200, 256, 512, 1024, 65536])
def test_shares_grow_with_memory_and_fit_into_it(mib: int) -> None:
    tuning = Settings(memory_bytes=mib * MIB).tuned
    assert tuning.upload_bytes >= 2 * tuning.pack_bytes
    assert 4 <= tuning.fetch_threads <= 32
    assert tuning.upload_bytes < mib * MIB and tuning.kept_bytes + tuning.fetching_bytes < mib * MIB
    assert 2 * tuning.fetch_bytes <= tuning.fetching_bytes
    assert tuning.kept_ahead_bytes < tuning.kept_bytes


def test_less_than_the_least_is_the_least() -> None:
    """Of a file that somebody edited."""
    assert within_memory(1) == within_memory(LEAST_MEMORY_BYTES)


def test_what_somebody_set_wins() -> None:
    tuned = Settings(memory_bytes=1024 * MIB, tuning=Tuning(upload_bytes=5, encode_threads=3)).tuned
    assert tuned.upload_bytes == 5 and tuned.encode_threads == 3
    assert tuned.readahead_bytes > Tuning().readahead_bytes


@pytest.mark.parametrize(("machine_gib", "mib"), [(2, 256), (32, 256), (64, 512), (1024, 1024)])
def test_the_default_follows_the_machine(monkeypatch: pytest.MonkeyPatch, machine_gib: int, mib: int) -> None:
    known = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": machine_gib << 18}
    monkeypatch.setattr(os, "sysconf", lambda name: known[name])
    assert default_memory_bytes() == mib * MIB


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 << 20), ("2G", 2 << 30), ("1.5 GiB", 3 << 29), ("300mb", 300 << 20), ("77", 77)]
)
def test_sizes_are_read_and_written(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size
    assert SIZE.convert(size_option(size), None, None) == size


def test_a_store_remembers_what_was_changed_and_not_the_defaults(tmp_path: Path) -> None:
    """So that better defaults, or those of another machine, reach it."""
    store = Store.open(tmp_path / "s")
    settings = Settings(remote="file:///r", tuning=Tuning(piece_bytes=4096))
    store.save_settings(settings)
    store.close()
    assert json.loads((tmp_path / "s" / "settings.json").read_text())["tuning"] == {"piece_bytes": 4096}
    store = Store.open(tmp_path / "s")
    assert store.settings == settings
    store.close()
