"""`Retrying` with time, chance and failures that the test decides; no real waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptfs.errors import ObjectExists, ObjectMissing, RemoteError, RemoteForbidden, RemoteUnusable
from ckptfs.remote.base import Buffer
from ckptfs.remote.directory import DirectoryStore
from ckptfs.remote.retry import Limits, Retrying


def passing(message: str = "down") -> RemoteError:
    return RemoteError(message, temporary=True)


class Failing(DirectoryStore):
    """A directory whose calls fail first with the given errors, one each; None lets a call through."""

    def __init__(self, directory: Path, errors: Iterable[RemoteError | None]) -> None:
        super().__init__(str(directory))
        self.errors = iter(errors)
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        error = next(self.errors, None)
        if error is not None:
            raise error

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._fail()
        return super().get(key, start, end)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
        """Stores, and then fails: the answer is lost."""
        stored = super().put(key, data, if_absent=if_absent)
        self._fail()
        return stored


@dataclass
class Time:
    """A clock that moves when somebody sleeps, or when a request takes time."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)
    on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.on_sleep()


def retrying(store: DirectoryStore, clock: Time, limits: Limits | None = None, jitter: float = 1.0) -> Retrying:
    return Retrying(store, limits, sleep=clock.sleep, now=lambda: clock.now, jitter=lambda: jitter)


def test_waits_double_up_to_the_most(tmp_path: Path) -> None:
    """Waits double from the first to the largest, and the call returns what finally came."""
    store = Failing(tmp_path, [None, *[passing()] * 8])
    store.put("k", b"data")
    clock = Time()
    assert retrying(store, clock, Limits(first_s=0.5, most_s=10)).get("k") == b"data"
    assert clock.slept == [0.5, 1, 2, 4, 8, 10, 10, 10]


def test_full_jitter(tmp_path: Path) -> None:
    """A wait is anything between nothing and the step's length."""
    for jitter in (0.0, 0.25, 0.999):
        clock = Time()
        with pytest.raises(RemoteError):
            retrying(Failing(tmp_path, [passing()] * 4), clock, Limits(first_s=1, attempts=4), jitter).get("k")
        assert clock.slept == [jitter, 2 * jitter, 4 * jitter]


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_attempts(tmp_path: Path, attempts: int) -> None:
    """No more requests than allowed; the last error is the one that is raised."""
    errors = [passing(str(number)) for number in range(10)]
    store = Failing(tmp_path, errors)
    with pytest.raises(RemoteError) as caught:
        retrying(store, Time(), Limits(attempts=attempts)).get("k")
    assert caught.value is errors[attempts - 1] and store.calls == attempts


def test_deadline(tmp_path: Path) -> None:
    """The last request is made at the deadline, none after it, and no wait goes beyond it."""
    store = Failing(tmp_path, [passing()] * 100)
    clock = Time()
    with pytest.raises(RemoteError):
        retrying(store, clock, Limits(first_s=1, most_s=60)).within(10).get("k")
    assert clock.slept == [1, 2, 4, 3] and store.calls == 5


def test_each_call_has_its_own_deadline(tmp_path: Path) -> None:
    """A deadline counts from the beginning of a call, not from when the store was made."""
    clock = Time()
    limited = retrying(Failing(tmp_path, [passing(), None, passing(), None]), clock).within(5)
    for _ in range(2):
        clock.now += 100
        with pytest.raises(ObjectMissing):
            limited.get("missing")
    assert clock.slept == [0.5, 0.5]


@pytest.mark.parametrize("error", [RemoteError("no"), ObjectMissing("no"), ObjectExists("no"), RemoteUnusable("no")])
def test_lasting_errors_are_raised_at_once(tmp_path: Path, error: RemoteError) -> None:
    """What time does not heal is not repeated."""
    store = Failing(tmp_path, [error])
    clock = Time()
    with pytest.raises(type(error)):
        retrying(store, clock).get("k")
    assert store.calls == 1 and clock.slept == []


