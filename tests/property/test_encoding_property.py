"""Whatever hypothesis makes of the remote's objects comes back equal, and no damage turns it into something else."""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.encoding import canonical
from ckptfs.encoding.fields import MOST, STAMP_MOST
from ckptfs.encoding.head import Head, decode_head, encode_head, head_key, open_head
from ckptfs.encoding.index import Index, decode_index, encode_index
from ckptfs.encoding.manifest import (
    Chunk,
    Content,
    Manifest,
    Placed,
    TensorSpan,
    decode_content,
    decode_manifest,
    encode_content,
    encode_manifest,
)
from ckptfs.encoding.pack import PackBuilder, read_index, tail_bytes
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

SLOW = [HealthCheck.too_slow]  # nested trees take a while to make, and longer on a busy machine

quick = settings(max_examples=60, deadline=None, suppress_health_check=SLOW)

digests = st.binary(min_size=32, max_size=32)
ids = st.binary(min_size=16, max_size=16)
bounded = st.integers(0, MOST)
stamps = st.integers(0, STAMP_MOST)
times = st.integers(-(1 << 63), MOST)
dtypes = st.none() | st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
names = st.binary(min_size=1, max_size=255).filter(lambda name: not {0, 47} & set(name) and name not in (b".", b".."))
KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)
utf8 = st.characters(exclude_categories=["Cs"])


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """Chunks and holes in any mixture; neighbouring holes are one."""
    at = 0
    holes: list[tuple[int, int]] = []
    chunks = []
    for is_hole, length in draw(st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), max_size=12)):
        if not is_hole:
            chunks.append(Chunk(draw(digests), length, draw(dtypes)))
        elif holes and holes[-1][1] == at:
            holes[-1] = (holes[-1][0], at + length)
        else:
            holes.append((at, at + length))
        at += length
    spans = st.tuples(st.integers(0, at), st.integers(0, at)).map(sorted)
    tensors = [
        TensorSpan(draw(st.text(utf8, max_size=9)), "float32", tuple(draw(st.lists(bounded, max_size=3))), start, end)
        for start, end in draw(st.lists(spans, max_size=3))
    ]
    return Content(at, tuple(holes), tuple(chunks), tuple(tensors))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    content = draw(contents())
    packs = draw(st.lists(digests, min_size=1, max_size=3))
    places = [
        Placed(
            draw(st.sampled_from(packs)), draw(st.integers(0, MOST >> 1)), draw(st.integers(1, 1 << 20)),
            draw(st.integers(0, 5)), draw(st.none() | digests.filter(lambda base, own=chunk.id: base != own)),
        )
        for chunk in content.chunks
    ]  # fmt: skip
    bases = {
        place.base: Placed(draw(st.sampled_from([*packs, bytes(32)])), draw(st.integers(0, MOST >> 1)), 7, 2, None)
        for place in places
        if place.base is not None
    }
    return Manifest(content, tuple(places), bases)


@st.composite
def entries(draw: st.DrawFn, trees: st.SearchStrategy[Tree] | None = None) -> Entry:
    """Any kind of entry, with its content named or inlined."""
    name, stamp = draw(names), draw(stamps)
    kind = draw(st.sampled_from((0, *KINDS)))
    if not kind:
        return Entry(name, stamp)
    content: dict[str, Any] = {}
    if kind == stat.S_IFREG:
        content["manifest"] = draw(digests)
        if draw(st.booleans()):
            content["manifest_body"] = encode_manifest(draw(manifests()))
            content["manifest"] = canonical.object_id(content["manifest_body"])
    elif kind == stat.S_IFDIR:
        content["tree"] = draw(digests)
        if trees is not None and draw(st.booleans()):
            content["tree_body"] = encode_tree(draw(trees))
            content["tree"] = canonical.object_id(content["tree_body"])
    elif kind == stat.S_IFLNK:
        content["target"] = draw(st.binary(min_size=1, max_size=50).filter(lambda target: b"\0" not in target))
    keys = st.binary(min_size=1, max_size=20).filter(lambda key: b"\0" not in key)
    return Entry(
        name, stamp, draw(ids), kind | draw(st.integers(0, 0o7777)), draw(st.integers(0, (1 << 32) - 1)),
        draw(st.integers(0, (1 << 32) - 1)), draw(bounded), draw(bounded), draw(times), draw(times), draw(times),
        draw(stamps), xattrs=tuple(sorted(draw(st.dictionaries(keys, st.binary(max_size=30), max_size=3)).items())),
        **content,
    )  # fmt: skip


