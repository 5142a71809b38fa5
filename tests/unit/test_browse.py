"""Looking into a remote without mounting: admission, finding it in a URL, and the merged view of its heads."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ckptfs.encoding.canonical import object_id, seal_object
from ckptfs.encoding.head import Head, encode_head, head_key
from ckptfs.encoding.keys import FORMAT_KEY, tree_key
from ckptfs.encoding.tree import Entry, Tree, encode_tree, split_tree
from ckptfs.errors import NameMissing, NotDirectory, RemoteUnusable
from ckptfs.ids import ROOT_FILE_ID, FileId, ObjectId, Stamp, WriterId
from ckptfs.remote.directory import DirectoryStore
from ckptfs.replica.admission import admit
from ckptfs.replica.browse import RemoteView, find_remote

A, B = WriterId(b"a" * 16), WriterId(b"b" * 16)
CONTENT = ObjectId(b"m" * 32)


def file_id(number: int) -> FileId:
    return FileId(number.to_bytes(16, "big"))


def file(name: bytes, number: int, stamp: int, size: int = 1, changed: int | None = None) -> Entry:
    return Entry(name, Stamp(stamp), file_id(number), stat.S_IFREG | 0o644, size=size,
                 changed=Stamp(stamp if changed is None else changed), manifest=CONTENT)  # fmt: skip


class Writing:
    """Puts trees and heads of any shape."""

    def __init__(self, directory: Path) -> None:
        self.remote = DirectoryStore(str(directory))
        admit(self.remote, create=True)

    def directory(self, name: bytes, number: int, stamp: int, *entries: Entry, inline: bool = False) -> Entry:
        body = encode_tree(Tree(file_id(number), tuple(sorted(entries, key=lambda entry: entry.name))))
        digest = object_id(body)
        if not inline:
            self.remote.put(tree_key(digest), seal_object(body))
        return Entry(name, Stamp(stamp), file_id(number), stat.S_IFDIR | 0o755, changed=Stamp(stamp),
                     tree=digest, tree_body=body if inline else None)  # fmt: skip

    def head(self, writer: WriterId, seq: int, *entries: Entry, **fields: dict[WriterId, int]) -> None:
        tree = Tree(ROOT_FILE_ID, tuple(sorted(entries, key=lambda entry: entry.name)))
        for digest, body in split_tree(tree, 3):
            self.remote.put(tree_key(digest), seal_object(body))
        head = Head(writer, seq, {"": (digest, None)}, **fields)
        self.remote.put(head_key(writer, seq), seal_object(encode_head(head)))

    def seen(self) -> dict[bytes, int]:
        return {path: entry.size for path, entry in RemoteView(self.remote).walk(b"/")}


@pytest.fixture
def writing(tmp_path: Path) -> Writing:
    return Writing(tmp_path / "remote")


def test_an_empty_remote_shows_nothing(writing: Writing) -> None:
    """No head: an empty root, and nothing below."""
    view = RemoteView(writing.remote)
    assert view.heads == [] and view.entries(b"/") == [] and list(view.walk(b"")) == []
    with pytest.raises(NameMissing):
        view.entries(b"/exp")


def test_the_newest_head_of_a_writer_is_shown(writing: Writing) -> None:
    """Names, sizes, split and inlined directories, a file by its own path; older heads do not show."""
    writing.head(A, 1, file(b"old", 9, 1))
    exp = writing.directory(b"exp", 2, 5, file(b"model", 3, 5, 100), writing.directory(b"sub", 4, 5, inline=True))
    writing.head(A, 2, exp, *(file(b"log%d" % number, 10 + number, 6) for number in range(7)))
    seen = writing.seen()
    assert seen.pop(b"exp/model") == 100
    assert sorted(seen) == [b"exp", b"exp/sub", *(b"log%d" % number for number in range(7))]
    view = RemoteView(writing.remote)
    assert [entry.name for entry in view.entries(b"exp/")] == [b"model", b"sub"]
    assert [entry.size for entry in view.entries(b"/exp/model")] == [100]
    assert view.entries(b"exp/sub") == []
    with pytest.raises(NameMissing, match="exp/none"):
        view.entries(b"exp/none")
    with pytest.raises(NotDirectory, match="model"):
        view.entries(b"exp/model/x")


def test_several_writers_are_merged_by_name(writing: Writing) -> None:
    """The newer binding wins, a tombstone hides what is older, and a shared directory has what each put there."""
    shared = (file(b"a", 11, 5), file(b"both", 12, 5, 1))
    writing.head(A, 1, writing.directory(b"d", 2, 1, *shared), file(b"gone", 3, 4), file(b"back", 4, 9))
    writing.head(
        B, 1,
        writing.directory(b"d", 2, 1, file(b"b", 21, 6), file(b"both", 22, 7, 2)),
        Entry(b"gone", Stamp(8)), Entry(b"back", Stamp(8)),
    )  # fmt: skip
    seen = writing.seen()
    assert sorted(seen) == [b"back", b"d", b"d/a", b"d/b", b"d/both"]
    assert seen[b"d/both"] == 2


def test_additions_follow_a_renamed_directory(writing: Writing) -> None:
    """B renamed x to y while A added to it: everything is in y, and x is gone."""
    writing.head(A, 1, writing.directory(b"x", 2, 1, file(b"one", 3, 2), file(b"late", 4, 9)))
    writing.head(B, 1, Entry(b"x", Stamp(5)), writing.directory(b"y", 2, 5, file(b"one", 3, 2)))
    assert sorted(writing.seen()) == [b"y", b"y/late", b"y/one"]


def test_a_directory_renamed_twice_at_once_has_one_place(writing: Writing) -> None:
    """Both renamed x: the later rename wins, nothing is shown twice."""
    writing.head(A, 1, Entry(b"x", Stamp(5)), writing.directory(b"y", 2, 5, file(b"one", 3, 2)))
    writing.head(B, 1, Entry(b"x", Stamp(6)), writing.directory(b"z", 2, 6, file(b"one", 3, 2)))
    assert sorted(writing.seen()) == [b"z", b"z/one"]


def test_a_file_has_its_newest_content_under_any_name(writing: Writing) -> None:
    """A renamed the file, B wrote to it later: the new name has the new content."""
    writing.head(A, 1, Entry(b"old", Stamp(9)), file(b"new", 3, 9, size=1, changed=2))
    writing.head(B, 1, file(b"old", 3, 1, size=50, changed=7))
    assert writing.seen() == {b"new": 50}


def test_a_covered_head_is_not_merged_again(writing: Writing) -> None:
    """B merged A's head and dropped the tombstone: A's old tree does not bring the name back."""
    writing.head(A, 1, file(b"gone", 3, 4), file(b"kept", 4, 4))
    writing.head(B, 1, file(b"kept", 4, 4), vector={A: 1})
    assert sorted(writing.seen()) == [b"kept"]


def test_a_remote_is_found_in_a_longer_url(writing: Writing, tmp_path: Path) -> None:
    """The longest prefix with a ckptfs.json is the remote, the rest the path in it; nothing is created on the way."""
    (tmp_path / "remote with space").mkdir()
    found, inside = find_remote(f"file://{tmp_path}/remote/exp/model")
    assert (found.url, inside) == (writing.remote.url, b"/exp/model")
    assert find_remote(writing.remote.url)[1] == b"/"
    for url in (f"file://{tmp_path}", f"file://{tmp_path}/none/x", "gs://b/x", "nonsense"):
        with pytest.raises(RemoteUnusable):
            find_remote(url)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["remote", "remote with space"]


def test_admission_creates_once_and_refuses_what_is_not_ours(tmp_path: Path) -> None:
    """An empty place becomes a remote; the second time it is the same one; another's data, damage: refused."""
    remote = DirectoryStore(str(tmp_path / "new"))
    with pytest.raises(RemoteUnusable, match="nothing was ever replicated"):
        admit(remote, create=False)
    first = admit(remote, create=True)
    assert admit(remote, create=True) == first == admit(remote, create=False)
    remote.put(FORMAT_KEY, b"{}")
    with pytest.raises(RemoteUnusable, match="not one of ours"):
        admit(remote, create=True)
    other = DirectoryStore(str(tmp_path / "other"))
    other.put("data/set.bin", b"1")
    with pytest.raises(RemoteUnusable, match=r"data/set\.bin"):
        admit(other, create=True)
