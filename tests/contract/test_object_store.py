"""One suite for every object store: a directory, a directory behind `Retrying`, and S3 (a real SeaweedFS)."""

from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteForbidden, RemoteUnusable
from ckptfs.remote.base import ObjectStore
from ckptfs.remote.directory import TEMPORARY, DirectoryStore
from ckptfs.remote.open import open_remote
from ckptfs.remote.retry import Limits, Retrying
from ckptfs.remote.s3 import S3Store
from tests.conftest import Bucket
from tests.support.seaweed import Seaweed


@pytest.fixture(scope="module")
def suite_bucket(seaweed: Seaweed) -> Iterator[Bucket]:
    name = seaweed.create_bucket("suite")
    yield Bucket(name, f"s3://{name}", seaweed.environment())
    seaweed.delete_bucket(name)


@pytest.fixture(params=["directory", "s3", "retrying"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store. S3 stores share a bucket, each with a prefix of its own."""
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("suite_bucket")
        return open_remote(f"{bucket.url}/runs/{tmp_path.name}", environment=bucket.environment)
    made = open_remote(f"file://{tmp_path}/remote")
    return Retrying(made, Limits(attempts=3)) if request.param == "retrying" else made


def put_all(store: ObjectStore, *keys: str) -> None:
    for key in keys:
        assert store.put(key, key.encode())


def keys_of(store: ObjectStore, prefix: str = "", **where: str | int) -> list[str]:
    return [each.key for each in store.list(prefix, **where).objects]  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 4095, 1 << 20, (5 << 20) + 1])
def test_what_is_put_is_got(store: ObjectStore, size: int) -> None:
    """An object comes back byte for byte, is verified when it was stored, and has its size."""
    data = os.urandom(size)
    assert store.put("packs/ab/x", data) is True
    assert store.get("packs/ab/x") == data
    assert store.size("packs/ab/x") == size


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_buffers(store: ObjectStore, kind: type) -> None:
    """Any buffer may be stored, and a part of one, without being copied into bytes first."""
    data = kind(bytes(range(256)) * 512)
    assert store.put("whole", data)
    assert store.put("part", memoryview(data)[100:1000])
    assert store.get("whole") == bytes(data)
    assert store.get("part") == bytes(data)[100:1000]


def test_put_replaces(store: ObjectStore) -> None:
    """A put without condition replaces what was there."""
    store.put("k", b"older and longer")
    store.put("k", b"newer")
    assert store.get("k") == b"newer"


def test_put_if_absent(store: ObjectStore) -> None:
    """A conditional put creates a key and leaves one that is taken as it was."""
    assert store.put("heads/w/1", b"first", if_absent=True)
    for _ in range(2):
        with pytest.raises(ObjectExists) as caught:
            store.put("heads/w/1", b"other", if_absent=True)
        assert caught.value.key == "heads/w/1" and not caught.value.temporary
    assert store.get("heads/w/1") == b"first"


def test_conditional_put_has_one_winner(store: ObjectStore) -> None:
    """Of many that create one key at once exactly one succeeds, and its bytes are what is stored."""
    store.put("settled", b"", if_absent=True)  # the store's ability is known
    for turn in range(2):
        gate = threading.Barrier(4)

        def create(number: int, key: str = f"race/{turn}", gate: threading.Barrier = gate) -> bool:
            gate.wait(30)
            try:
                return store.put(key, b"%d" % number, if_absent=True)
            except ObjectExists:
                return False

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(create, range(4)))
        assert won.count(True) == 1
        assert store.get(f"race/{turn}") == b"%d" % won.index(True)


def test_ranges(store: ObjectStore) -> None:
    """A range is half open; an empty one is empty; to the end when no end is given."""
    data = bytes(range(200))
    store.put("k", data)
    for start, end in [(0, 1), (0, 200), (17, 18), (199, 200), (20, 150), (5, 5), (0, 0), (200, 200)]:
        assert store.get("k", start, end) == data[start:end]
    assert store.get("k", 190) == data[190:]
    assert store.get("k", 0, None) == data


@pytest.mark.parametrize(("start", "end"), [(0, 201), (150, 300), (200, None), (200, 201), (500, 600)])
def test_ranges_beyond_the_end(store: ObjectStore, start: int, end: int | None) -> None:
    """A range that the object does not have is a lasting error, never fewer bytes."""
    store.put("k", bytes(200))
    with pytest.raises(RemoteError) as caught:
        store.get("k", start, end)
    assert not caught.value.temporary and not isinstance(caught.value, ObjectMissing)


def test_tail(store: ObjectStore) -> None:
    """The last bytes come with the object's size; a shorter object comes whole, an empty one is empty."""
    store.put("k", bytes(range(100)))
    store.put("empty", b"")
    assert store.get_tail("k", 8) == (bytes(range(92, 100)), 100)
    assert store.get_tail("k", 100) == (bytes(range(100)), 100)
    assert store.get_tail("k", 1000) == (bytes(range(100)), 100)
    assert store.get_tail("empty", 8) == (b"", 0)


def test_missing(store: ObjectStore) -> None:
    """A missing object is ObjectMissing with its key, has no size, and a folder is no object."""
    store.put("a/b/c", b"x")
    for key in ("nothing", "a/b/d", "a", "a/b", "a/b/c/d"):
        for call in (store.get, lambda key: store.get(key, 3, 5), lambda key: store.get_tail(key, 4)):
            with pytest.raises(ObjectMissing) as caught:
                call(key)
            assert caught.value.key == key and not caught.value.temporary
            assert store.url in str(caught.value) and key in str(caught.value)
        assert store.size(key) is None


def test_listing_is_in_key_order(store: ObjectStore) -> None:
    """A listing has every key that starts with the prefix, sorted, with sizes and times; nothing else."""
    keys = ["ckptfs.json", "heads/00/1", "heads/00/2", "heads/ff/1", "packs/0a/x", "packs/0a/y", "packs/0b/z", "zz"]
    put_all(store, *reversed(keys))
    listing = store.list("")
    assert [each.key for each in listing.objects] == keys and not listing.truncated
    assert [each.size for each in listing.objects] == [len(key) for key in keys]
    assert all(1.6e9 < each.modified_s < 1e10 for each in listing.objects)
    assert keys_of(store, "heads/") == keys[1:4]
    assert keys_of(store, "heads/00/") == keys[1:3]
    assert keys_of(store, "pa") == keys[4:7]
    assert keys_of(store, "packs/0a/x") == ["packs/0a/x"]
    assert keys_of(store, "packs/0a/xx") == keys_of(store, "nothing/") == keys_of(store, "zz/") == []


def test_listing_in_pages(store: ObjectStore) -> None:
    """Pages of any size, each continued after its last key, give every key once and in order."""
    keys = sorted(f"{folder}/{number:02}" for folder in ("a", "b/c", "d") for number in range(9))
    put_all(store, *keys)
    for limit in (1, 2, 9, 26, 27, 1000):
        seen: list[str] = []
        while True:
            listing = store.list("", start_after=seen[-1] if seen else "", limit=limit)
            seen += [each.key for each in listing.objects]
            assert 0 < len(listing.objects) <= limit
            if not listing.truncated:
                break
        assert seen == keys
    assert keys_of(store, "b/", start_after="b/c/04", limit=2) == ["b/c/05", "b/c/06"]
    assert keys_of(store, "b/", start_after="b/c/045", limit=1) == ["b/c/05"]  # need not exist
    assert keys_of(store, start_after="d/08") == []


def test_listing_in_byte_order(tmp_path: Path) -> None:
    """A directory lists in the order that S3 specifies, also where a file's name continues a folder's."""
    store = DirectoryStore(str(tmp_path / "remote"))
    keys = sorted(["a-b", "a/b", "a.c/d", "a0", "B", "é", "a/b-c"], key=str.encode)
    put_all(store, *keys)
    assert keys_of(store) == keys
    for before, after in pairwise(keys):
        assert keys_of(store, start_after=before, limit=1) == [after]


def test_long_listing(suite_bucket: Bucket, tmp_path: Path) -> None:
    """More keys than one page of S3 holds are listed and deleted like few."""
    keys = [f"k/{number:04}" for number in range(1010)]
    for store in (
        open_remote(f"{suite_bucket.url}/long", environment=suite_bucket.environment),
        DirectoryStore(str(tmp_path / "remote")),
    ):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key, store=store: store.put(key, b""), keys))
        assert keys_of(store, limit=5000) == keys
        assert store.list("", limit=1005).truncated
        store.delete(keys)
        assert keys_of(store) == []


