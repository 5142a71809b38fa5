"""Canonical JSON, the frames around it, feature names and keys."""

from __future__ import annotations

import json

import pytest
import zstandard

from ckptfs.encoding import canonical, features, keys
from ckptfs.errors import FormatError
from ckptfs.ids import ObjectId, WriterId, digest


def test_bytes_and_digest_are_fixed() -> None:
    """The same value has the same bytes and digest on every machine and in every version: pinned here."""
    value = {"b": [1, None, True], "a": "ä\u20ac\U0001f600\n", "Z": -5}
    body = canonical.dumps(value)
    assert body == rb'{"Z":-5,"a":"\u00e4\u20ac\ud83d\ude00\n","b":[1,null,true]}'
    assert canonical.object_id(body).hex() == "98dc9c8582cea45c167dd1a88f691847644a40ca16fc8d5cd0d8816c1d6be5b3"
    assert canonical.loads(body) == value


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"nul", b'{"a": 1}', b'{"b":1,"a":2}', b'{"a":1,"a":1}', b"1.0", b"1e5", b"NaN", b"-Infinity",
        b"01", b"-0", b'"\\u0041"', '"ä"'.encode(), b'"\\/"', b" 1", b"1 ", b"1\n", b"[1,]", b"1" * 5000,
        b"[" * 100_000, b"\xff\xfe1\x00", b'"a\\ud8"',
    ],
)  # fmt: skip
def test_only_canonical_json_is_read(data: bytes) -> None:
    """Anything but the one canonical form is refused: other layouts would have another digest."""
    with pytest.raises(FormatError):
        canonical.loads(data)


@pytest.mark.parametrize("data", [b"", b"plain", "ü€".encode(), b"\xff", b"a\x80b", b"\xed\xa0\x80", b"\x00\n"])
def test_text_keeps_any_bytes(data: bytes) -> None:
    """Any bytes come back from their JSON; valid UTF-8 stays readable."""
    value = canonical.text(data)
    assert isinstance(value, str) == (data.decode("utf-8", "replace").encode() == data)
    assert canonical.untext(json.loads(json.dumps(value))) == data


@pytest.mark.parametrize(
    "value",
    [None, 1, [], {}, {"b64": 1}, {"b64": "YQ=="}, {"b64": "/w"}, {"b64": "/w==", "x": 1}, {"b64": "/x=="}, "\ud800"],
)
def test_untext_takes_one_form_only(value: object) -> None:
    """Base64 of valid UTF-8, sloppy base64 and half surrogates are refused: one value, one encoding."""
    with pytest.raises(FormatError):
        canonical.untext(value)


def test_objects_open_only_whole() -> None:
    """An object opens to its JSON; a wrong name, every flipped byte and every truncation is refused."""
    body = canonical.dumps({"x": list(range(50))})
    data = canonical.seal_object(body)
    name = canonical.object_id(body)
    assert canonical.open_object(data, name) == body
    with pytest.raises(FormatError, match="other bytes"):
        canonical.open_object(data, ObjectId(bytes(32)))
    for at in range(len(data)):
        with pytest.raises(FormatError):
            canonical.open_object(data[:at])
    with pytest.raises(FormatError):
        canonical.open_object(data + b"\0")
    with pytest.raises(FormatError):
        canonical.open_object(data + data)


def test_objects_do_not_blow_up() -> None:
    """A small object that claims or unpacks to more than the limit allocates nothing and is refused."""
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(50 << 20))
    with pytest.raises(FormatError, match="at most"):
        canonical.open_object(bomb, limit=10 << 20)
    lie = b"\x28\xb5\x2f\xfd\xe4" + (1 << 45).to_bytes(8, "little") + bytes(20)
    with pytest.raises(FormatError, match="at most"):
        canonical.open_object(lie, limit=1 << 60)
    unsized = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(b"{}")
    with pytest.raises(FormatError, match="content size"):
        canonical.open_object(unsized)


