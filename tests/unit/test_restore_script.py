"""docs/restore.py, which shares no code with ckptfs, restores what the encoders wrote."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from ckptfs.encoding import canonical, codec, keys
from ckptfs.encoding.head import Head, encode_head
from ckptfs.encoding.manifest import Chunk, Content, Manifest, Placed, encode_manifest
from ckptfs.encoding.pack import PackBuilder
from ckptfs.encoding.remote_format import RemoteFormat, encode_remote_format
from ckptfs.encoding.tree import Entry, Tree, split_tree
from ckptfs.ids import ROOT_FILE_ID, ChunkId, FileId, ObjectId, Stamp, WriterId, digest
from tests.support.hostile import NOW, ROOT, HostileRemote, entry, ident

SCRIPT = Path(__file__).parents[2] / "docs" / "restore.py"
A, B = WriterId(b"A" * 16), WriterId(b"B" * 16)
T = 1_700_000_000_123_456_789


class Copy:
    """A remote's objects as files, written with the encoders not by replication."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.put(keys.FORMAT_KEY, encode_remote_format(RemoteFormat(UUID(int=1), T)))

    def put(self, key: str, data: bytes | bytearray) -> None:
        path = self.path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def file(self, name: bytes, parts: list[bytes | int], inline: bool = False, **more: object) -> Entry:
        """A regular file of chunks (bytes) and holes (lengths), float32 where it divides."""
        builder = PackBuilder()
        chunks, holes, at = [], [], 0
        for part in parts:
            if isinstance(part, int):
                holes.append((at, at + part))
                at += part
                continue
            chunks.append(Chunk(ChunkId(digest(part)), len(part), "float32"))
            if chunks[-1].id not in builder:
                number, data = codec.encode(part, "float32")
                builder.add(chunks[-1].id, len(part), number, data)
            at += len(part)
        pack, data, packed = builder.finish()
        self.put(keys.pack_key(pack), data)
        where = {one.id: one for one in packed}
        places = tuple(
            Placed(pack, where[c.id].offset, where[c.id].length, where[c.id].codec, None) for c in chunks
        )
        body = encode_manifest(Manifest(Content(at, tuple(holes), tuple(chunks)), places))
        manifest = canonical.object_id(body)
        if not inline:
            self.put(keys.manifest_key(manifest), canonical.seal_object(body))
        fields = {"mode": stat.S_IFREG | 0o640, "size": at, "mtime_ns": T, "changed": Stamp(1)} | more
        file_id = FileId(digest(name)[:16])
        return Entry(
            name, Stamp(1), file_id, **fields, manifest=manifest, manifest_body=body if inline else None  # type: ignore[arg-type]
        )

    def tree(self, directory: FileId, *entries: Entry, most: int = 100) -> tuple[ObjectId, bytes]:
        objects = split_tree(Tree(directory, tuple(sorted(entries, key=lambda one: one.name))), most)
        for name, body in objects:
            self.put(keys.tree_key(name), canonical.seal_object(body))
        return objects[-1]

    def folder(self, name: bytes, *entries: Entry, inline: bool = False, most: int = 100, stamp: int = 1) -> Entry:
        directory = FileId(digest(name)[:16])
        tree, body = self.tree(directory, *entries, most=most)
        if inline:
            (self.path / keys.tree_key(tree)).unlink()
        return Entry(
            name, Stamp(stamp), directory, stat.S_IFDIR | 0o751, mtime_ns=T - 5, changed=Stamp(1), tree=tree,
            tree_body=body if inline else None,
        )  # fmt: skip

    def head(self, writer: WriterId, seq: int, *entries: Entry, vector: dict[WriterId, int] | None = None) -> None:
        head = Head(writer, seq, {"": (self.tree(ROOT_FILE_ID, *entries)[0], None)}, vector or {}, time_ns=T)
        self.put(keys.head_key(writer, seq), canonical.seal_object(encode_head(head)))

    def restore(self, target: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(SCRIPT), str(self.path), str(target)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy")


FLOATS = np.random.default_rng(1).standard_normal(5000).astype("<f4").tobytes()


def test_script_stands_alone() -> None:
    """It imports numpy, zstandard, blake3 and the standard library, and nothing of ours."""
    imports = {line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith(("import ", "from "))}
    assert imports - set(sys.stdlib_module_names) == {"numpy", "zstandard", "blake3"}


def test_everything_comes_back(copy: Copy, tmp_path: Path) -> None:
    """Contents in several codecs, holes, inlined and split trees, links, pipes, odd names, modes, times, attributes."""
    plain = copy.file(b"model", [FLOATS, b"\x00" * 7 + FLOATS[:4001], b"raw"], xattrs=((b"user.x", b"\xff"),))
    sparse = copy.file(b"sparse", [1 << 20, b"data" * 2000, 1 << 20, FLOATS, 4096], inline=True)
    link = Entry(b"link", Stamp(1), FileId(b"l" * 16), stat.S_IFLNK | 0o777, mtime_ns=T, target=b"sub/\xff")
    fifo = Entry(b"fifo", Stamp(1), FileId(b"f" * 16), stat.S_IFIFO | 0o600)
    many = [copy.file(b"%03d" % number, [b"%d" % number], inline=True) for number in range(30)]
    copy.head(
        A, 3, plain, sparse, link, fifo, Entry(b"gone", Stamp(9)), copy.file(b"empty", []), copy.file(b"hole", [5000]),
        copy.folder(b"sub", replace(plain, name=b"\xff hard"), copy.folder(b"deep", inline=True), inline=True),
        copy.folder(b"many", *many, most=7),
    )  # fmt: skip
    copy.put(keys.head_key(A, 2), b"an older head is not looked at")
    target = tmp_path / "target"
    done = copy.restore(target)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(os.fsencode(target))) == [
        b"empty", b"fifo", b"hole", b"link", b"many", b"model", b"sparse", b"sub",
    ]  # fmt: skip
    assert (target / "model").read_bytes() == FLOATS + b"\x00" * 7 + FLOATS[:4001] + b"raw"
    expected = bytes(1 << 20) + b"data" * 2000 + bytes(1 << 20) + FLOATS + bytes(4096)
    assert (target / "sparse").read_bytes() == expected
    assert (target / "sparse").stat().st_blocks * 512 < 200_000
    assert (target / "hole").read_bytes() == bytes(5000) and (target / "empty").read_bytes() == b""
    model = (target / "model").stat()
    assert (stat.S_IMODE(model.st_mode), model.st_mtime_ns, model.st_nlink) == (0o640, T, 2)
    assert os.stat(os.fsencode(target) + b"/sub/\xff hard").st_ino == model.st_ino
    assert os.readlink(os.fsencode(target) + b"/link") == b"sub/\xff"
    assert (target / "link").lstat().st_mtime_ns == T and stat.S_ISFIFO((target / "fifo").stat().st_mode)
    sub = (target / "sub").stat()
    assert (stat.S_IMODE(sub.st_mode), sub.st_mtime_ns) == (0o751, T - 5)
    assert os.listdir(target / "sub" / "deep") == []
    assert [(target / "many" / f"{number:03d}").read_text() for number in range(30)] == [str(n) for n in range(30)]
    try:
        assert os.getxattr(target / "model", "user.x") == b"\xff"
    except OSError as error:  # no user attributes on this disk; the script said so above, or it would be there
        assert error.errno == 95