def test_folders(store: ObjectStore) -> None:
    """Folders are bare names, once each, in order; objects at that level are none."""
    put_all(store, "top", "heads/b/1", "heads/a/1", "heads/a/2", "heads/c", "heads/a/deep/er")
    assert store.list_folders("") == ("heads",)
    assert store.list_folders("heads/") == ("a", "b")
    assert store.list_folders("heads/a/") == ("deep",)
    assert store.list_folders("nothing/") == ()
    store.delete(["heads/b/1"])
    assert store.list_folders("heads/") in (("a",), ("a", "b"))  # SeaweedFS clears empty folders away later


def test_delete(store: ObjectStore) -> None:
    """Deleting removes what is there, is content with what is not, and removes nothing else."""
    put_all(store, "a/1", "a/2", "a/3", "b")
    store.delete(["a/1", "a/3", "never/was", "a"])
    store.delete(["a/1"])
    store.delete([])
    assert keys_of(store) == ["a/2", "b"]
    assert store.put("a/1", b"again", if_absent=True)


def test_wrong_arguments(store: ObjectStore) -> None:
    """Keys that a store could keep for itself or lose, and ranges that are none, are refused before any request."""
    for key in ("", "/a", "a//b", "a/", ".", "..", "a/../b", ".tmp/x", "a/.hidden", "a\0b"):
        for call in (store.get, store.size, lambda key: store.put(key, b""), lambda key: store.delete([key])):
            with pytest.raises(ValueError):
                call(key)
    for start, end in ((-1, 3), (3, 2)):
        with pytest.raises(ValueError):
            store.get("k", start, end)
    with pytest.raises(ValueError):
        store.list_folders("heads")
    with pytest.raises(ValueError):
        store.list("", limit=0)
    with pytest.raises(ValueError):
        store.get_tail("k", 0)


