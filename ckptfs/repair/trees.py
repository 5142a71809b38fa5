"""Making a small object of the remote anew from the catalog: a manifest, a tree. Pure but for the catalog's rows.

Both are named by their content, so what comes out either is the very object or shows by its name that it is not.
"""

from __future__ import annotations

from dataclasses import replace
from stat import S_ISDIR, S_ISREG

from ckptfs.encoding.canonical import object_id
from ckptfs.encoding.keys import manifest_key, tree_key
from ckptfs.encoding.manifest import Manifest, decode_content, encode_manifest
from ckptfs.encoding.tree import Entry, Tree, split_tree
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId
from ckptfs.local.catalog.contents import Contents
from ckptfs.local.catalog.cuts import CutEntry
from ckptfs.local.catalog.packs import Packs
from ckptfs.local.catalog.stock import Stock, StockTree


def tree_objects(stock: Stock, contents: Contents, tree: StockTree, most: int) -> dict[str, bytes] | None:
    """Key and canonical JSON of *tree* and its parts, where they are made of *most* entries at most; None when what the
    rows say is another tree, as it is when another version of ckptfs cut it."""
    try:
        entries = [_entry(contents, each) for each in stock.entries(tree.ino)]
        objects = split_tree(Tree(tree.file_id, tuple(entries)), most)
    except FormatError:
        return None
    return {tree_key(name): body for name, body in objects} if objects[-1][0] == tree.digest else None


def manifest_object(contents: Contents, packs: Packs, manifest: int, digest: ObjectId) -> dict[str, bytes] | None:
    """Key and canonical JSON of a file's manifest; None when it cannot be told any more what it said."""
    body = contents.manifest(manifest).body
    if body is None:
        return None
    try:
        content = decode_content(body)
        encoded = encode_manifest(Manifest.of(content, packs.placed_with_bases(chunk.id for chunk in content.chunks)))
    except (FormatError, KeyError):
        return None
    return {manifest_key(digest): encoded} if object_id(encoded) == digest else None


def _entry(contents: Contents, row: CutEntry) -> Entry:
    entry = row.entry
    if entry is None or entry.file_id is None:
        return Entry(row.name, row.stamp)
    if S_ISREG(entry.mode) and row.manifest is not None:
        manifest = contents.manifest(row.manifest)
        return replace(entry, size=manifest.size, manifest=manifest.digest, manifest_body=manifest.remote_body,
                       tree=None, tree_body=None)  # fmt: skip
    return entry if S_ISDIR(entry.mode) else replace(entry, tree=None, tree_body=None)
