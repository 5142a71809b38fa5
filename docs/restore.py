#!/usr/bin/env python3
"""Restore everything from a downloaded copy of a ckptfs remote, without ckptfs.

    aws s3 cp --recursive s3://bucket/prefix COPY
    pip install numpy zstandard blake3
    python restore.py COPY TARGET

Follows docs/format.md and nothing else; needs Linux, Python 3.10. Every object and every chunk is checked against its
digest. What cannot be restored is reported and left out, the rest goes on, and the exit status is 1. Owners and device
nodes need root. TARGET must not exist or be empty.
"""

import base64
import json
import os
import stat
import struct
import sys

import numpy
import zstandard
from blake3 import blake3

ROOT = "00" * 16
failures = 0


class Damaged(Exception):
    """Bytes that are not what they should be."""


def fail(what, error):
    global failures
    failures += 1
    print(f"restore: {what}: {error}", file=sys.stderr)


def warn(what, error):
    print(f"restore: {what}: {error} (goes on without)", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------- objects


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def unpack_object(data, digest=None):
    """The JSON value in a manifest, tree, index or head."""
    try:
        body = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Damaged(f"does not unpack: {error}") from error
    if digest is not None and blake3(body).hexdigest() != digest:
        raise Damaged("holds other bytes than its name says")
    value = json.loads(body)
    check_features(value)
    return value


def check_features(value):
    unknown = set(value.get("requires", ())) - {"delta"}
    if unknown:
        raise SystemExit(f"restore: this remote needs {', '.join(sorted(unknown))}; use a newer restore.py")


def text(value):
    """Bytes of a name, target or attribute."""
    return value.encode() if isinstance(value, str) else base64.b64decode(value["b64"])


class Remote:
    """A copy of everything below the prefix, as files."""

    def __init__(self, path):
        self.path = path
        self.indexes = {}  # pack -> the chunks in it, checked against its name
        with open(os.path.join(path, "ckptfs.json"), "rb") as file:
            about = json.load(file)
        check = about.pop("check")
        if about["format"] != "ckptfs" or about["version"] != 1:
            raise SystemExit("restore: ckptfs.json is of another format; use a newer restore.py")
        if blake3(canonical(about)).hexdigest() != check:
            raise SystemExit("restore: ckptfs.json is damaged")
        check_features(about)

    def object(self, kind, reference):
        """An object by its digest, or itself where it was inlined."""
        if isinstance(reference, dict):
            check_features(reference)
            return reference
        with open(os.path.join(self.path, kind, reference[:2], reference), "rb") as file:
            return unpack_object(file.read(), reference)

    def heads(self):
        """The current heads: each writer's newest, unless another's newest has merged it."""
        newest = []
        folder = os.path.join(self.path, "heads")
        for writer in sorted(os.listdir(folder)):
            names = sorted(os.listdir(os.path.join(folder, writer)))
            if not names:
                continue
            with open(os.path.join(folder, writer, names[0]), "rb") as file:
                head = unpack_object(file.read())
            if head["writer"] != writer or f"{2**64 - 1 - head['seq']:016x}" != names[0]:
                raise Damaged(f"heads/{writer}/{names[0]} is another head")
            newest.append(head)
        return [
            head
            for head in newest
            if not any(o is not head and o["vector"].get(head["writer"], 0) >= head["seq"] for o in newest)
        ]

    def pack_index(self, pack, file):
        """Which chunks a pack holds; its name is the digest of that list."""
        if pack not in self.indexes:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - 16)
            length, magic = struct.unpack("<Q8s", file.read(16))
            if magic != b"ckptpk01" or length > size - 16:
                raise Damaged(f"pack {pack} has no index")
            file.seek(size - 16 - length)
            index = unpack_object(file.read(length))
            rows = zip(index["chunks"], index["codecs"], index["bases"], index["stored"], strict=True)
            if blake3(canonical([list(row) for row in rows])).hexdigest() != pack:
                raise Damaged(f"pack {pack} holds other chunks than its name says")
            self.indexes[pack] = set(index["chunks"])
        return self.indexes[pack]

    def chunk(self, chunk, length, pack, offset, stored, codec, base=None):
        """The raw bytes of one chunk; *base* is the raw bytes of the one that it is a delta against."""
        with open(os.path.join(self.path, "packs", pack[:2], pack), "rb") as file:
            if chunk not in self.pack_index(pack, file):
                raise Damaged(f"chunk {chunk} is not in pack {pack}")
            file.seek(offset)
            data = file.read(stored)
        try:
            raw = decode(codec, data, length, base)
        except (ValueError, zstandard.ZstdError, IndexError, TypeError) as error:
            raise Damaged(f"chunk {chunk} does not decode: {error}") from error
        if len(raw) != length or blake3(raw).hexdigest() != chunk:
            raise Damaged(f"chunk {chunk} holds other bytes than its name says")
        return raw