def test_many_threads(store: ObjectStore) -> None:
    """Threads share a store: each gets its own bytes back."""

    def work(number: int) -> None:
        data = os.urandom(50_000)
        for turn in range(5):
            key = f"t{number}/{turn}"
            assert store.put(key, data)
            assert store.get(key, 100, 40_000) == data[100:40_000]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(keys_of(store)) == 40


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_bodies_are_not_copied(kind: str, suite_bucket: Bucket, tmp_path: Path) -> None:
    """Storing a pack takes no memory beside the pack, and getting one takes its size once."""
    urls = {"directory": f"file://{tmp_path}/remote", "s3": f"{suite_bucket.url}/memory"}
    store = open_remote(urls[kind], environment=suite_bucket.environment)
    size = 8 << 20
    data = bytearray(os.urandom(size))
    store.put("warm", b"up")
    store.get("warm")
    tracemalloc.start()
    try:
        assert store.put("pack", data)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert len(store.get("pack", 0, size)) == size
        assert tracemalloc.get_traced_memory()[1] - before < size + (2 << 20)
    finally:
        tracemalloc.stop()


def test_prefixes_do_not_meet(suite_bucket: Bucket, tmp_path: Path) -> None:
    """Two stores in one bucket see nothing of each other, also when one prefix starts with the other."""
    one = open_remote(f"{suite_bucket.url}/meet/run", environment=suite_bucket.environment)
    two = open_remote(f"{suite_bucket.url}/meet/run2/", environment=suite_bucket.environment)
    one.put("k", b"one")
    two.put("k", b"two")
    assert keys_of(one) == keys_of(two) == ["k"]
    assert (one.get("k"), two.get("k")) == (b"one", b"two")
    assert one.url == f"{suite_bucket.url}/meet/run" and two.url == f"{suite_bucket.url}/meet/run2"


