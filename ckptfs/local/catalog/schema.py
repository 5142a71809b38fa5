"""The catalog's tables, and the migrations that lead to them.

`PRAGMA user_version` is the schema version. A migration is a function from one version to the next, run in one
transaction; a version newer than this program knows is refused.

Conventions: names are BLOBs; times are ns since 1970; digests are 32-byte BLOBs; stamps are `ids.Stamp`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from ckptfs.errors import StoreError

_V1 = """
-- Small facts about this store: clock, own sequence, machine identity ...
CREATE TABLE setting (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;

-- Writers that this store has met. id 1 is this store.
CREATE TABLE writer (id INTEGER PRIMARY KEY, uuid BLOB NOT NULL UNIQUE);

CREATE TABLE inode (
    ino      INTEGER PRIMARY KEY,            -- 1 is the root
    file_id  BLOB NOT NULL UNIQUE,           -- FileId: the same on every machine
    mode     INTEGER NOT NULL,               -- with the S_IFMT bits
    uid      INTEGER NOT NULL,
    gid      INTEGER NOT NULL,
    rdev     INTEGER NOT NULL DEFAULT 0,
    nlink    INTEGER NOT NULL,               -- names of it; a directory has 2 + its subdirectories; 0 = removed
    size     INTEGER NOT NULL DEFAULT 0,     -- of a sealed file; an unsealed one has its image's
    atime_ns INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,               -- of a sealed file or a directory; an unsealed file has its image's
    ctime_ns INTEGER NOT NULL,               -- of an unsealed file: the later of this and its image's
    target   BLOB,                           -- of a symbolic link
    image    INTEGER,                        -- local bytes of a regular file; NULL when none are here
    manifest INTEGER,                        -- sealed content; NULL while unsealed; never NULL together with image
    changed  INTEGER NOT NULL,               -- stamp of the last change of content or attributes
    dirty    INTEGER NOT NULL DEFAULT 0,     -- directories: 0 `tree` is right, 1 merged since, 2 changed here since
    expanded INTEGER NOT NULL DEFAULT 1,     -- directories: 0 while rows of `source` wait to be merged into it
    tree     BLOB,                           -- directories: digest of the tree object with its entries (dirty = 0)
    tree_body BLOB                           -- that tree's canonical JSON where it is inlined, else NULL
);
CREATE INDEX inode_orphan ON inode (nlink) WHERE nlink = 0;
CREATE INDEX inode_dirty ON inode (dirty) WHERE dirty > 0;
CREATE INDEX inode_image ON inode (image) WHERE image IS NOT NULL;
CREATE INDEX inode_manifest ON inode (manifest) WHERE manifest IS NOT NULL;

CREATE TABLE dirent (
    parent        INTEGER NOT NULL,
    name          BLOB NOT NULL,
    ino           INTEGER,                   -- NULL: a tombstone
    stamp         INTEGER NOT NULL,          -- when the name was bound to this inode, or removed
    origin_writer INTEGER,                   -- the head by which this entry, as it is, was published or learned,
    origin_seq    INTEGER,                   --   NULL: it was changed here and is not yet in an acknowledged head
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE INDEX dirent_ino ON dirent (ino) WHERE ino IS NOT NULL;
CREATE INDEX dirent_pending ON dirent (parent) WHERE origin_seq IS NULL;

CREATE TABLE xattr (
    ino INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (ino, name)
) WITHOUT ROWID;

-- One row per file in images/. Whole: 1 every byte of the file version is in it, 0 not; -1 it is to be deleted.
CREATE TABLE image (id INTEGER PRIMARY KEY, whole INTEGER NOT NULL);

CREATE TABLE manifest (
    id     INTEGER PRIMARY KEY,
    body   BLOB,                             -- encoding.manifest.Content, encoded; NULL until fetched
    size   INTEGER NOT NULL,                 -- of the file, bytes
    digest BLOB,                             -- of the remote object; NULL until published
    remote_body BLOB                         -- the remote object's canonical JSON where it is inlined, else NULL
);
CREATE INDEX manifest_digest ON manifest (digest) WHERE digest IS NOT NULL;

-- Where a chunk lies on this disk. Invariant 1 of the design: hashed there, flushed, and then this row.
CREATE TABLE location (
    chunk BLOB NOT NULL, image INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (chunk, image, offset)
) WITHOUT ROWID;
CREATE INDEX location_image ON location (image, offset);

-- Packs on the remote, and where in them a chunk lies.
CREATE TABLE pack (
    id    INTEGER PRIMARY KEY,
    name  BLOB NOT NULL UNIQUE,              -- ObjectId
    state INTEGER NOT NULL,                  -- 1 acknowledged, 2 verified; 0 damaged, and was sent again in others,
                                             --   3 a reader did not find in it what should be there
    head  INTEGER                            -- own head that first named it; NULL while none has; 0 learned from others
);
CREATE TABLE packed (
    chunk      BLOB PRIMARY KEY,
    pack       INTEGER NOT NULL,
    offset     INTEGER NOT NULL,             -- in the pack object
    length     INTEGER NOT NULL,             -- encoded
    raw_length INTEGER NOT NULL,
    codec      INTEGER NOT NULL,
    base       BLOB                          -- ChunkId of a delta's base, else NULL
) WITHOUT ROWID;
CREATE INDEX packed_pack ON packed (pack);

-- A cut: the state of a lane at one moment, kept until it is published. At most one is being published and one pending.
CREATE TABLE cut (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    taken_ns   INTEGER NOT NULL,
    stamp      INTEGER NOT NULL,
    publishing INTEGER NOT NULL DEFAULT 0,
    incomplete INTEGER NOT NULL DEFAULT 0,   -- taken although something in it was not whole (max_lag)
    vector     BLOB NOT NULL                 -- what of other writers the state has merged: JSON, writer hex -> sequence
);
CREATE TABLE cut_dir (
    cut       INTEGER NOT NULL,
    dir       INTEGER NOT NULL,
    file_id   BLOB NOT NULL,                 -- the directory may be gone when the cut is published
    tree      BLOB,                          -- inode.tree and tree_body when the cut was taken: what was published of
    tree_body BLOB,                          --   the directory before
    PRIMARY KEY (cut, dir)
) WITHOUT ROWID;
CREATE TABLE cut_entry (
    cut       INTEGER NOT NULL,
    dir       INTEGER NOT NULL,
    name      BLOB NOT NULL,
    ino       INTEGER,                       -- NULL: a tombstone
    image     INTEGER,                       -- regular files: local bytes at the cut; NULL when they are published
    manifest  INTEGER,                       -- regular files: filled in when the image is sealed
    stamp     INTEGER NOT NULL,              -- dirent.stamp at the cut
    changed   INTEGER NOT NULL,              -- inode.changed at the cut; 0 for a tombstone
    kept      INTEGER NOT NULL,              -- 1: unfinished, what the directory's earlier tree says of it stays
    file_id BLOB, mode INTEGER, uid INTEGER, gid INTEGER, rdev INTEGER, size INTEGER, -- these as in inode; NULL for a
    mtime_ns INTEGER, ctime_ns INTEGER, atime_ns INTEGER, target BLOB,                --   tombstone
    tree      BLOB,                          -- directories: what was published last, used where the directory itself
    tree_body BLOB,                          --   is not in the cut
    xattrs    BLOB,                          -- JSON array of [name, value] in hex, ordered by name; NULL: none
    PRIMARY KEY (cut, dir, name)
) WITHOUT ROWID;
CREATE INDEX cut_entry_image ON cut_entry (image) WHERE image IS NOT NULL;
CREATE INDEX cut_entry_manifest ON cut_entry (manifest) WHERE manifest IS NOT NULL;

-- Heads: our own from before the first PUT on, others' newest as far as we followed them.
CREATE TABLE head (
    writer INTEGER NOT NULL,
    seq    INTEGER NOT NULL,
    body   BLOB NOT NULL,                    -- the object's bytes, to be put again unchanged
    acked  INTEGER NOT NULL,                 -- others' heads: 1
    PRIMARY KEY (writer, seq)
) WITHOUT ROWID;

-- Per directory and writer: the tree that this writer's newest followed head has for it.
CREATE TABLE source (
    dir    INTEGER NOT NULL,
    writer INTEGER NOT NULL,
    seq    INTEGER NOT NULL,
    digest BLOB NOT NULL,
    body   BLOB,                             -- the tree's canonical JSON where it was inlined
    merged INTEGER NOT NULL,                 -- 0: still to be merged into the directory
    PRIMARY KEY (dir, writer)
) WITHOUT ROWID;

-- Directories that were here and are gone: when another writer still shows one under a name that was taken since, it is
-- known and not new. 16 bytes each.
CREATE TABLE removed_dir (file_id BLOB PRIMARY KEY) WITHOUT ROWID;
"""


_V2 = """
-- What was replaced by an image that was not flushed yet; see local/catalog/replaced.py.
CREATE TABLE replaced (
    old    INTEGER NOT NULL,                 -- the inode that has, or had, the version that was replaced
    image  INTEGER NOT NULL,                 -- of the new version
    parent INTEGER,                          -- the name that was renamed over
    name   BLOB                              --   (NULL: the file was emptied and is written anew)
);
CREATE INDEX replaced_old ON replaced (old);
CREATE INDEX replaced_image ON replaced (image);
CREATE INDEX replaced_name ON replaced (parent, name);

-- 1: a flush of the image failed, and what is in it is in doubt for ever.
ALTER TABLE image ADD COLUMN poisoned INTEGER NOT NULL DEFAULT 0;
"""

_V3 = """
-- What the deltas of a series are against; see local/catalog/keyframes.py.
CREATE TABLE keyframe (
    key    BLOB PRIMARY KEY,                 -- of a piece of a tensor in a series
    chunk  BLOB NOT NULL,                    -- ChunkId
    stored INTEGER NOT NULL,                 -- encoded bytes of it and of every delta since
    count  INTEGER NOT NULL                  -- how many chunks that were
) WITHOUT ROWID;
CREATE INDEX packed_base ON packed (base) WHERE base IS NOT NULL;

-- Chunks that a sealed file's image gave up, since another image has them; see local/catalog/reclaims.py.
CREATE TABLE reclaimed (chunk BLOB NOT NULL, image INTEGER NOT NULL, PRIMARY KEY (chunk, image)) WITHOUT ROWID;
CREATE INDEX reclaimed_image ON reclaimed (image);
"""


def _run(statements: str) -> Callable[[sqlite3.Connection], None]:
    def migration(db: sqlite3.Connection) -> None:
        for statement in statements.split(";\n"):
            if statement.strip():
                db.execute(statement)

    return migration


_V4 = """
CREATE INDEX pack_doubted ON pack (id) WHERE state = 3;
"""

MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_run(_V1), _run(_V2), _run(_V3), _run(_V4))
VERSION = len(MIGRATIONS)


def migrate(db: sqlite3.Connection) -> None:
    """Bring *db* to `VERSION`.

    Raises StoreError when a newer ckptfs wrote it.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise StoreError(
            f"this store's catalog has version {version}, this ckptfs knows up to {VERSION}: install a newer ckptfs"
        )
    for number in range(version, VERSION):
        db.execute("BEGIN IMMEDIATE")
        try:
            MIGRATIONS[number](db)
            db.execute(f"PRAGMA user_version = {number + 1}")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
