"""What is in one file, outside a mount, and how places add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptfs.config import KIB, Tuning
from ckptfs.encoding.manifest import Chunk, Content, TensorSpan
from ckptfs.errors import IsADirectory
from ckptfs.ids import ChunkId, digest
from ckptfs.insight import inspecting
from ckptfs.insight.inspecting import BOTH, HERE, MIXED, NOWHERE, REMOTE, inspect
from ckptfs.insight.sealed import Sealed
from ckptfs.local.catalog.survey import ChunkPlace

TUNING = Tuning(piece_bytes=16 * KIB, small_bytes=4 * KIB, edge_bytes=2 * KIB)


def test_how_an_ordinary_file_would_be_cut(tmp_path: Path) -> None:
    """As sealing cuts it: each tensor with its own chunks; small ones and the header share one."""
    arrays = {"long": np.ones((20, 1024), np.float32), "short": np.zeros(7, np.int64)}
    save_file(arrays, tmp_path / "model.safetensors")
    found = inspect(str(tmp_path / "model.safetensors"), TUNING)
    assert not found.is_sealed and found.where is None and found.hole_bytes == 0
    by_name = {each.name: each for each in found.tensors}
    assert (by_name["long"].shape, by_name["long"].size_bytes) == ((20, 1024), 80 * KIB)
    assert by_name["long"].chunks == sum(chunk.dtype == "float32" for chunk in found.chunks) > 5
    assert by_name["short"].chunks == 1
    assert sum(chunk.size_bytes for chunk in found.chunks) == found.size_bytes
    assert all(chunk.digest is None and chunk.encoded_bytes is None for chunk in found.chunks)


def test_holes_and_unknown_formats(tmp_path: Path) -> None:
    """A hole is no chunk; a file without tensors has chunks all the same; an empty one has neither."""
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"x" * 4096)
    found = inspect(str(tmp_path / "sparse"))
    assert (found.size_bytes, found.hole_bytes, len(found.chunks), found.tensors) == ((1 << 20) + 4096, 1 << 20, 1, ())
    (tmp_path / "empty").touch()
    assert inspect(str(tmp_path / "empty")).chunks == ()
    with pytest.raises(IsADirectory, match="inspect looks into a file"):
        inspect(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        inspect(str(tmp_path / "gone"))


def test_places_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all of a tensor is, and its share of a chunk that it has not alone; a chunk twice in a file counts once."""
    ids = [ChunkId(digest(bytes([number]))) for number in range(5)]
    places = [ChunkPlace(True, 50, 1), ChunkPlace(True, None, None), ChunkPlace(False, 60, 4),
              ChunkPlace(False, None, None), ChunkPlace(False, 30, 99)]  # fmt: skip
    content = Content(
        600,
        (),
        tuple(Chunk(ids[number], 100, None) for number in (0, 1, 2, 3, 4, 0)),
        (
            TensorSpan("both", "int8", (100,), 0, 100),
            TensorSpan("here", "int8", (200,), 0, 200),
            TensorSpan("remote", "int8", (100,), 450, 550),
            TensorSpan("mixed", "int8", (200,), 100, 300),
            TensorSpan("lost", "int8", (10,), 295, 305),
            TensorSpan("nothing", "int8", (0,), 300, 300),
        ),
    )
    known = Sealed(content, dict(zip(ids, places, strict=True)), whole=False)
    monkeypatch.setattr(inspecting, "sealed", lambda path: known)
    (tmp_path / "file").write_bytes(bytes(600))
    found = inspect(str(tmp_path / "file"))
    assert [(each.where, each.encoded_bytes) for each in found.tensors] == [
        (BOTH, 50), (HERE, None), (REMOTE, 15 + 25), (MIXED, None), (NOWHERE, None), (None, None),
    ]  # fmt: skip
    assert [each.codec for each in found.chunks] == ["zstd", None, "planes8", None, "codec 99", "zstd"]
    assert found.encoded_bytes == 50 + 60 + 30
    assert found.where == NOWHERE
    monkeypatch.setattr(inspecting, "sealed", lambda path: Sealed(content, known.places, whole=True))
    assert {each.where for each in inspect(str(tmp_path / "file")).chunks} == {BOTH, HERE}
    (tmp_path / "file").write_bytes(bytes(601))
    assert not inspect(str(tmp_path / "file")).is_sealed, "it was written anew"


def test_digests_of_a_range() -> None:
    """Only where chunks are exactly these bytes."""
    ids = [ChunkId(digest(bytes([number]))) for number in range(3)]
    content = Content(400, ((200, 300),), tuple(Chunk(each, 100, None) for each in ids))
    known = Sealed(content, {}, whole=True)
    assert known.digests(0, 200) == (ids[0], ids[1])
    assert known.digests(300, 400) == (ids[2],)
    assert known.digests(0, 150) is None and known.digests(50, 200) is None
    assert known.digests(100, 400) is None, "a hole is in it"
    assert known.digests(200, 300) is None and known.digests(0, 0) is None
