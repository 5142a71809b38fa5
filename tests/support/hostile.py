"""A remote in a directory written by somebody who means harm: objects that our encoders would refuse to make."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from ckptfs.encoding.canonical import dumps, object_id, seal_object
from ckptfs.encoding.keys import FORMAT_KEY, head_key, manifest_key, pack_key, tree_key
from ckptfs.encoding.pack import PackBuilder
from ckptfs.encoding.remote_format import RemoteFormat, encode_remote_format
from ckptfs.ids import ChunkId, ObjectId, WriterId, digest

NOW = int(time.time() * 1000) << 16
ROOT = "0" * 32
WRITER = WriterId(b"\x66" * 16)


class HostileRemote:
    """See the module. Values are plain JSON; what they say is up to the caller."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / ".tmp").mkdir()
        self._put(FORMAT_KEY, encode_remote_format(RemoteFormat(uuid4(), time.time_ns())))
        self._seq = 0

    @property
    def url(self) -> str:
        return f"file://{self.directory}"

    def tree(self, entries: list[Any], ident: str = ROOT, **more: Any) -> str:
        """Put a tree; its digest."""
        body = dumps({"id": ident, "entries": entries, "requires": [], "optional": [], **more})
        return self.raw_tree(body)

    def parts(self, parts: list[str], ident: str = ROOT) -> str:
        return self.raw_tree(dumps({"id": ident, "parts": parts, "requires": [], "optional": []}))

    def raw_tree(self, body: bytes) -> str:
        self._put(tree_key(object_id(body)), seal_object(body))
        return object_id(body).hex()

    def manifest(self, size: int, chunks: list[tuple[bytes, int]], places: list[tuple[str, int, int, int]],
                 holes: list[list[int]] | None = None) -> str:  # fmt: skip
        """Put a manifest of (digest, length) chunks at (pack, offset, stored, codec) places; its digest."""
        packs = list(dict.fromkeys(place[0] for place in places))
        body = dumps({
            "size": size, "holes": holes or [], "tensors": [],
            "chunks": [chunk.hex() for chunk, _ in chunks], "lengths": [length for _, length in chunks],
            "dtypes": [None] * len(chunks), "packs": packs, "pack": [packs.index(place[0]) for place in places],
            "offsets": [place[1] for place in places], "stored": [place[2] for place in places],
            "codecs": [place[3] for place in places], "bases": [None] * len(chunks),
        })  # fmt: skip
        self._put(manifest_key(object_id(body)), seal_object(body))
        return object_id(body).hex()

    def file(self, data: bytes) -> str:
        """An honest file; its manifest's digest."""
        builder = PackBuilder()
        builder.add(ChunkId(digest(data)), len(data), 0, data)
        name, body, _ = builder.finish()
        self._put(pack_key(name), bytes(body))
        return self.manifest(len(data), [(digest(data), len(data))], [(name.hex(), 0, len(data), 0)])

    def pack(self, data: bytes) -> str:
        """Any bytes under a pack's key; its name."""
        name = ObjectId(digest(data))
        self._put(pack_key(name), data)
        return name.hex()

    def head(self, root: str, **more: Any) -> None:
        """Publish *root*."""
        self._seq += 1
        value = {
            "writer": WRITER.hex(), "seq": self._seq, "lanes": {"": root}, "vector": {}, "previous": None,
            "index": None, "time": time.time_ns(), "stamp": NOW, "incomplete": False, "counts": {}, "requires": [],
            "optional": [], **more,
        }  # fmt: skip
        self._put(head_key(WriterId(bytes.fromhex(value["writer"])), self._seq), seal_object(dumps(value)))

    def put_at(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        path = self.directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def entry(name: object, ident: str, mode: int = 0o100644, **more: Any) -> dict[str, Any]:
    """An entry of a tree."""
    return {
        "name": name, "stamp": NOW, "id": ident, "mode": mode, "uid": 0, "gid": 0, "size": 0, "mtime": 0, "ctime": 0,
        "atime": 0, "changed": NOW, **more,
    }  # fmt: skip


def ident(number: int) -> str:
    return f"{number:032x}"
