"""ckptfs.json: what marks a prefix of a bucket as ours, and in which format. Written once, readable by people.

    {"check": digest of the canonical JSON of the rest, "created": ns, "format": "ckptfs", "optional": [...],
     "requires": [...], "store": uuid, "version": 1}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from uuid import UUID

from ckptfs.encoding.canonical import dumps, object_id, parse
from ckptfs.encoding.features import check_names, demand
from ckptfs.encoding.fields import check_keys, integer, mapping, string
from ckptfs.errors import FormatError

VERSION = 1
"""Of the format as a whole; raised only when features cannot express a change."""
SIZE_MOST = 1 << 16
_KEYS = frozenset({"check", "created", "format", "optional", "requires", "store", "version"})


@dataclass(frozen=True)
class RemoteFormat:
    """What a remote says of itself."""

    store: UUID
    """Tells this remote from every other one."""
    created_ns: int
    version: int = VERSION
    requires: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def encode_remote_format(remote: RemoteFormat) -> bytes:
    """The bytes of ckptfs.json: indented JSON, ASCII."""
    value: dict[str, object] = {
        "created": integer(remote.created_ns, "created"),
        "format": "ckptfs",
        "optional": list(check_names(remote.optional, "optional")),
        "requires": list(check_names(remote.requires, "requires")),
        "store": str(remote.store),
        "version": integer(remote.version, "version", 1),
    }
    value["check"] = object_id(dumps(value)).hex()
    return json.dumps(value, indent=2, sort_keys=True).encode("ascii") + b"\n"


def decode_remote_format(data: bytes) -> RemoteFormat:
    """The inverse; layout and white space are free.

    Raises FormatError: not ours, damaged or edited, or of a version or with features that this ckptfs does not know.
    """
    if len(data) > SIZE_MOST:
        raise FormatError(f"ckptfs.json of {len(data)} bytes, at most {SIZE_MOST} are possible")
    value = mapping(parse(data), "ckptfs.json")
    if value.get("format") != "ckptfs":
        raise FormatError("ckptfs.json is not one of ours")
    version = integer(value.get("version"), "version", 1)
    if version > VERSION:
        raise FormatError(f"this remote has format version {version}, known here is {VERSION}: install a newer ckptfs")
    rest = {key: value[key] for key in value if key != "check"}
    if value.get("check") != object_id(dumps(rest)).hex():
        raise FormatError("ckptfs.json is damaged or was edited: its check does not fit")
    requires = demand(value.get("requires"), "this remote")
    optional = check_names(value.get("optional"), "optional")
    check_keys(value, "ckptfs.json", _KEYS, _KEYS, optional)
    name = string(value["store"], "store", 36)
    try:
        store = UUID(name)
    except ValueError as error:
        raise FormatError("store is not a UUID") from error
    if str(store) != name:
        raise FormatError("store is not a UUID in its usual form")
    return RemoteFormat(store, integer(value["created"], "created"), version, requires, optional)
