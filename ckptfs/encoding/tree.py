"""One directory's entries as an object (`Tree`), its splitting into parts, and which of two entries is newer.

Entries say all that `ls -l` shows; manifests and subtrees are named by digest or inlined. Merging whole directories is
left to `ckptfs.replica`; the order that it merges by, and that docs/restore.py repeats, stands here.
"""

from __future__ import annotations

import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptfs.encoding.canonical import dumps, embed, loads, object_id, text, unembed, untext
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import STAMP_MOST, array, check_keys, digest_of, id_of, integer, mapping
from ckptfs.errors import FormatError
from ckptfs.ids import FileId, ObjectId, Stamp

NAME_MOST = 255
TARGET_MOST = 4095
"""PATH_MAX without its NUL."""
XATTR_MOST = 65536
"""XATTR_SIZE_MAX of Linux, for one value."""
_NEVER = Stamp(0)
_MODE_MOST = 0o177777
_OWNER_MOST = (1 << 32) - 1
_TIME_LEAST = -(1 << 63)
_FORMATS = frozenset(
    {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory and what it names; or, with `file_id` None, a tombstone."""

    name: bytes
    stamp: Stamp
    """When the name was bound to this file, or removed."""
    file_id: FileId | None = None
    """None: a tombstone; then only name and stamp mean anything."""
    mode: int = 0
    """With the S_IFMT bits."""
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    """Of a device node: Linux's st_rdev."""
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    atime_ns: int = 0
    changed: Stamp = _NEVER
    """When content or attributes last changed."""
    target: bytes | None = None
    """Of a symbolic link."""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    """Ordered by name."""
    manifest: ObjectId | None = None
    """Of a regular file."""
    manifest_body: bytes | None = None
    """The manifest's canonical JSON where it is inlined."""
    tree: ObjectId | None = None
    """Of a directory."""
    tree_body: bytes | None = None
    """The tree's canonical JSON where it is inlined."""

    @property
    def binding(self) -> tuple[int, bytes]:
        """Of two entries for one name, the greater is what the name means; at equal stamps any fixed order serves.

        A file's last change counts too, so that an edit outlives an older removal or replacement by another writer.
        """
        if self.file_id is None:
            return self.stamp, b""
        return self.stamp if stat.S_ISDIR(self.mode) else max(self.stamp, self.changed), self.file_id

    @property
    def version(self) -> tuple[object, ...]:
        """Of two entries for one file id, the greater has the file's content and attributes."""
        return (
            self.changed, self.ctime_ns, self.mtime_ns, self.size, self.mode, self.uid, self.gid,
            self.manifest or b"", self.target or b"", self.xattrs,
        )  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """What one directory holds, or one part of it."""

    file_id: FileId
    """The directory's."""
    entries: tuple[Entry, ...]
    """Ordered by name, names unique."""
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class TreeParts:
    """A directory with so many entries that it is split: each part is a `Tree` with the same file id."""

    file_id: FileId
    parts: tuple[ObjectId, ...]
    """In the order of the names in them."""
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def _write_entry(entry: Entry) -> dict[str, object]:
    """*entry* as JSON. Fields with their usual value are left out: trees are mostly fetched whole, by many readers."""
    if entry.file_id is None:
        return {"name": text(entry.name), "stamp": entry.stamp}
    row: dict[str, object] = {
        "name": text(entry.name), "stamp": entry.stamp, "id": entry.file_id.hex(), "mode": entry.mode,
        "uid": entry.uid, "gid": entry.gid, "size": entry.size, "mtime": entry.mtime_ns, "ctime": entry.ctime_ns,
        "atime": entry.atime_ns, "changed": entry.changed,
    }  # fmt: skip
    if entry.rdev:
        row["rdev"] = entry.rdev
    if entry.target is not None:
        row["target"] = text(entry.target)
    if entry.xattrs:
        row["xattrs"] = [[text(name), text(value)] for name, value in entry.xattrs]
    if entry.manifest is not None:
        row["manifest"] = embed(entry.manifest, entry.manifest_body)
    if entry.tree is not None:
        row["tree"] = embed(entry.tree, entry.tree_body)
    return row


_TOMBSTONE_KEYS = frozenset({"name", "stamp"})
_ENTRY_NEEDED = _TOMBSTONE_KEYS | {"id", "mode", "uid", "gid", "size", "mtime", "ctime", "atime", "changed"}
_ENTRY_KEYS = _ENTRY_NEEDED | {"rdev", "target", "xattrs", "manifest", "tree"}


def _read_entry(row: object, optional: tuple[str, ...]) -> Entry:
    value = mapping(row, "entry")
    if "id" not in value:
        check_keys(value, "tombstone", _TOMBSTONE_KEYS, _TOMBSTONE_KEYS, optional)
        entry = Entry(untext(value["name"]), Stamp(integer(value["stamp"], "stamp", 0, STAMP_MOST)))
        _check_name(entry.name)
        return entry
    check_keys(value, "entry", _ENTRY_NEEDED, _ENTRY_KEYS, optional)
    manifest, manifest_body = unembed(value["manifest"]) if "manifest" in value else (None, None)
    tree, tree_body = unembed(value["tree"]) if "tree" in value else (None, None)
    xattrs = _read_xattrs(value["xattrs"]) if "xattrs" in value else ()
    entry = Entry(
        untext(value["name"]),
        Stamp(integer(value["stamp"], "stamp", 0, STAMP_MOST)),
        FileId(id_of(value["id"], "file id")),
        integer(value["mode"], "mode", 0, _MODE_MOST),
        integer(value["uid"], "uid", 0, _OWNER_MOST),
        integer(value["gid"], "gid", 0, _OWNER_MOST),
        integer(value["rdev"], "rdev", 1) if "rdev" in value else 0,
        integer(value["size"], "size"),
        integer(value["mtime"], "mtime", _TIME_LEAST),
        integer(value["ctime"], "ctime", _TIME_LEAST),
        integer(value["atime"], "atime", _TIME_LEAST),
        Stamp(integer(value["changed"], "changed", 0, STAMP_MOST)),
        untext(value["target"]) if "target" in value else None,
        xattrs, manifest, manifest_body, tree, tree_body,
    )  # fmt: skip
    _check_entry(entry)
    return entry


def _read_xattrs(value: object) -> tuple[tuple[bytes, bytes], ...]:
    pairs = []
    for pair in array(value, "xattrs"):
        if type(pair) is not list or len(pair) != 2:
            raise FormatError("an extended attribute is not an array of 2")
        pairs.append((untext(pair[0]), untext(pair[1])))
    if not pairs:
        raise FormatError("xattrs is there but empty")
    return tuple(pairs)


def _check_name(name: bytes) -> None:
    if not 0 < len(name) <= NAME_MOST or b"/" in name or b"\0" in name or name in (b".", b".."):
        raise FormatError(f"{name[:40]!r} is not a file name")


def _check_entry(entry: Entry) -> None:
    """Raise FormatError unless name, kind and what belongs to the kind agree. `_read_entry` checks the numbers."""
    _check_name(entry.name)
    kind = stat.S_IFMT(entry.mode)
    if kind not in _FORMATS:
        raise FormatError(f"mode {entry.mode:#o} is of no kind of file")
    if (entry.target is not None) != (kind == stat.S_IFLNK):
        raise FormatError("a symbolic link has no target, or something else has one")
    if entry.target is not None and (not 0 < len(entry.target) <= TARGET_MOST or b"\0" in entry.target):
        raise FormatError("a symbolic link's target is empty, too long or holds NUL")
    if entry.manifest is not None and kind != stat.S_IFREG:
        raise FormatError("something other than a regular file has a manifest")
    if entry.tree is not None and kind != stat.S_IFDIR:
        raise FormatError("something other than a directory has a tree")
    last = b""
    for name, value in entry.xattrs:
        if not last < name or len(name) > NAME_MOST or b"\0" in name or len(value) > XATTR_MOST:
            raise FormatError("extended attributes are not ordered by name, or out of bounds")
        last = name


def encode_entry(entry: Entry) -> bytes:
    """*entry* as canonical JSON, for the catalog; manifest and tree may be missing. Raises FormatError."""
    row = _write_entry(entry)
    # what was embedded was checked just now, and reading it again would cost as much as writing it
    _read_entry({key: row[key] for key in row if key not in ("manifest", "tree")}, ())
    _check_kept(entry)
    return dumps(row)


def decode_entry(data: bytes) -> Entry:
    """The inverse of `encode_entry`. Raises FormatError."""
    return _read_entry(loads(data), ())


def _check_kept(entry: Entry) -> None:
    """Raise FormatError where an entry would lose something that it claims to have."""
    if entry.file_id is not None:
        _check_entry(entry)
    if (entry.manifest is None and entry.manifest_body is not None) or (
        entry.tree is None and entry.tree_body is not None
    ):
        raise FormatError("an inlined object without its digest")


def _check_tree(entries: Sequence[Entry]) -> None:
    """Raise FormatError unless *entries* are in order and every file and directory says where its content is."""
    last = b""
    for entry in entries:
        if not last < entry.name:
            raise FormatError("a tree's entries are not ordered by name, or a name is there twice")
        last = entry.name
        if entry.file_id is None:
            continue
        kind = stat.S_IFMT(entry.mode)
        if (kind == stat.S_IFREG and entry.manifest is None) or (kind == stat.S_IFDIR and entry.tree is None):
            raise FormatError(f"entry {entry.name!r} has no content")


def encode_tree(tree: Tree | TreeParts) -> bytes:
    """*tree* as canonical JSON; its digest is the object's name. Raises FormatError when it would not decode."""
    value: dict[str, object] = {
        "id": tree.file_id.hex(),
        "requires": check_names(tree.requires, "requires"),
        "optional": check_names(tree.optional, "optional"),
    }
    if isinstance(tree, TreeParts):
        value["parts"] = [part.hex() for part in tree.parts]
    else:
        rows = []
        for entry in tree.entries:
            row = _write_entry(entry)
            _read_entry({key: row[key] for key in row if key not in ("manifest", "tree")}, ())
            _check_kept(entry)
            rows.append(row)
        _check_tree(tree.entries)
        value["entries"] = rows
    return dumps(value)


_TREE_NEEDED = frozenset({"id", "requires", "optional"})


def decode_tree(data: bytes) -> Tree | TreeParts:
    """The directory, or the list of its parts, in canonical JSON *data*, whose digest `open_object` checks.

    Raises FormatError, also when the tree needs a feature that this version does not know.
    """
    value = mapping(loads(data), "tree")
    requires = demand(value.get("requires"), "tree")
    optional = check_names(value.get("optional"), "optional")
    key = "parts" if "parts" in value else "entries"
    check_keys(value, "tree", _TREE_NEEDED | {key}, _TREE_NEEDED | {key}, optional)
    file_id = FileId(id_of(value["id"], "directory id"))
    if key == "parts":
        parts = tuple(ObjectId(digest_of(part, "part")) for part in array(value["parts"], "parts"))
        if len(set(parts)) != len(parts) or not parts:
            raise FormatError("a split tree has no parts or has one twice")
        return TreeParts(file_id, parts, requires, optional)
    entries = tuple([_read_entry(row, optional) for row in array(value["entries"], "entries")])
    _check_tree(entries)
    return Tree(file_id, entries, requires, optional)


def join_parts(parent: TreeParts, parts: Sequence[Tree | TreeParts]) -> Tree:
    """The whole directory from its *parts*, in the parent's order. Raises FormatError when they do not fit together."""
    entries: list[Entry] = []
    if len(parts) != len(parent.parts):
        raise FormatError(f"a tree of {len(parent.parts)} parts was given {len(parts)}")
    for part in parts:
        if not isinstance(part, Tree) or part.file_id != parent.file_id:
            raise FormatError("a part of a tree belongs to another directory or is split itself")
        entries += part.entries
    _check_tree(entries)
    return Tree(parent.file_id, tuple(entries), parent.requires, parent.optional)


def split_tree(tree: Tree, most: int) -> list[tuple[ObjectId, bytes]]:
    """*tree* as (name, canonical JSON) of the objects to put, parts first; the last one is the directory itself.

    One object when there are at most *most* entries. Parts end where a hash of the name says so, so that a new name
    changes one or two parts and not all that follow.
    """
    if len(tree.entries) <= most:
        body = encode_tree(tree)
        return [(object_id(body), body)]
    objects = []
    start = 0
    for end in range(1, len(tree.entries) + 1):
        count = end - start
        if count == most or end == len(tree.entries) or (4 * count >= most and _ends_part(tree.entries[end - 1], most)):
            body = encode_tree(replace(tree, entries=tree.entries[start:end]))
            objects.append((object_id(body), body))
            start = end
    parent = encode_tree(TreeParts(tree.file_id, tuple(name for name, _ in objects), tree.requires, tree.optional))
    return [*objects, (object_id(parent), parent)]


def _ends_part(entry: Entry, most: int) -> bool:
    return zlib.crc32(entry.name) % max(1, most // 2) == 0
