"""Recognising a remote: when it is asked for its id, and what a place that has another, or none, gets and says."""

from __future__ import annotations

import threading
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from ckptfs.encoding.keys import FORMAT_KEY
from ckptfs.encoding.remote_format import RemoteFormat, encode_remote_format
from ckptfs.errors import ObjectMissing, RemoteError, RemoteUnusable
from ckptfs.remote.directory import DirectoryStore
from ckptfs.remote.offline import OfflineStore
from ckptfs.replica.bound import BoundStore
from tests.support.faulty import FaultyStore, unavailable


class Place:
    """A remote that can become another one, behind a `BoundStore` whose clock the test moves."""

    def __init__(self, directory: Path) -> None:
        self.store = DirectoryStore(str(directory))
        self.faulty = FaultyStore(self.store)
        self.ours = uuid4()
        self.becomes(self.ours)
        self.now_s = 100.0
        self.bound = BoundStore(self.faulty, self.ours, now=lambda: self.now_s)

    def becomes(self, store: UUID) -> None:
        self.store.put(FORMAT_KEY, encode_remote_format(RemoteFormat(store, 1)))

    @property
    def asked(self) -> int:
        return self.faulty.requests["get", FORMAT_KEY]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "remote")


def test_many_puts_ask_once_but_each_head_asks(place: Place) -> None:
    """What is cheap to lose costs no request of its own; what makes a state visible does."""
    for number in range(50):
        place.bound.put(f"packs/{number}", b"x")
        place.bound.list("packs/")
    assert place.asked == 1
    place.now_s += 5
    place.bound.put("packs/late", b"x")
    assert place.asked == 2
    place.bound.put("heads/w/1", b"x")
    place.bound.put("heads/w/2", b"x")
    assert place.asked == 4


def test_an_error_makes_it_ask_again(place: Place) -> None:
    """After any failure it may be another place that answers; it gets nothing, and is told from the right one later."""
    place.bound.put("packs/1", b"x")
    place.faulty.fault = lambda operation, key: unavailable(key)
    with pytest.raises(RemoteError, match="503"):
        place.bound.put("packs/2", b"x")
    assert place.bound.wrong is None  # nothing is known of it
    place.faulty.fault = lambda operation, key: None
    place.becomes(uuid4())
    for call in (
        lambda: place.bound.put("packs/2", b"x"),
        lambda: place.bound.list("packs/"),
        lambda: place.bound.list_folders(""),
        lambda: place.bound.delete(["packs/1"]),
        lambda: place.bound.put("heads/w/1", b"x"),
    ):
        with pytest.raises(RemoteUnusable, match="is another remote"):
            call()
    assert place.bound.wrong is not None
    assert {each.key for each in place.store.list("").objects} == {FORMAT_KEY, "packs/1"}
    place.becomes(place.ours)
    place.bound.put("packs/2", b"x")
    assert place.bound.wrong is None


def test_only_the_right_place_says_that_something_is_missing(place: Place) -> None:
    """An object that another place lacks is not missing: nothing may be forgotten or sent again because of it."""
    with pytest.raises(ObjectMissing):
        place.bound.get("packs/none")
    assert place.bound.size("packs/none") is None
    place.store.delete([FORMAT_KEY])
    place.now_s += 1
    for call in (
        lambda: place.bound.get("packs/none"),
        lambda: place.bound.get_tail("packs/none", 10),
        lambda: place.bound.size("packs/none"),
        lambda: place.bound.get("heads/w/1"),
    ):
        with pytest.raises(RemoteUnusable, match="not the place it was"):
            call()


def test_threads_that_ask_together_wait_for_one_answer(place: Place) -> None:
    """Uploads that begin at once cost one request, not one each."""
    threads = [threading.Thread(target=place.bound.put, args=(f"packs/{n}", b"x")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert place.asked == 1


def test_offline_nothing_is_asked() -> None:
    """Every request is refused at once, and lastingly, so that nobody waits."""
    bound = BoundStore(OfflineStore("s3://bucket/run"), None)
    assert bound.url == "s3://bucket/run"
    for call in (
        bound.recognise,
        lambda: bound.put("packs/1", b""),
        lambda: bound.get("packs/1"),
        lambda: bound.get_tail("packs/1", 1),
        lambda: bound.size("packs/1"),
        lambda: bound.list(""),
        lambda: bound.list_folders(""),
        lambda: bound.delete([]),
    ):
        with pytest.raises(RemoteUnusable, match="offline") as caught:
            call()
        assert not caught.value.temporary
    assert bound.wrong is not None
    bound.refresh_credentials({"AWS_PROFILE": "x"})
