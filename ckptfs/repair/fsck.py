"""fsck: whether the catalog agrees with itself, with the images on the disk, and with what the remote lists.

`look` changes nothing, needs no lock, and works beside a mount. It reads rows, sizes and listings, not bytes: whether
those are what they were is `scrub`'s to say. `mend` needs the store for itself. Every repair is one transaction, or one
rename, so that whoever kills it finds it done or not done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from ckptfs.encoding.canonical import open_object
from ckptfs.encoding.head import decode_head, head_key
from ckptfs.encoding.keys import MANIFESTS, PACKS, TREES, object_key, pack_key, parse_object_key
from ckptfs.encoding.manifest import decode_content
from ckptfs.errors import FormatError, ObjectMissing
from ckptfs.ids import ImageId, ObjectId
from ckptfs.local.catalog.audit import Audit, ImageRow, Problem
from ckptfs.local.catalog.mending import Mending
from ckptfs.local.catalog.stock import StockHead
from ckptfs.local.images import Images
from ckptfs.local.store import Store
from ckptfs.remote.base import ObjectStore
from ckptfs.repair.findings import LOST, REPAIRED, Finding, Report

_ANEW = "begin anew with another store on the same remote; what was never sent is in images/"

_KINDS: dict[str, tuple[str, str, bool]] = {
    "database": ("the catalog file is damaged", f"SQLite's indexes are built anew; where that does not help, {_ANEW}",
                 False),
    "name": ("opening it fails", "the name, which leads nowhere, is removed", False),
    "name-published": ("opening it fails; the remote still has it", "another store on the same remote shows it", True),
    "parent": ("nobody can reach it", "the name is removed, and what it meant put into /lost+found", False),
    "xattr": ("nothing: nobody can reach them", "they are removed", False),
    "unreachable": ("nobody can open it", "it gets a name in /lost+found of the mount", False),
    "nlink": ("programs see a wrong number of links", "it is counted again", False),
    "manifest-here": ("it cannot be published, nor checked", "the file, which is whole here, is sealed again", False),
    "manifest-lost": ("the file cannot be read", "neither its bytes nor where they are is known here", True),
    "body-remote": ("the file cannot be read", "the list is fetched again from the remote", False),
    "size": ("programs see a wrong size", "the size is taken from the chunk list", False),
    "empty": ("the file cannot be read", "nothing says what was in it", True),
    "image-row": ("the file cannot be read", "opening the store makes the row again, if the image is there", False),
    "nowhere": ("the file cannot be read", "it is not on the remote, and its bytes are nowhere here", True),
    "location": ("nothing, unless these bytes are looked for there", "the rows are removed", False),
    "packed": ("these chunks would be sent again", "the rows are removed, and learned again from manifests", False),
    "cut": ("what was to be published cannot be", "what it had is cut again, as it is now", False),
    "head": ("what was published cannot be told from it", _ANEW, True),
}  # fmt: skip
"""By kind of problem: what it means to people, what a repair does, and whether nothing can be done here."""


def look(store: Path, remote: ObjectStore | None) -> Report:
    """What is wrong with *store*, and with what it needs of *remote*, which nobody need have mounted.

    Blocks. Raises StoreError when the catalog cannot be read at all, RemoteError.
    """
    report = Report()
    with Audit(store / "catalog.db") as audit:
        problems = audit.problems()
        report.findings += [_finding(problem) for problem in problems]
        if any(problem.kind == "database" for problem in problems):
            return report
        images = Images(store / "images")
        rows = list(audit.images())
        report.files = len(rows)
        for row in rows:
            report.findings += _look_at_image(audit, images, row)
        report.findings += _stray(images, audit.image_ids())
        if remote is not None:
            report.findings += _look_at_remote(audit, remote, report)
    return report


def conclude(before: Report, mended: Report, after: Report) -> Report:
    """What became of what was found *before* repairs, of which *after* does not know any more what they mended.

    *mended* is what scrubbing the images and objects concerned found.
    """
    left = {(each.where, each.what): each for each in after.findings}
    scrubbed = {each.where: each for each in mended.findings}
    for each in before.findings:
        found = scrubbed.get(each.where)
        if found is not None and found.state == LOST:
            each.state, each.repair, each.paths = LOST, found.repair, found.paths
        remains = left.pop((each.where, each.what), None)
        if remains is None and each.state != LOST:
            each.state = REPAIRED
    before.findings += left.values()
    return before


def mend(store: Store) -> None:
    """Repair what the catalog alone can; opening *store* has cleared away what a kill leaves.

    What bytes are needed for is left to `scrub`. Names and contents first: what is reconnected must be sound.
    """
    mending = Mending(store.catalog)
    for _ in range(3):  # a repair may show what was behind: a name removed, an inode without a name
        with Audit(store.catalog.path) as audit:
            problems = audit.problems()
            rows = list(audit.images())
        if not problems:
            break
        for problem in problems:
            _mend(store, mending, problem)
    mending.drop_needless_manifests()
    if problems:
        return  # sizes are not to be believed yet
    for row in rows:
        size = _size(store.images, row.image)
        if size is not None and row.located_end > size:
            mending.drop_locations_behind(row.image, size)
        if size is not None and row.manifest is not None and row.ino is not None and size > row.size:
            os.truncate(store.images.path(row.image), row.size)


def _mend(store: Store, mending: Mending, problem: Problem) -> None:
    ino, now_ns, stamp = problem.ino, time.time_ns(), store.clock.tick()
    if problem.kind in ("name", "parent") and problem.parent is not None:
        mending.drop_name(problem.parent, problem.name, stamp)
    elif problem.kind == "xattr" and ino is not None:
        mending.drop_xattrs(ino)
    elif problem.kind == "unreachable" and ino is not None:
        mending.reconnect(ino, now_ns, stamp)
    elif problem.kind == "nlink" and ino is not None:
        mending.count_links(ino)
    elif problem.kind == "manifest-here" and ino is not None:
        mending.unseal(ino, stamp)
    elif problem.kind == "body-remote" and problem.manifest is not None:
        mending.forget_body(problem.manifest)
    elif problem.kind == "size" and ino is not None and problem.manifest is not None:
        body = store.contents.manifest(problem.manifest).body
        size = decode_content(body).size if body is not None else store.contents.manifest(problem.manifest).size
        mending.set_size(ino, problem.manifest, size)
    elif problem.kind == "location" and problem.image is not None:
        store.contents.drop_locations(problem.image)
    elif problem.kind == "packed" and problem.manifest is not None:
        mending.drop_packed(problem.manifest)
    elif problem.kind == "cut" and problem.manifest is not None:
        mending.abandon_cut(problem.manifest)
    elif problem.kind == "database":
        mending.rebuild_indexes()


def _finding(problem: Problem) -> Finding:
    meaning, repair, lost = _KINDS[problem.kind]
    finding = Finding("catalog", problem.what, meaning, repair, paths=(problem.path,) if problem.path else ())
    if lost:
        finding.state = LOST
    return finding


# Images


def _look_at_image(audit: Audit, images: Images, row: ImageRow) -> Iterable[Finding]:
    where = f"image {row.image:016x}"
    path = audit.path(row.ino)
    paths = (path,) if path else ()
    size = _size(images, row.image)
    if size is None:
        if row.manifest is None:
            yield Finding(where, "its file is gone from images/", "what was saved last is lost; the file is empty",
                          "it was not sealed, and so was nowhere else", LOST, paths)  # fmt: skip
        elif audit.is_published(row.manifest):
            yield Finding(where, "its file is gone from images/", "reading the file fails",
                          "it is read from the remote", paths=paths)  # fmt: skip
        else:
            yield Finding(where, "its file is gone from images/", "reading the file fails",
                          "it was not on the remote yet, and so was nowhere else", LOST, paths)  # fmt: skip
    elif row.manifest is not None and row.ino is not None and size != row.size:
        published = audit.is_published(row.manifest)
        yield Finding(
            where, f"it has {size:,} bytes, and the file {row.size:,}",
            "programs read zeros behind its end" if size < row.size else "nothing: nobody sees the rest",
            "what is missing is put back from the remote" if published or size > row.size
            else "what is missing is put back if another file has it", paths=paths,
        )  # fmt: skip
    elif row.located_end > size:
        yield Finding(where, f"chunks are said to lie behind its end at {size:,}",
                      "nothing, unless they are looked for", "the rows are removed", paths=paths)  # fmt: skip


def _stray(images: Images, known: set[ImageId]) -> Iterable[Finding]:
    for image in set(images.ids()) - known:
        try:
            if images.status(image).st_blocks:
                yield Finding(f"image {image:016x}", "no row of the catalog names it", "a file may miss these bytes",
                              "it is moved to lost+found/ of the store, and kept for a day")  # fmt: skip
        except FileNotFoundError:
            pass


def _size(images: Images, image: ImageId) -> int | None:
    try:
        return images.status(image).st_size
    except FileNotFoundError:
        return None


# The remote


def _look_at_remote(audit: Audit, remote: ObjectStore, report: Report) -> Iterable[Finding]:
    """What the catalog believes to be there, against what the remote lists."""
    stock = audit.stock()
    packs, (manifests, trees) = stock.packs(), stock.objects()
    there = {kind: _listed(remote, kind) for kind in (PACKS, MANIFESTS, TREES)}
    report.packs, report.objects = len(packs), len(manifests) + len(trees)
    meaning = "machines that do not have these bytes cannot read the files"
    for name, least in packs.items():
        size = there[PACKS].get(name)
        if size is None:
            yield Finding(pack_key(name), "it is gone", meaning, "it is made anew from bytes that are here")
        elif size < least:
            yield Finding(pack_key(name), f"it has {size:,} bytes, and needs {least:,}", meaning,
                          "it is made anew from bytes that are here")  # fmt: skip
    for kind, names in ((MANIFESTS, manifests), (TREES, trees)):
        for name in names - there[kind].keys():
            yield Finding(object_key(kind, name), "it is gone",
                          "machines that see it for the first time cannot read it",
                          "it is made anew from the catalog")  # fmt: skip
    yield from _look_at_heads(stock.heads(), remote)


def _look_at_heads(heads: Iterable[StockHead], remote: ObjectStore) -> Iterable[Finding]:
    for each in heads:
        try:
            head = decode_head(open_object(each.body))
        except FormatError:
            continue  # a finding of its own
        key = head_key(head.writer, head.seq)
        try:
            there: bytes | None = remote.get(key)
        except ObjectMissing:
            there = None
        if there != each.body and (each.own or there is not None):
            yield Finding(key, "it is gone" if there is None else "it is damaged",
                          "other machines do not see the state that it published",
                          "its bytes, which the catalog has, are put again")  # fmt: skip


def _listed(remote: ObjectStore, kind: str) -> dict[ObjectId, int]:
    """Name and size of every object of one kind."""
    found: dict[ObjectId, int] = {}
    after = ""
    while True:
        listing = remote.list(kind, start_after=after)
        for each in listing.objects:
            try:
                found[parse_object_key(each.key)[1]] = each.size
            except FormatError:
                continue  # somebody else's
        if not listing.truncated:
            return found
        after = listing.objects[-1].key