def decode(codec, data, length, base):
    """Chunk bytes from encoded bytes; see the codec registry in docs/format.md."""
    if codec == 0:
        return data
    if codec == 1:
        return zstandard.ZstdDecompressor().decompress(data)
    if codec in (2, 3, 4):
        return join_planes({2: 2, 3: 4, 4: 8}[codec], data, length)
    if codec in (5, 6, 7, 8):
        k = {5: 1, 6: 2, 7: 4, 8: 8}[codec]
        whole = length // k * k
        raw = join_planes(k, data, length)
        folded = numpy.frombuffer(raw[:whole], f"<u{k}")
        difference = (folded >> 1) ^ -(folded & 1)
        return (difference + numpy.frombuffer(base[:whole], f"<u{k}")).tobytes() + raw[whole:]
    if codec == 9:
        bits = numpy.frombuffer(zstandard.ZstdDecompressor().decompress(data), numpy.uint8)
        return (bits ^ numpy.frombuffer(base, numpy.uint8)).tobytes()
    raise ValueError(f"unknown codec {codec}; use a newer restore.py")


def join_planes(k, data, length):
    n = length // k
    out = numpy.empty((n, k), numpy.uint8)
    at = 4 * k
    for i, size in enumerate(numpy.frombuffer(data, "<u4", k)):
        part = data[at : at + int(size)]
        at += int(size)
        out[:, i] = numpy.frombuffer(part if size == n else zstandard.ZstdDecompressor().decompress(part), numpy.uint8)
    return out.tobytes() + data[at:]


# ---------------------------------------------------------------------------------------------------- merging


class Merged:
    """The trees of all current heads as one: by directory id and name, the newest wins."""

    def __init__(self, remote, heads):
        self.remote = remote
        self.names = {}  # directory id -> name -> entry
        self.newest = {}  # file id -> the entry with its last change: content and attributes
        self.place = {}  # directory id -> (stamp, parent's id, name) of its last binding: it is in one place only
        done = set()
        waiting = [reference for head in heads for reference in head["lanes"].values()]
        while waiting:
            reference = waiting.pop()
            digest = self.digest(reference)
            if digest in done:
                continue
            done.add(digest)
            try:
                tree = remote.object("trees", reference)
            except (OSError, Damaged) as error:
                fail(f"tree {digest}", error)
                continue
            waiting += tree.get("parts", [])
            for entry in tree.get("entries", []):
                try:
                    self.add(tree["id"], entry)
                except Damaged as error:
                    fail(f"tree {digest}", error)
                    continue
                if "tree" in entry:
                    waiting.append(entry["tree"])

    @staticmethod
    def digest(reference):
        return blake3(canonical(reference)).hexdigest() if isinstance(reference, dict) else reference

    @staticmethod
    def binding(entry):
        changed = entry.get("changed", 0) if "tree" not in entry else 0
        return max(entry["stamp"], changed), entry.get("id", "")

    def version(self, entry):
        return (
            entry["changed"], entry["ctime"], entry["mtime"], entry["size"], entry["mode"], entry["uid"], entry["gid"],
            self.digest(entry.get("manifest", "")), text(entry.get("target", "")),
            [(text(name), text(value)) for name, value in entry.get("xattrs", [])],
        )  # fmt: skip

    def add(self, directory, entry):
        name = text(entry["name"])
        if not name or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise Damaged(f"{name!r} is not a name")
        names = self.names.setdefault(directory, {})
        if name not in names or self.binding(names[name]) < self.binding(entry):
            names[name] = entry
        if "id" not in entry:
            return
        known = self.newest.get(entry["id"])
        if known is None or self.version(known) < self.version(entry):
            self.newest[entry["id"]] = entry
        if "tree" in entry:
            place = (entry["stamp"], directory, name)
            self.place[entry["id"]] = max(place, self.place.get(entry["id"], place))

    def live(self, directory):
        """(name, entry with content and attributes) of what *directory* holds, tombstones left out."""
        for name, entry in sorted(self.names.get(directory, {}).items()):
            if "id" not in entry:
                continue
            if "tree" in entry and self.place[entry["id"]][1:] != (directory, name):
                continue  # renamed to elsewhere by another writer
            yield name, self.newest[entry["id"]]

    def loops(self, visited):
        """Directories that two writers moved into each other: no path leads there from the root."""
        for directory in self.place.keys() - visited:
            above = [directory]
            while above[-1] not in visited:
                _, parent, name = self.place[above[-1]]
                if self.names[parent][name].get("id") != above[-1]:
                    break  # removed
                if parent in above:
                    yield directory, name
                    break
                above.append(parent)