def test_embedding() -> None:
    """An inlined object is readable inside its parent and keeps its digest; a body under another name is refused."""
    body = b'{"a":[1,2]}'
    name = canonical.object_id(body)
    assert canonical.embed(name, body) == {"a": [1, 2]}
    assert canonical.unembed({"a": [1, 2]}) == (name, body)
    assert canonical.unembed(canonical.embed(name, None)) == (name, None)
    for bad_name, bad_body in [(ObjectId(bytes(32)), body), (digest(b'{"a": 1}'), b'{"a": 1}'), (digest(b"1"), b"1")]:
        with pytest.raises(FormatError):
            canonical.embed(ObjectId(bad_name), bad_body)
    for value in (None, 1, "", "ab", name.hex().upper(), name.hex()[:-1], name.hex() + "00", [name.hex()]):
        with pytest.raises(FormatError):
            canonical.unembed(value)


def test_features() -> None:
    """An unknown required feature is refused, saying what to install; names are ordered, unique and well-formed."""
    assert features.demand([], "head") == ()
    with pytest.raises(FormatError, match=r"head needs aaa@0\.9, zzz@0\.10: install ckptfs 0\.10 or newer"):
        features.demand(["aaa@0.9", "zzz@0.10"], "head")
    with pytest.raises(FormatError, match="needs zzz: install a newer ckptfs"):
        features.demand(["zzz"], "head")
    for bad in (None, "aaa", ["b", "a"], ["a", "a"], ["A"], [1], [""], ["a@"], ["a b"], ["f"] * 1000):
        with pytest.raises(FormatError):
            features.check_names(bad, "requires")


def test_keys() -> None:
    """Keys are as docs/format.md says, and parse back; a newer head sorts first."""
    name = ObjectId(bytes(range(32)))
    assert keys.pack_key(name) == f"packs/00/{name.hex()}"
    for kind, make in [
        (keys.PACKS, keys.pack_key), (keys.MANIFESTS, keys.manifest_key), (keys.TREES, keys.tree_key),
        (keys.INDEXES, keys.index_key),
    ]:  # fmt: skip
        assert keys.parse_object_key(make(name)) == (kind, name)
    writer = WriterId(bytes(range(16)))
    assert keys.head_key(writer, 1) == "heads/000102030405060708090a0b0c0d0e0f/fffffffffffffffe"
    assert keys.head_key(writer, 11) < keys.head_key(writer, 10) < keys.head_key(writer, 9)
    for seq in (1, 2, (1 << 63) - 1):
        assert keys.parse_head_key(keys.head_key(writer, seq)) == (writer, seq)
    for seq in (0, -1, 1 << 63):
        with pytest.raises(ValueError, match="sequence"):
            keys.head_key(writer, seq)
    hexes = name.hex()
    for bad in ("", "packs/00", f"packs/01/{hexes}", f"packs/00/{hexes}x", f"heads/00/{hexes}", f"packs/00/{hexes}\n"):
        with pytest.raises(FormatError):
            keys.parse_object_key(bad)
    for bad in ("", "ffffffffffffffff", "0000000000000000", "fffffffffffffffE"):
        bad = f"heads/{writer.hex()}/{bad}"
        with pytest.raises(FormatError):
            keys.parse_head_key(bad)


def test_long_values_are_encoded_in_pieces_alike() -> None:
    """What `dumps` puts together from pieces is what the json module makes of the whole."""
    value = {
        "ü": list(range(10_000)),
        "a": {"list": [["x", None, True]] * 4097, "empty": [], "z": {}, "long": ("q",) * 8192},
        "text": '",]}',
    }
    whole = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert canonical.dumps(value) == whole.encode()
    assert canonical.dumps([]) == b"[]" and canonical.dumps({}) == b"{}"
    assert canonical.dumps([{"b": 1, "a": 2}] * 5000) == b"[" + b",".join([b'{"a":2,"b":1}'] * 5000) + b"]"
