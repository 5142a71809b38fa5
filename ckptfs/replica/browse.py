"""Looking into a remote without a store and without mounting: the state that its current heads show together.

Read-only, blocking, and nothing is kept. A mount merges the same heads into its catalog; this does it in memory. With
one current head only the directories on the way are fetched. With several, every tree of each is read once, because a
directory that one writer renamed may have got new entries from another under its old name. What a mount saves from a
directory that one writer removed while another added to it (`conflicts`) is not shown here until a mount published it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit, urlunsplit

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import Head, current_heads, open_head
from ckptfs.encoding.keys import FORMAT_KEY, HEADS, tree_key
from ckptfs.encoding.tree import Entry, Tree, decode_tree, join_parts
from ckptfs.errors import NameMissing, NotDirectory, RemoteForbidden, RemoteUnusable
from ckptfs.ids import ROOT_FILE_ID, FileId, ObjectId
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.open import canonical_url, open_remote
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.replica.admission import admit
from ckptfs.replica.entries import entry_weight

LIMITS = Limits(attempts=4, deadline_s=30.0)
"""Somebody waits at a prompt: a remote that is down is told soon."""


def find_remote(url: str) -> tuple[ObjectStore, bytes]:
    """The remote that *url* lies in, and the path in it: the longest prefix of *url* that has a ckptfs.json.

    Raises RemoteUnusable when none has, and whatever the store raises.
    """
    parts = urlsplit(url)
    names = [name for name in parts.path.split("/") if name]
    forbidden: RemoteForbidden | None = None
    canonical_url(url)  # says what is wrong with it
    for length in range(len(names), -1, -1):
        above = "/" + "/".join(names[:length])
        if parts.scheme == "file" and not os.path.isfile(os.path.join(unquote(above), FORMAT_KEY)):
            continue  # opening a directory would create it
        remote = Retrying(open_remote(urlunsplit((parts.scheme, parts.netloc, above, "", ""))), LIMITS)
        try:
            if remote.size(FORMAT_KEY) is not None:
                inside = unquote("/".join(names[length:])) if parts.scheme == "file" else "/".join(names[length:])
                return remote, b"/" + os.fsencode(inside)
        except RemoteForbidden as error:
            forbidden = forbidden or error  # these credentials may be confined to a longer prefix
    if forbidden is not None:
        raise forbidden
    if parts.scheme == "s3":
        Retrying(open_remote(url), LIMITS).list("", limit=1)  # says so when there is no such bucket, or no S3 at all
    raise RemoteUnusable(f"{url}: no remote of ckptfs here (no {FORMAT_KEY})")


class RemoteView:
    """What the current heads of *remote* show, from the moment of construction on.

    Raises RemoteError and FormatError as it fetches.
    """

    def __init__(self, remote: ObjectStore) -> None:
        admit(remote, create=False)
        self._remote = remote
        self.heads = _read_heads(remote)
        self._trees: dict[FileId, dict[ObjectId, bytes | None]] = {}  # every known tree of a directory
        self._newest: dict[FileId, Entry] = {}  # several heads: who has a file's content and attributes
        self._places: dict[FileId, Entry] = {}  # several heads: a directory's last binding; it has one place
        for head in self.heads:
            for name, body in head.lanes.values():
                self._trees.setdefault(self._tree(name, body).file_id, {})[name] = body
        if len(self.heads) > 1:
            self._gather()

    def entries(self, path: bytes) -> list[Entry]:
        """The entries of directory *path*, by name; of anything else, its own entry alone.

        Raises NameMissing and NotDirectory.
        """
        directory, entry = self._find(path)
        return [entry] if entry is not None and not stat.S_ISDIR(entry.mode) else self._entries(directory)

    def walk(self, path: bytes) -> Iterator[tuple[bytes, Entry]]:
        """Everything below *path*, parents first, as (path below *path*, entry)."""
        directory, entry = self._find(path)
        if entry is not None and not stat.S_ISDIR(entry.mode):
            yield entry.name, entry
            return
        waiting = [(b"", directory)]
        seen: set[FileId] = set()
        while waiting:
            above, directory = waiting.pop()
            if directory in seen:  # a directory is in one place: whoever wrote it into several means harm
                continue
            seen.add(directory)
            below = []
            for entry in self._entries(directory):
                yield above + entry.name, entry
                if stat.S_ISDIR(entry.mode) and entry.file_id is not None:
                    below.append((above + entry.name + b"/", entry.file_id))
            waiting += reversed(below)

    def _find(self, path: bytes) -> tuple[FileId, Entry | None]:
        """The id of the directory at *path*, and its entry unless it is the root; of a file, its parent's id."""
        directory, entry = ROOT_FILE_ID, None
        for name in path.split(b"/"):
            if not name:
                continue
            if entry is not None and not stat.S_ISDIR(entry.mode):
                raise NotDirectory(f"{entry.name.decode(errors='replace')} is not a directory")
            entry = next((each for each in self._entries(directory) if each.name == name), None)
            if entry is None or entry.file_id is None:
                raise NameMissing(f"{self._remote.url} has no {path.decode(errors='replace')}")
            if stat.S_ISDIR(entry.mode):
                directory = entry.file_id
        return directory, entry

    def _entries(self, directory: FileId) -> list[Entry]:
        """The live entries of *directory*, merged by name as `entries` says."""
        merged: dict[bytes, Entry] = {}
        for name, body in self._trees.get(directory, {}).items():
            for entry in self._tree(name, body).entries:
                if entry.name not in merged or _weight(merged[entry.name]) < _weight(entry):
                    merged[entry.name] = entry
        live = []
        for key in sorted(merged):
            entry = merged[key]
            if entry.file_id is None:
                continue
            if stat.S_ISDIR(entry.mode):
                if self._places.get(entry.file_id, entry).binding > entry.binding:
                    continue  # moved elsewhere by a later rename
                if len(self.heads) == 1 and entry.tree is not None:
                    self._trees[entry.file_id] = {entry.tree: entry.tree_body}
            live.append(_with_content(entry, self._newest.get(entry.file_id, entry)))
        return live

    def _gather(self) -> None:
        seen: set[ObjectId] = set()
        waiting = [reference for trees in self._trees.values() for reference in trees.items()]
        while waiting:
            name, body = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for entry in self._tree(name, body).entries:
                if entry.file_id is None:
                    continue
                known = self._newest.get(entry.file_id)
                if known is None or known.version < entry.version:
                    self._newest[entry.file_id] = entry
                if entry.tree is None:
                    continue
                placed = self._places.get(entry.file_id)
                if placed is None or placed.binding < entry.binding:
                    self._places[entry.file_id] = entry
                self._trees.setdefault(entry.file_id, {})[entry.tree] = entry.tree_body
                waiting.append((entry.tree, entry.tree_body))

    def _tree(self, name: ObjectId, body: bytes | None) -> Tree:
        tree = decode_tree(self._fetch(name) if body is None else body)
        if isinstance(tree, Tree):
            return tree
        return join_parts(tree, [decode_tree(self._fetch(part)) for part in tree.parts])

    def _fetch(self, name: ObjectId) -> bytes:
        return open_object(self._remote.get(tree_key(name)), name)


def _read_heads(remote: ObjectStore) -> list[Head]:
    newest = []
    for writer in remote.list_folders(HEADS):
        listing = remote.list(f"{HEADS}{writer}/", limit=1)  # sequences are inverted: the first is the newest
        newest += [open_head(remote.get(found.key), found.key) for found in listing.objects]
    return current_heads(newest)


def _weight(entry: Entry) -> tuple[int, bytes]:
    return entry_weight(entry), entry.file_id or b""


def _with_content(entry: Entry, newest: Entry) -> Entry:
    """*entry*'s name and place with the content and attributes of *newest*, which is of the same file."""
    if newest is entry:
        return entry
    return Entry(
        entry.name, entry.stamp, newest.file_id, newest.mode, newest.uid, newest.gid, newest.rdev, newest.size,
        newest.mtime_ns, newest.ctime_ns, newest.atime_ns, newest.changed, newest.target, newest.xattrs,
        newest.manifest, newest.manifest_body, newest.tree, newest.tree_body,
    )  # fmt: skip