def test_several_writers(copy: Copy, tmp_path: Path) -> None:
    """Current heads are merged by directory id and name: renames, late additions, tombstones, newer content.

    The file that A rewrote after B had renamed it keeps both names: an edit outlives an older removal.
    """
    old = copy.file(b"old", [b"old"])
    rewritten = replace(copy.file(b"file", [b"second"]), changed=Stamp(20))
    run = copy.folder(b"run", copy.file(b"step1", [b"1"]))
    late = copy.folder(b"run", copy.file(b"step2", [b"2"]))
    # A renamed run to done, removed old and rewrote file; B, which saw only A's first head, added step2 and other.
    copy.head(A, 1, old, run, copy.file(b"file", [b"first"]))
    copy.head(
        A, 2, Entry(b"old", Stamp(10)), Entry(b"run", Stamp(11)), replace(run, name=b"done", stamp=Stamp(11)), rewritten
    )
    renamed = replace(copy.file(b"file", [b"first"]), name=b"renamed", stamp=Stamp(15))
    copy.head(B, 1, old, late, renamed, Entry(b"file", Stamp(15)), copy.file(b"other", [b"o"]), vector={A: 1})
    target = tmp_path / "target"
    done = copy.restore(target)
    assert (done.returncode, done.stderr) == (0, "")
    found = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert found == {"done/step1": "1", "done/step2": "2", "renamed": "second", "file": "second", "other": "o"}


def test_directories_moved_into_each_other(copy: Copy, tmp_path: Path) -> None:
    """Such a loop has no path from the root: it is reported, and a directory that was just removed is not."""
    x, y, z = (copy.folder(name) for name in (b"x", b"y", b"z"))
    copy.head(A, 1, copy.folder(b"x", replace(y, stamp=Stamp(5))), Entry(b"y", Stamp(5)), Entry(b"z", Stamp(5)))
    copy.head(B, 1, copy.folder(b"y", replace(x, stamp=Stamp(6))), Entry(b"x", Stamp(6)), z)
    done = copy.restore(tmp_path / "target")
    assert done.returncode == 1 and os.listdir(tmp_path / "target") == []
    assert sorted(line.split()[1] for line in done.stderr.splitlines()) == ["x:", "y:"]


