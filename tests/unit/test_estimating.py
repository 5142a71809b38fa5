"""What a directory of checkpoints would take: against what is known of how they were made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptfs.config import KIB, Tuning
from ckptfs.insight.estimating import Estimates, estimate

TUNING = Tuning(piece_bytes=32 * KIB, small_bytes=4 * KIB, cdc_bytes=2 * KIB)
FROZEN, TRAINED = 256 * KIB, 128 * KIB


def save(top: Path, step: int, *, movement: float = 1e-4) -> None:
    """Frozen weights, and ones that move by *movement* with each step; a log that grows."""
    directory = top / "run" / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    frozen = np.random.default_rng(0).standard_normal(FROZEN // 4).astype(np.float32)
    trained = np.random.default_rng(1).standard_normal(TRAINED // 4).astype(np.float32)
    noise = np.random.default_rng(step).standard_normal(TRAINED // 4).astype(np.float32)
    save_file({"frozen": frozen, "trained": trained * (1 + movement * noise)}, directory / "model.safetensors")


def documents(found: Estimates) -> dict[str | None, dict[str, Any]]:
    return {row["pattern"]: row for row in found.document()["series"]}


def test_what_each_step_saves(tmp_path: Path) -> None:
    """Frozen weights count once, floats compress, and what moved little takes less as a delta; exact sizes."""
    for step in (100, 200, 1000):
        save(tmp_path, step)
    (tmp_path / "README").write_text("hello")
    os.link(tmp_path / "README", tmp_path / "same")
    (tmp_path / "notes-1.txt").write_text("one state makes no series")
    told: list[tuple[int, int]] = []
    found = estimate(str(tmp_path), tuning=TUNING, tell=lambda *at: told.append(at))
    assert found.share == 1.0 and found.skipped == ()
    rows = documents(found)
    assert list(rows) == ["run/checkpoint-*", None]
    series = rows["run/checkpoint-*"]
    headers = series["logical_bytes"] - 3 * (FROZEN + TRAINED)
    assert (series["files"], series["states"], series["sampled_bytes"]) == (3, 3, series["logical_bytes"])
    assert FROZEN + 3 * TRAINED <= series["deduplicated_bytes"] <= FROZEN + 3 * TRAINED + headers
    assert series["compressed_bytes"] < 0.96 * series["deduplicated_bytes"]
    keyframes = (FROZEN + TRAINED) * series["compressed_bytes"] / series["deduplicated_bytes"]
    assert keyframes < series["delta_bytes"] < keyframes + 2 * 0.75 * TRAINED
    assert (rows[None]["files"], rows[None]["logical_bytes"]) == (2, 30)
    assert told[-1] == (series["logical_bytes"] + 30,) * 2


def test_a_delta_that_does_not_pay_is_not_counted(tmp_path: Path) -> None:
    """Weights that have nothing to do with those before are stored whole."""
    for step in (1, 2):
        save(tmp_path, step, movement=50.0)
    row = documents(estimate(str(tmp_path), tuning=TUNING))["run/checkpoint-*"]
    assert row["delta_bytes"] == row["compressed_bytes"]


def test_a_sample_is_near_the_truth(tmp_path: Path) -> None:
    """The same pieces of all states: a tenth of the work, and the same shares."""
    for step in range(1, 4):
        directory = tmp_path / f"step-{step}"
        directory.mkdir()
        random, own = np.random.default_rng(0), np.random.default_rng(step)
        arrays = {f"frozen{n}": random.standard_normal(2048).astype(np.float32) for n in range(60)}
        arrays |= {f"own{n}": own.standard_normal(2048).astype(np.float32) for n in range(60)}
        save_file(arrays, directory / "model.safetensors")
    tuning = Tuning(piece_bytes=8 * KIB, small_bytes=4 * KIB)
    truth = documents(estimate(str(tmp_path), 1.0, tuning))["step-*"]
    found = estimate(str(tmp_path), 0.25, tuning)
    row = documents(found)["step-*"]
    assert found.share == 0.25
    assert 0.1 < row["sampled_bytes"] / row["logical_bytes"] < 0.4
    for column in ("deduplicated_bytes", "compressed_bytes", "delta_bytes"):
        assert row[column] == pytest.approx(truth[column], rel=0.25), column


def test_files_cut_by_content(tmp_path: Path) -> None:
    """Formats that nobody reads are deduplicated, too; a byte more at the front moves no boundary behind it."""
    data = np.random.default_rng(3).bytes(64 * KIB)
    (tmp_path / "a-1.bin").write_bytes(data)
    (tmp_path / "a-2.bin").write_bytes(b"x" + data)
    row = documents(estimate(str(tmp_path), tuning=TUNING))["a-*.bin"]
    assert 64 * KIB < row["deduplicated_bytes"] < 80 * KIB
    assert documents(estimate(str(tmp_path), 0.5, TUNING))["a-*.bin"]["sampled_bytes"] < row["sampled_bytes"]


def test_holes_and_what_cannot_be_read(tmp_path: Path) -> None:
    """A hole costs nothing; a file that is forbidden, or a broken link, is told or passed over."""
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = estimate(str(tmp_path), tuning=TUNING)
    (row,) = documents(found).values()
    assert (row["files"], row["logical_bytes"], row["sampled_bytes"], row["deduplicated_bytes"]) == (1, 1 << 20, 0, 0)
    assert estimate(str(tmp_path / "sparse"), tuning=TUNING).series[0].files == 1
    (tmp_path / "empty").mkdir()
    assert estimate(str(tmp_path / "empty"), tuning=TUNING).series == ()
    with pytest.raises(FileNotFoundError):
        estimate(str(tmp_path / "missing"))


def test_a_file_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are counted all the same."""
    for name in ("bad", "good"):
        (tmp_path / name).write_bytes(bytes(5000))

    def refuse(path: str, *arguments: Any) -> int:
        if path.endswith("bad"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments)

    real = os.open
    monkeypatch.setattr("ckptfs.insight.estimating.os.open", refuse)
    found = estimate(str(tmp_path), tuning=TUNING)
    assert len(found.skipped) == 1 and "Permission denied" in found.skipped[0]
    assert found.series[0].sampled_bytes == 5000