def trees_of(inner: st.SearchStrategy[Tree] | None) -> st.SearchStrategy[Tree]:
    listed = st.lists(entries(inner), max_size=5, unique_by=lambda entry: entry.name)
    return st.builds(Tree, ids, listed.map(lambda found: tuple(sorted(found, key=lambda entry: entry.name))))


trees = trees_of(trees_of(None))


@st.composite
def heads(draw: st.DrawFn) -> Head:
    lanes = {}
    for lane in draw(st.lists(st.text(utf8.filter(lambda c: c != "\0"), max_size=20), max_size=3, unique=True)):
        body = encode_tree(draw(trees)) if draw(st.booleans()) else None
        lanes[lane] = (draw(digests) if body is None else canonical.object_id(body), body)
    writer, seq = draw(ids), draw(st.integers(1, MOST))
    vector = draw(st.dictionaries(ids.filter(lambda other: other != writer), st.integers(1, MOST), max_size=3))
    return Head(
        writer, seq, lanes, vector, draw(st.none() | digests), draw(st.none() | digests), None, draw(bounded),
        draw(stamps), draw(st.booleans()), draw(st.dictionaries(st.sampled_from(["files", "bytes"]), bounded)),
    )  # fmt: skip


@quick
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(utf8),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(utf8), inner), max_leaves=20,
))  # fmt: skip
def test_json_round_trip(value: object) -> None:
    """Any JSON without floats has one form, which reads back as the same value."""
    body = canonical.dumps(value)
    assert canonical.loads(body) == value
    assert canonical.dumps(canonical.loads(body)) == body


@quick
@given(st.binary(max_size=300))
def test_text_round_trip(data: bytes) -> None:
    """Any bytes survive JSON."""
    assert canonical.untext(canonical.loads(canonical.dumps(canonical.text(data)))) == data


@quick
@given(manifests())
def test_manifests_round_trip(manifest: Manifest) -> None:
    """Contents and manifests come back equal, and every byte of the file is in one chunk or one hole."""
    assert decode_content(encode_content(manifest.content)) == manifest.content
    body = encode_manifest(manifest)
    assert decode_manifest(body) == manifest
    assert encode_manifest(decode_manifest(body)) == body
    content = manifest.content
    spans = [(at, at + chunk.length) for at, chunk in zip(content.offsets(), content.chunks, strict=True)]
    ends = [0]
    for start, end in sorted([*spans, *content.holes]):
        assert start == ends[-1]
        ends.append(end)
    assert ends[-1] == content.size


@quick
@given(trees, st.integers(1, 4))
def test_trees_round_trip(tree: Tree, most: int) -> None:
    """Trees come back equal, with all that is inlined; split and joined too; and each entry on its own."""
    body = encode_tree(tree)
    assert decode_tree(body) == tree
    for entry in tree.entries:
        assert decode_entry(encode_entry(entry)) == entry
        if entry.tree_body is not None:
            assert encode_tree(decode_tree(entry.tree_body)) == entry.tree_body
        if entry.manifest_body is not None:
            assert encode_manifest(decode_manifest(entry.manifest_body)) == entry.manifest_body
    objects = split_tree(tree, most)
    top = decode_tree(objects[-1][1])
    found = dict(objects)
    if isinstance(top, TreeParts):
        top = join_parts(top, [decode_tree(found[part]) for part in top.parts])
    assert top == tree