def test_a_head_that_covers_another_replaces_it(copy: Copy, tmp_path: Path) -> None:
    """What a merged head dropped does not come back from the head that it covers."""
    copy.head(A, 5, copy.file(b"dropped", [b"x"]))
    copy.head(B, 1, copy.file(b"kept", [b"y"]), vector={A: 5})
    assert copy.restore(tmp_path / "target").returncode == 0
    assert os.listdir(tmp_path / "target") == ["kept"]


def test_damage_is_found(copy: Copy, tmp_path: Path) -> None:
    """A flipped byte in a pack, manifest or tree is reported, what it touches is left out, the rest is restored."""
    inner = copy.file(b"inner", [b"inner"])
    copy.head(
        A, 1, copy.file(b"chunk", [b"c" * 10]), copy.file(b"manifest", [b"m" * 10]), copy.file(b"good", [b"g" * 10]),
        copy.folder(b"dir", inner), copy.file(b"missing", [b"z"]),
    )  # fmt: skip

    def damage(key: str, at: int) -> None:
        data = bytearray((copy.path / key).read_bytes())
        data[at] ^= 1
        copy.put(key, data)

    tree = copy.folder(b"dir", inner).tree
    assert tree is not None
    damage(keys.tree_key(tree), 20)
    manifest = copy.file(b"manifest", [b"m" * 10]).manifest
    assert manifest is not None
    damage(keys.manifest_key(manifest), 20)
    for path in (copy.path / "packs").rglob("*"):
        if path.is_file() and path.read_bytes().startswith(b"c" * 10):
            damage(str(path.relative_to(copy.path)), 3)
        elif path.is_file() and path.read_bytes().startswith(b"z"):
            path.unlink()
    target = tmp_path / "target"
    done = copy.restore(target)
    assert done.returncode == 1
    assert sorted(os.listdir(target)) == ["dir", "good"] and os.listdir(target / "dir") == []
    assert len(done.stderr.splitlines()) == 4 and "Traceback" not in done.stderr


def test_unknown_formats_are_refused(copy: Copy, tmp_path: Path) -> None:
    """A remote, head or tree of the future is not restored half."""
    tree = copy.tree(ROOT_FILE_ID)[0]
    head = Head(A, 1, {"": (tree, None)}, requires=("shiny@9.9",))
    copy.put(keys.head_key(A, 1), canonical.seal_object(encode_head(head)))
    done = copy.restore(tmp_path / "target")
    assert done.returncode == 1 and "needs shiny@9.9" in done.stderr
    copy.put(keys.FORMAT_KEY, encode_remote_format(RemoteFormat(UUID(int=1), T, 2)))
    assert "another format" in copy.restore(tmp_path / "target").stderr


def test_a_hostile_remote_reaches_nothing_outside(tmp_path: Path) -> None:
    """Names that lead elsewhere, links in place of directories, loops: told and left out, and all else comes back."""
    hostile, outside, target = HostileRemote(tmp_path / "copy"), tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    harm = hostile.file(b"harm")

    def file(name: object, number: int) -> dict[str, object]:
        return entry(name, ident(number), size=4, manifest=harm)

    def folder(name: object, number: int, *entries: dict[str, object], **more: object) -> dict[str, object]:
        tree = hostile.tree(list(entries), ident(number))
        return entry(name, ident(number), 0o40755, tree=tree, **more)

    def link(name: str, number: int, **more: object) -> dict[str, object]:
        return entry(name, ident(number), 0o120777, target=str(outside), **more)

    names = ["..", ".", "", "../escaped", f"{outside}/absolute", "deep/er", "nul\0l", {"b64": "Li4vZXNjYXBlZA=="}]
    later = {"stamp": NOW + 1, "changed": NOW + 1}
    loop = folder("loop", 40, {**folder("root", 0), "id": ROOT}, folder("again", 40, file("in-loop", 41)))
    hostile.head(hostile.tree([
        *(file(name, 10 + number) for number, name in enumerate(names)),
        *(folder(name, 20 + number, file("in-it", 30 + number)) for number, name in enumerate(names)),
        link("first-a-link", 50), folder("first-a-link", 51, file("through", 52), **later),
        folder("first-a-folder", 53, file("through", 54)), link("first-a-folder", 55, **later),
        folder("both", 56, file("through", 57)), link("both-too", 56, **later),
        loop, file("good", 60), folder("sub", 61, file("..", 62), file("good", 63)),
    ]))  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(hostile.directory), str(target)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["copy", "outside", "target"] and os.listdir(outside) == []
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found >= {"good", "sub/good", "first-a-link/through"}
    assert done.stderr.count("is not a name") == 2 * len(names) + 1
