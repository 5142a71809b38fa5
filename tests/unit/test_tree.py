"""Entries, trees, their splitting, and what is newer."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptfs.encoding import canonical
from ckptfs.encoding.manifest import Content, Manifest, encode_manifest
from ckptfs.encoding.tree import (
    Entry,
    Tree,
    TreeParts,
    decode_entry,
    decode_tree,
    encode_entry,
    encode_tree,
    join_parts,
    split_tree,
)
from ckptfs.errors import FormatError
from ckptfs.ids import FileId, ObjectId, Stamp

MANIFEST = encode_manifest(Manifest(Content(7, ((0, 7),), ()), ()))
SUBTREE = encode_tree(Tree(FileId(bytes([2]) * 16), (Entry(b"gone", Stamp(5)),)))


def entry(name: bytes, mode: int = stat.S_IFREG | 0o644, **more: Any) -> Entry:
    fields: dict[str, Any] = {
        "uid": 1000, "gid": 0, "size": 7, "mtime_ns": -5, "ctime_ns": 10**18, "atime_ns": 0, "changed": Stamp(9),
    }  # fmt: skip
    if stat.S_ISREG(mode):
        fields["manifest"] = ObjectId(bytes([3]) * 32)
    if stat.S_ISDIR(mode):
        fields["tree"] = ObjectId(bytes([4]) * 32)
    return Entry(name, Stamp(7), FileId(bytes([1]) * 16), mode, **(fields | more))


ENTRIES = (
    entry(b"\x01odd\n"),
    entry(b"block", stat.S_IFBLK | 0o600, rdev=0x0801),
    entry(b"char", stat.S_IFCHR | 0o600, rdev=0x0103),
    entry(b"dir", stat.S_IFDIR | 0o1777),
    entry(b"dir2", stat.S_IFDIR, tree=canonical.object_id(SUBTREE), tree_body=SUBTREE),
    entry(b"fifo", stat.S_IFIFO | 0o644),
    entry(b"file", xattrs=((b"user.a", b""), (b"user.b", b"\xff\x00"))),
    entry(b"inlined", manifest=canonical.object_id(MANIFEST), manifest_body=MANIFEST),
    entry(b"link", stat.S_IFLNK | 0o777, target=b"../\xff where"),
    entry(b"setuid", stat.S_IFREG | 0o6755),
    entry(b"socket", stat.S_IFSOCK),
    Entry(b"tombstone", Stamp(8)),
    entry("ünïcode".encode()),
    entry(b"\xff" * 255),
)
TREE = Tree(FileId(bytes(16)), ENTRIES)


def test_every_kind_of_entry_comes_back() -> None:
    """Files, directories, links, device nodes, pipes, sockets, tombstones, odd names: equal after a round trip."""
    body = encode_tree(TREE)
    assert decode_tree(body) == TREE
    assert encode_tree(decode_tree(body)) == body
    for one in ENTRIES:
        assert decode_entry(encode_entry(one)) == one
    assert decode_tree(encode_tree(Tree(FileId(bytes(16)), ()))) == Tree(FileId(bytes(16)), ())


def test_tree_bytes_are_fixed() -> None:
    """A tree has the same name for ever: pinned here."""
    found = canonical.object_id(encode_tree(TREE)).hex()
    assert found == "f64f8c0ef1aa816b540bc1ae3ca0bcdcfeb6248fe84c37e33576633d85805513"


def test_inlined_objects_are_readable() -> None:
    """An inlined manifest or subtree is JSON within JSON, and has the digest that it would have on its own."""
    rows = {str(row["name"]): row for row in json.loads(encode_tree(TREE))["entries"]}
    assert rows["inlined"]["manifest"]["size"] == 7
    assert rows["dir2"]["tree"]["entries"] == [{"name": "gone", "stamp": 5}]
    assert rows["dir"]["tree"] == "04" * 32


def test_catalog_entries_may_lack_content() -> None:
    """A cut's entry is encoded before its manifest or subtree is known; a tree's is not."""
    for one in (entry(b"f", manifest=None), entry(b"d", stat.S_IFDIR, tree=None)):
        assert decode_entry(encode_entry(one)) == one
        with pytest.raises(FormatError, match="no content"):
            encode_tree(Tree(FileId(bytes(16)), (one,)))


def test_a_tombstone_is_name_and_stamp() -> None:
    """Whatever else a tombstone carries is dropped."""
    assert decode_entry(encode_entry(replace(entry(b"x"), file_id=None))) == Entry(b"x", Stamp(7))


@pytest.mark.parametrize(
    "bad",
    [
        entry(b""), entry(b"."), entry(b".."), entry(b"a/b"), entry(b"a\0"), entry(b"a" * 256), Entry(b"..", Stamp(1)),
        entry(b"f", 0o644), replace(entry(b"f"), mode=1 << 40), replace(entry(b"f"), mode=-1), entry(b"f", 0o170000),
        entry(b"f", uid=-1), entry(b"f", gid=1 << 32), entry(b"f", size=-1), entry(b"f", size=1 << 63),
        entry(b"f", mtime_ns=1 << 63), entry(b"f", changed=-1), replace(entry(b"f"), stamp=Stamp(1 << 63)),
        entry(b"f", target=b"x"), entry(b"l", stat.S_IFLNK), entry(b"l", stat.S_IFLNK, target=b""),
        entry(b"l", stat.S_IFLNK, target=b"a\0"), entry(b"l", stat.S_IFLNK, target=b"a" * 4096),
        entry(b"l", stat.S_IFLNK, target=b"t", manifest=ObjectId(bytes(32))),
        entry(b"f", tree=ObjectId(bytes(32))), entry(b"d", stat.S_IFDIR, manifest=ObjectId(bytes(32))),
        entry(b"f", xattrs=((b"b", b""), (b"a", b""))), entry(b"f", xattrs=((b"a", b""), (b"a", b""))),
        entry(b"f", xattrs=((b"", b""),)), entry(b"f", xattrs=((b"a", bytes(65537)),)),
        entry(b"f", manifest=ObjectId(b"short")), entry(b"f", manifest_body=b"{}"),
        entry(b"f", manifest=None, manifest_body=MANIFEST), entry(b"f", rdev=-1),
        replace(entry(b"f"), file_id=FileId(b"short")),
    ],
)  # fmt: skip
def test_impossible_entries_are_never_written(bad: Entry) -> None:
    """What would not decode is refused by the encoders."""
    with pytest.raises(FormatError):
        encode_entry(bad)
    with pytest.raises(FormatError):
        encode_tree(Tree(FileId(bytes(16)), (bad,)))


def test_entries_are_ordered() -> None:
    """Unordered or repeated names are refused, by encoder and decoder."""
    for names in ([b"b", b"a"], [b"a", b"a"]):
        entries = tuple(entry(name) for name in names)
        with pytest.raises(FormatError, match="ordered"):
            encode_tree(Tree(FileId(bytes(16)), entries))
        value = {
            "id": "00" * 16, "optional": [], "requires": [],
            "entries": [json.loads(encode_entry(one)) for one in entries],
        }  # fmt: skip
        with pytest.raises(FormatError, match="ordered"):
            decode_tree(canonical.dumps(value))


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row.pop("mode"),
        lambda row: row.pop("id"),
        lambda row: row.update(surprise=1),
        lambda row: row.update(name=1),
        lambda row: row.update(name={"b64": "YQ=="}),
        lambda row: row.update(mode=True),
        lambda row: row.update(rdev=0),
        lambda row: row.update(xattrs=[]),
        lambda row: row.update(xattrs=[["a"]]),
        lambda row: row.update(xattrs={"a": "b"}),
        lambda row: row.update(target=None),
        lambda row: row.update(manifest=None),
        lambda row: row.update(manifest="AA" * 32),
        lambda row: row.update(manifest=[]),
        lambda row: row.update(id="0" * 31),
        lambda row: row.update(stamp=-1),
    ],
)
def test_every_field_is_checked(damage: Callable[[dict[str, Any]], object]) -> None:
    """A missing, unknown, mistyped or impossible field is FormatError, nothing else."""
    row = json.loads(encode_entry(entry(b"file")))
    damage(row)
    with pytest.raises(FormatError):
        decode_entry(canonical.dumps(row))


def test_trees_need_known_features() -> None:
    """A tree that requires what this version does not know says what to install; optional fields are ignored."""
    with pytest.raises(FormatError, match=r"tree needs shiny@9\.9: install ckptfs 9\.9 or newer"):
        decode_tree(encode_tree(replace(TREE, requires=("shiny@9.9",))))
    value = json.loads(encode_tree(replace(TREE, optional=("colours@0.9",))))
    value["entries"][0]["colour"] = "red"
    value["palette"] = 1
    assert decode_tree(canonical.dumps(value)) == replace(TREE, optional=("colours@0.9",))
    for key in ("id", "requires", "optional", "entries"):
        value = json.loads(encode_tree(TREE))
        del value[key]
        with pytest.raises(FormatError):
            decode_tree(canonical.dumps(value))


def whole(objects: list[tuple[ObjectId, bytes]]) -> Tree:
    by_name = dict(objects)
    top = decode_tree(objects[-1][1])
    return top if isinstance(top, Tree) else join_parts(top, [decode_tree(by_name[name]) for name in top.parts])


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 20, 21, 500])
def test_split_and_join(count: int) -> None:
    """A tree past the limit becomes parts of at most that many entries and a parent; together they are the tree."""
    tree = Tree(FileId(bytes(16)), tuple(entry(b"%05d" % number) for number in range(count)))
    objects = split_tree(tree, 10)
    assert whole(objects) == tree
    assert len(objects) == 1 or count > 10
    for name, body in objects:
        assert canonical.object_id(body) == name
        part = decode_tree(body)
        assert isinstance(part, TreeParts) or len(part.entries) <= 10
    assert len(objects) <= 2 + count // 2


def test_a_new_name_changes_few_parts() -> None:
    """Parts end at content-defined places: one more name in the middle leaves nearly all other parts as they were."""
    entries = tuple(entry(b"%05d" % number) for number in range(0, 4000, 2))
    before = dict(split_tree(Tree(FileId(bytes(16)), entries), 100))
    more = tuple(sorted((*entries, entry(b"00501")), key=lambda one: one.name))
    after = dict(split_tree(Tree(FileId(bytes(16)), more), 100))
    assert len(after) > 20
    assert len(after.keys() - before.keys()) <= 6


def test_parts_that_do_not_fit() -> None:
    """Missing, swapped, foreign and nested parts are refused."""
    tree = Tree(FileId(bytes(16)), tuple(entry(b"%05d" % number) for number in range(30)))
    objects = dict(split_tree(tree, 10))
    parent = decode_tree(list(objects.values())[-1])
    assert isinstance(parent, TreeParts)
    parts = [decode_tree(objects[name]) for name in parent.parts]
    assert isinstance(parts[0], Tree)
    foreign = replace(parts[0], file_id=FileId(b"x" * 16))
    for bad in (parts[:-1], parts[::-1], [*parts[:-1], parent], [foreign, *parts[1:]]):
        with pytest.raises(FormatError):
            join_parts(parent, bad)
    for names in ((), (parent.parts[0],) * 2):
        with pytest.raises(FormatError):
            decode_tree(encode_tree(replace(parent, parts=names)))


def test_what_is_newer() -> None:
    """The newest binding or edit decides what a name means, the newest change what a file holds; ties are fixed."""

    def newest(*candidates: Entry) -> Entry:
        first, last = (max(order, key=lambda one: one.binding) for order in (candidates, candidates[::-1]))
        assert first is last
        return first

    old = entry(b"x", changed=Stamp(2))
    gone = Entry(b"x", Stamp(8))
    assert newest(old, gone) is gone
    assert newest(old, replace(gone, stamp=old.stamp)) is old
    edited = replace(old, changed=Stamp(9))
    assert newest(edited, gone) is edited  # an edit outlives an older removal
    directory = entry(b"x", stat.S_IFDIR, changed=Stamp(9))
    assert newest(directory, gone) is gone  # a directory's times change with every name in it
    other = replace(old, file_id=FileId(bytes([2]) * 16))
    assert newest(old, other) is other

    renamed = replace(old, name=b"y", stamp=Stamp(20))
    written = replace(old, changed=Stamp(30), size=8)
    assert max(renamed, written, key=lambda one: one.version) is written
    other = replace(written, manifest=ObjectId(bytes([9]) * 32))
    assert max(written, other, key=lambda one: one.version) is max(other, written, key=lambda one: one.version)