def test_s3_without_bucket_or_rights(suite_bucket: Bucket) -> None:
    """A missing bucket is unusable, a wrong key forbidden, and each message says what to do."""
    nowhere = open_remote("s3://no-such-bucket-here/x", environment=suite_bucket.environment)
    for call in (lambda: nowhere.put("k", b""), lambda: nowhere.get("k"), lambda: nowhere.list("")):
        with pytest.raises(RemoteUnusable, match="no such bucket") as unusable:
            call()
        assert not unusable.value.temporary
    wrong = {**suite_bucket.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    refused = open_remote(f"{suite_bucket.url}/x", environment=wrong)
    for refusal in (lambda: refused.put("k", b""), lambda: refused.get("k"), lambda: refused.size("k")):
        with pytest.raises(RemoteForbidden, match="refuses these credentials") as forbidden:
            refusal()
        assert forbidden.value.temporary


def test_s3_refreshes_credentials(suite_bucket: Bucket) -> None:
    """New credentials heal a store in place, keep its endpoint, and a broken environment changes nothing."""
    stale = {**suite_bucket.environment, "AWS_SECRET_ACCESS_KEY": "old", "AWS_SESSION_TOKEN": "old"}
    store = S3Store(suite_bucket.name, "refresh", environment=stale)
    with pytest.raises(RemoteForbidden):
        store.put("k", b"x")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    store.refresh_credentials({"HOME": "/", **{name: suite_bucket.environment[name] for name in names}})
    assert store.put("k", b"x")
    with pytest.raises(RemoteUnusable):
        store.refresh_credentials({"AWS_ENDPOINT_URL": "not a url"})
    with pytest.raises(RemoteForbidden):
        store.refresh_credentials({"AWS_PROFILE": "there-is-no-such-profile"})
    assert store.get("k") == b"x"


def test_s3_profile(suite_bucket: Bucket, tmp_path: Path) -> None:
    """A profile's credentials, endpoint and region are used when the environment names the profile alone."""
    environment = suite_bucket.environment
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = eu-north-1\nendpoint_url = {environment['AWS_ENDPOINT_URL']}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {environment['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {environment['AWS_SECRET_ACCESS_KEY']}\n"
    )
    files = {
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }
    store = open_remote(f"{suite_bucket.url}/profile", environment={**files, "AWS_PROFILE": "lab"})
    assert "eu-north-1" in store.description and environment["AWS_ENDPOINT_URL"] in store.description
    assert store.put("k", b"x")


def test_directory_hides_its_temporaries(tmp_path: Path) -> None:
    """Leftovers of a crash and a NAS's own files are never listed; old leftovers go at the next start."""
    root = tmp_path / "remote"
    store = DirectoryStore(str(root))
    put_all(store, "a/1")
    for name in (f"{TEMPORARY}/left", ".nfs0001", "a/.snapshot"):
        (root / name).write_bytes(b"half")
    assert keys_of(store) == ["a/1"]
    assert keys_of(store, TEMPORARY) == keys_of(store, f"{TEMPORARY}/") == []
    assert store.list_folders("") == ("a",)
    os.utime(root / TEMPORARY / "left", (0, 0))
    (root / TEMPORARY / "recent").write_bytes(b"another machine's")
    DirectoryStore(str(root))
    assert os.listdir(root / TEMPORARY) == ["recent"]


def test_directory_with_other_things_than_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO, a socket or a folder in an object's place is no object, and nobody waits for it."""
    store = open_remote(f"file://{tmp_path / 'store'}")
    store.put("packs/file", b"bytes")
    folder = tmp_path / "store" / "packs"
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(folder)  # the whole path is too long for a socket's name
        listening.bind("socket")
        for name in ("fifo", "folder", "socket"):
            with pytest.raises(ObjectMissing):
                store.get(f"packs/{name}")
            with pytest.raises(ObjectMissing):
                store.get_tail(f"packs/{name}", 10)
            assert store.size(f"packs/{name}") is None
    assert [each.key for each in store.list("packs/").objects] == ["packs/file"]


def test_directory_that_is_gone(tmp_path: Path) -> None:
    """An unmounted NAS leaves an empty mount point: nothing is written there and nothing is said to be missing."""
    root = tmp_path / "nas"
    store = DirectoryStore(str(root))
    put_all(store, "a/1")
    root.rename(tmp_path / "elsewhere")
    for _ in range(2):
        for call in (
            lambda: store.put("a/2", b""),
            lambda: store.get("a/1"),
            lambda: store.size("a/1"),
            lambda: store.list(""),
        ):
            with pytest.raises(RemoteError, match="mounted") as caught:
                call()
            assert caught.value.temporary and type(caught.value) is RemoteError
        root.mkdir(exist_ok=True)  # second turn: the bare mount point
    assert os.listdir(root) == []
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    assert store.get("a/1") == b"a/1"


def test_directory_is_left_alone_until_something_is_put(tmp_path: Path) -> None:
    """One that holds other things gets no `.tmp` by being opened; one that must be there is not made."""
    (tmp_path / "other").touch()
    store = DirectoryStore(str(tmp_path))
    assert keys_of(store) == ["other"] and os.listdir(tmp_path) == ["other"]
    put_all(store, "a")
    assert sorted(os.listdir(tmp_path)) == [TEMPORARY, "a", "other"]
    (tmp_path / "empty").mkdir()
    assert keys_of(DirectoryStore(str(tmp_path / "empty"), create=False)) == []
    assert os.listdir(tmp_path / "empty") == []
    with pytest.raises(RemoteUnusable, match="no such directory; is it mounted"):
        DirectoryStore(str(tmp_path / "none"), create=False)
    assert not (tmp_path / "none").exists()


def test_directory_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    """A put that fails leaves neither an object nor a temporary file."""
    store = DirectoryStore(str(tmp_path))
    store.put("a", b"x")
    with pytest.raises(RemoteError) as caught:
        store.put("a/b", b"y")  # a directory cannot hold both
    assert not caught.value.temporary
    assert keys_of(store) == ["a"] and os.listdir(tmp_path / TEMPORARY) == []


def test_urls(tmp_path: Path) -> None:
    """URLs are parsed, made canonical, and wrong ones are refused with what would be right."""
    assert open_remote(f"file://{tmp_path}/a%20b/").url == f"file://{tmp_path}/a%20b"
    assert (tmp_path / "a b").is_dir()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    assert open_remote("s3://bucket/a/b/", environment=keys).url == "s3://bucket/a/b"
    assert open_remote("s3://bucket", environment=keys).url == "s3://bucket"
    assert "us-east-1" in open_remote("s3://bucket", environment=keys).description
    (tmp_path / "file").write_bytes(b"")
    for url, message in [
        (str(tmp_path), "Did you mean file:///"),
        ("bucket/run", "is no URL"),
        ("file:/bucket/run", "Did you mean file:///bucket/run"),
        ("file:///proc/run", "cannot be created: No such file"),
        ("gs://bucket/run", "gs:// is not supported.*s3://bucket/prefix"),
        ("file://nas/run", "three slashes"),
        ("file:///", "three slashes"),
        ("s3://", "no bucket name"),
        ("s3:///run", "no bucket name"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("s3://key:secret@bucket/run", "AWS_ACCESS_KEY_ID"),
        (f"file://{tmp_path}/no/where", "is it mounted"),
        (f"file://{tmp_path}/file", "must be a directory"),
    ]:
        with pytest.raises(RemoteUnusable, match=message) as caught:
            open_remote(url, environment=keys)
        assert "secret" not in str(caught.value)