def test_credentials_may_heal(tmp_path: Path) -> None:
    """Refused credentials are retried: new ones may come."""
    store = Failing(tmp_path, [None, RemoteForbidden("expired"), RemoteForbidden("expired")])
    store.put("k", b"data")
    assert retrying(store, Time()).get("k") == b"data"


def test_other_errors_pass(tmp_path: Path) -> None:
    """A wrong argument is not a failure of the remote."""
    with pytest.raises(ValueError):
        retrying(Failing(tmp_path, []), Time()).get("../k")


def test_cancelled(tmp_path: Path) -> None:
    """Once cancelled, a wait ends and no further request is made."""
    cancel = threading.Event()
    store = Failing(tmp_path, [passing()] * 100)
    clock = Time(on_sleep=lambda: cancel.set() if len(clock.slept) == 3 else None)
    with pytest.raises(RemoteError, match="down"):
        retrying(store, clock, Limits(cancel=cancel)).get("k")
    assert store.calls == 3 and len(clock.slept) == 3
    with pytest.raises(RemoteError):
        retrying(store, clock, Limits(cancel=cancel)).get("k")
    assert store.calls == 4 and len(clock.slept) == 3


def test_cancel_survives_other_limits(tmp_path: Path) -> None:
    """`within` keeps the cancel event and replaces the rest."""
    cancel = threading.Event()
    cancel.set()
    store = Failing(tmp_path, [passing()] * 100)
    with pytest.raises(RemoteError):
        retrying(store, Time(), Limits(cancel=cancel, attempts=9)).within(None).get("k")
    assert store.calls == 1


def test_cancel_ends_a_real_wait(tmp_path: Path) -> None:
    """Without an injected clock too, a wait of minutes ends when the event is set."""
    cancel, waiting = threading.Event(), threading.Event()
    limits = Limits(first_s=600, cancel=cancel)
    store = Retrying(Failing(tmp_path, [passing()] * 2), limits, on_retry=lambda *_: waiting.set(), jitter=lambda: 1)
    failed: list[RemoteError] = []

    def get() -> None:
        try:
            store.get("k")
        except RemoteError as error:
            failed.append(error)

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    assert waiting.wait(10)
    cancel.set()
    thread.join(10)
    assert len(failed) == 1


def test_retries_are_reported(tmp_path: Path) -> None:
    """The owner hears of every error that is waited out, with the wait; not of the one that is raised."""
    told: list[tuple[str, float]] = []
    store = Failing(tmp_path, [passing("one"), passing("two"), passing("three")])
    with pytest.raises(RemoteError, match="three"):
        Retrying(
            store,
            Limits(first_s=1, attempts=3),
            on_retry=lambda error, wait_s: told.append((str(error), wait_s)),
            sleep=lambda _: None,
            jitter=lambda: 0.5,
        ).get("k")
    assert told == [("one", 0.5), ("two", 1.0)]


def test_a_conditional_put_finds_its_own_object(tmp_path: Path) -> None:
    """When the answer to a conditional put was lost, the repetition succeeds if the bytes in place are its own."""
    store = Failing(tmp_path, [passing(), None])
    assert retrying(store, Time()).put("head", memoryview(b"ours"), if_absent=True) is True
    assert store.get("head") == b"ours"


def test_a_conditional_put_does_not_take_what_is_not_its_own(tmp_path: Path) -> None:
    """Another's object under the key is a conflict, at the first request and at a repeated one."""
    DirectoryStore(str(tmp_path)).put("head", b"theirs")
    with pytest.raises(ObjectExists):
        retrying(Failing(tmp_path, []), Time()).put("head", b"theirs", if_absent=True)

    class Late(Failing):
        def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> bool:
            self._fail()
            return DirectoryStore.put(self, key, data, if_absent=if_absent)

    with pytest.raises(ObjectExists):
        retrying(Late(tmp_path, [passing()]), Time()).put("head", b"ours", if_absent=True)