# ---------------------------------------------------------------------------------------------------- writing


def write_file(remote, path, entry):
    manifest = remote.object("manifests", entry["manifest"])
    if manifest["size"] != entry["size"]:
        raise Damaged("its manifest has another size")
    holes = dict(manifest["holes"])
    with open(path, "xb") as file:
        file.truncate(manifest["size"])  # what is not written is a hole
        at = 0
        based = {}  # what deltas are against -> where it lies
        if "based" in manifest:
            columns = ("chunks", "pack", "offsets", "stored", "codecs")
            for chunk, pack, *place in zip(*(manifest["based"][c] for c in columns), strict=True):
                based[chunk] = manifest["packs"][pack], *place
        columns = ("chunks", "lengths", "pack", "offsets", "stored", "codecs", "bases")
        for chunk, length, pack, offset, stored, codec, base in zip(*(manifest[c] for c in columns), strict=True):
            at = holes.get(at, at)
            file.seek(at)
            before = None if base is None else remote.chunk(base, length, *based[base])
            file.write(remote.chunk(chunk, length, manifest["packs"][pack], offset, stored, codec, before))
            at += length
        if holes.get(at, at) != manifest["size"]:
            raise Damaged("its chunks do not fill it")


def set_attributes(path, entry):
    for what, action in (
        ("owner", lambda: os.chown(path, entry["uid"], entry["gid"], follow_symlinks=False)),
        ("mode", lambda: stat.S_ISLNK(entry["mode"]) or os.chmod(path, stat.S_IMODE(entry["mode"]))),
        *(
            (f"attribute {name}", lambda n=name, v=value: os.setxattr(path, text(n), text(v), follow_symlinks=False))
            for name, value in entry.get("xattrs", [])
        ),
        ("times", lambda: os.utime(path, ns=(entry["atime"], entry["mtime"]), follow_symlinks=False)),
    ):
        try:
            action()
        except OSError as error:
            if what != "owner" or os.geteuid() == 0:
                warn(os.fsdecode(path), f"{what}: {error.strerror}")


def make(remote, path, entry):
    kind = stat.S_IFMT(entry["mode"])
    if kind == stat.S_IFREG:
        try:
            write_file(remote, path, entry)
        except BaseException:
            if os.path.lexists(path):
                os.unlink(path)
            raise
    elif kind == stat.S_IFDIR:
        os.mkdir(path)
    elif kind == stat.S_IFLNK:
        os.symlink(text(entry["target"]), path)
    else:
        os.mknod(path, kind | 0o600, entry.get("rdev", 0))


def restore(remote, target):
    merged = Merged(remote, remote.heads())
    os.makedirs(target, exist_ok=True)
    if os.listdir(target):
        raise SystemExit(f"restore: {target} is not empty")
    made = {}  # file id -> path: further names are hard links
    visited = {ROOT}
    directories = []
    waiting = [(ROOT, os.fsencode(target))]
    while waiting:
        directory, folder = waiting.pop()
        for name, entry in merged.live(directory):
            path = os.path.join(folder, name)
            try:
                if stat.S_ISDIR(entry["mode"]):
                    if entry["id"] in visited:
                        continue
                    visited.add(entry["id"])
                    make(remote, path, entry)
                    directories.append((path, entry))
                    waiting.append((entry["id"], path))
                elif entry["id"] in made:
                    os.link(made[entry["id"]], path, follow_symlinks=False)
                else:
                    make(remote, path, entry)
                    made[entry["id"]] = path
                    set_attributes(path, entry)
            except (OSError, Damaged, KeyError, ValueError) as error:
                fail(os.fsdecode(path), error)
    for directory, name in merged.loops(visited):
        fail(os.fsdecode(name), f"directory {directory} was moved into itself by two writers at once; left out")
    for path, entry in reversed(directories):  # last, as making what is inside changes their times
        set_attributes(path, entry)


def main():
    if len(sys.argv) != 3:
        raise SystemExit("usage: restore.py COPY TARGET")
    try:
        restore(Remote(sys.argv[1]), sys.argv[2])
    except (OSError, Damaged) as error:
        fail(sys.argv[1], error)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
