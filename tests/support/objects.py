"""What on a remote depends on which object: the objects of a directory remote, read with the encoding package."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import open_head
from ckptfs.encoding.keys import HEADS, INDEXES, MANIFESTS, PACKS, TREES, manifest_key, pack_key, tree_key
from ckptfs.encoding.manifest import decode_manifest
from ckptfs.encoding.tree import Tree, decode_tree, join_parts
from ckptfs.ids import ObjectId

KINDS = {"pack": PACKS, "manifest": MANIFESTS, "tree": TREES, "index": INDEXES, "head": HEADS}


@dataclass
class Dependents:
    """Who needs which object of the newest head of the only writer. Paths are relative to the mount."""

    top: Path
    listings: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Key of a tree -> the directory that cannot be listed without it."""
    files: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Key of a manifest -> files."""
    spans: dict[str, list[tuple[int, int, str]]] = field(default_factory=lambda: defaultdict(list))
    """Key of a pack -> (start, end) in it and the file that needs these bytes."""

    def keys(self, kind: str) -> list[str]:
        """Every object of a kind that is on the remote."""
        folder = self.top / KINDS[kind]
        return sorted(str(path.relative_to(self.top)) for path in folder.rglob("*") if path.is_file())

    def used(self, kind: str) -> list[str]:
        """Those that the newest head needs; all of the other kinds."""
        known = {"pack": self.spans, "manifest": self.files, "tree": self.listings}.get(kind)
        return [key for key in self.keys(kind) if known is None or key in known]

    def read(self) -> Dependents:
        newest = self.keys("head")[0]
        head = open_head((self.top / newest).read_bytes(), newest)
        self._directory("", *head.lanes[""])
        return self

    def _directory(self, path: str, digest: ObjectId, body: bytes | None) -> None:
        tree = self._tree(path, digest, body)
        for entry in tree.entries:
            child = f"{path}/{entry.name.decode()}".lstrip("/")
            if entry.tree is not None:
                self._directory(child, ObjectId(entry.tree), entry.tree_body)
            elif entry.manifest is not None:
                self._file(child, ObjectId(entry.manifest), entry.manifest_body)

    def _tree(self, path: str, digest: ObjectId, body: bytes | None) -> Tree:
        if body is None:
            self.listings[tree_key(digest)].add(path)
            body = open_object((self.top / tree_key(digest)).read_bytes(), digest)
        decoded = decode_tree(body)
        if isinstance(decoded, Tree):
            return decoded
        return join_parts(decoded, [self._tree(path, part, None) for part in decoded.parts])

    def _file(self, path: str, digest: ObjectId, body: bytes | None) -> None:
        if body is None:
            self.files[manifest_key(digest)].add(path)
            body = open_object((self.top / manifest_key(digest)).read_bytes(), digest)
        for place in decode_manifest(body).places:
            self.spans[pack_key(place.pack)].append((place.offset, place.offset + place.length, path))