@quick
@given(heads())
def test_heads_round_trip(head: Head) -> None:
    """Heads come back equal."""
    assert decode_head(encode_head(head)) == head


@quick
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(0, 5), st.none() | digests), max_size=8))
def test_packs_round_trip(chunks: list[tuple[bytes, int, bytes | None]]) -> None:
    """A pack's end tells where each chunk lies, and an index repeats it."""
    builder = PackBuilder()
    for number, (data, codec, base) in enumerate(chunks):
        builder.add(number.to_bytes(32, "little"), len(data), codec, data, base if base != bytes(32) else None)
    name, data, packed = builder.finish()
    assert read_index(data[-tail_bytes(data, len(data)) :], len(data), name) == packed
    assert [data[one.offset : one.offset + one.length] for one in packed] == [part for part, _, _ in chunks]
    index = Index({name: packed}, name)
    assert decode_index(encode_index(index)) == index


def refuses_or_equals(data: bytes, read: Callable[[bytes], object], value: object, at: int, with_byte: int) -> None:
    """Neither a byte changed at *at* nor a cut there may read as another value or raise anything but FormatError."""
    damaged = bytearray(data)
    damaged[at % len(data)] = with_byte
    for changed in (bytes(damaged), data[: at % len(data)], data + bytes([with_byte])):
        try:
            found = read(changed)
        except FormatError:
            continue
        assert found == value


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(manifests() | trees | heads(), st.integers(0, 1 << 20), st.integers(0, 255))
def test_damaged_objects(value: Manifest | Tree | Head, at: int, with_byte: int) -> None:
    """An object with one byte changed, cut off or added is refused, or reads as what it was."""
    if isinstance(value, Head):
        body = encode_head(value)
        key = head_key(value.writer, value.seq)
        refuses_or_equals(canonical.seal_object(body), lambda data: open_head(data, key), value, at, with_byte)
        return
    encode: Any = encode_manifest if isinstance(value, Manifest) else encode_tree
    decode: Any = decode_manifest if isinstance(value, Manifest) else decode_tree
    body = encode(value)
    name = canonical.object_id(body)
    data = canonical.seal_object(body)
    refuses_or_equals(data, lambda changed: decode(canonical.open_object(changed, name)), value, at, with_byte)
    refuses_or_equals(data, lambda changed: decode(canonical.open_object(changed)), value, at, with_byte)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(manifests() | trees | heads(), st.data())
def test_damaged_json(value: Manifest | Tree | Head, data: st.DataObject) -> None:
    """JSON changed before it was compressed, by a faulty writer, raises nothing but FormatError, or is canonical."""
    encode: Any = {Manifest: encode_manifest, Tree: encode_tree, Head: encode_head}[type(value)]
    decode: Any = {Manifest: decode_manifest, Tree: decode_tree, Head: decode_head}[type(value)]
    body = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        new = data.draw(st.sampled_from([b"", b"0", b"9", b'"', b"[", b"}", b"-", b"\xff", b"a"]))
        body[at : at + data.draw(st.integers(0, 2))] = new
    try:
        found = decode(bytes(body))
    except FormatError:
        return
    if not isinstance(found, TreeParts):
        assert encode(found) == body


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(st.binary(max_size=200))
@pytest.mark.parametrize("prefix", [b"", b"\x28\xb5\x2f\xfd", b"{"])
def test_garbage(prefix: bytes, data: bytes) -> None:
    """Arbitrary bytes raise nothing but FormatError in any decoder."""
    data = prefix + data
    readers: list[Callable[[bytes], object]] = [
        canonical.open_object, canonical.loads, decode_content, decode_manifest, decode_tree, decode_head,
        decode_index, decode_entry, lambda tail: read_index(tail, len(tail)),
    ]  # fmt: skip
    for reader in readers:
        try:
            reader(data)
        except FormatError:
            pass
