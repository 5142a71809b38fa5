"""Random operations through descriptors, memory maps and names, on a mount and on a plain directory: nothing differs.

A hypothesis state machine: its rules are bursts of operations of one kind (`steps` has them all), comparing everything,
letting everything go, and waiting for sealing. What fails is shrunk, and printed step by step.

The quick test performs 50,000 operations in each mode that `make test` runs, other ones without passthrough than with
it. The slow one goes on for as long as CKPTFS_EXERCISE_S says, in seconds (default 300):

    CKPTFS_EXERCISE_S=7200 python -m pytest -m slow tests/posix/test_random_operations.py
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.posix.steps import BYTE_STEPS, MAP_STEPS, NAME_STEPS, OPEN_STEPS, Step
from tests.posix.twins import Twins
from tests.support.mounts import TINY, Site

OPERATIONS = 50_000
OPTIONS = ("--owner", "stored", "--allow-other")
REMOUNT_EVERY = 40
STEPS_OF_AN_EXAMPLE = 50
EXERCISE_S = float(os.environ.get("CKPTFS_EXERCISE_S", "300"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    mask = os.umask(0o022)
    with Site(tmp_path_factory.mktemp("random"), tuning=TINY) as made:
        made.mount(*OPTIONS)
        yield made
        made.umount()
        assert "Traceback" not in made.log(), made.log()
    os.umask(mask)


def burst(table: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    """One draw an operation: fifty thousand of them take seconds, and each can be left out of a failing run."""
    step = st.binary(min_size=8, max_size=8).map(lambda code: Step(table, code))
    some = st.lists(step, max_size=60)
    return st.tuples(some, some, some).map(lambda parts: [step for part in parts for step in part])  # 18 on average


class Count:
    operations = 0


def machine(site: Site, plain: Path, count: Count) -> type[RuleBasedStateMachine]:
    """A state machine over *site* and *plain*; every so many examples end with a remount."""
    numbers = itertools.count()

    class FileSystemMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.number = next(numbers)
            name = f"{self.number}"
            self.twins = Twins(plain / name, site.mountpoint / name)

        @rule(steps=burst(NAME_STEPS))
        def names(self, steps: list[Step]) -> None:
            self.perform(steps)

        @rule(steps=burst(BYTE_STEPS))
        def bytes(self, steps: list[Step]) -> None:
            self.perform(steps)

        @rule(steps=burst(BYTE_STEPS))
        def more_bytes(self, steps: list[Step]) -> None:
            self.perform(steps)

        @rule(steps=burst(MAP_STEPS))
        def maps(self, steps: list[Step]) -> None:
            self.perform(steps)

        @rule(steps=burst(OPEN_STEPS))
        def descriptors(self, steps: list[Step]) -> None:
            self.perform(steps)

        def perform(self, steps: list[Step]) -> None:
            for step in steps:
                self.twins.perform(step)

        @rule(what=st.sampled_from(["compare", "compare", "let go", "pause"]))
        def between(self, what: str) -> None:
            """A pause is long enough for small files to be sealed, if nobody can write them."""
            if what == "let go":
                self.twins.close_all()
            elif what == "pause":
                self.wait_until_sealed(0.005)
            else:
                self.twins.compare_everything()

        def wait_until_sealed(self, timeout_s: float) -> bool:
            until = time.monotonic() + timeout_s
            while any(map(is_closed, self.twins.roots[1].rglob("*"))):
                if time.monotonic() > until:
                    return False
                time.sleep(0.001)
            return True

        def teardown(self) -> None:
            try:
                self.twins.compare_everything()
                self.twins.close_all()
                self.twins.compare_everything()
                if self.number % REMOUNT_EVERY == REMOUNT_EVERY - 1:
                    assert self.wait_until_sealed(30), "not everything was sealed within 30 s"
                    self.twins.compare_everything()
                    site.umount()
                    site.mount(*OPTIONS)
                    self.twins.compare_everything()
            finally:
                count.operations += self.twins.performed
                self.twins.close_all()
                self.twins.remove()

    return FileSystemMachine


def is_closed(path: Path) -> bool:
    """Whether it waits to be sealed."""
    return path.is_file() and not path.is_symlink() and os.getxattr(path, "user.ckptfs.state") == b"closed"


def run(site: Site, plain: Path, count: Count, examples: int, seeded: int | None = None) -> None:
    """*seeded*: the same examples each time, so that a change is judged by what was seen to pass before it."""
    rules = machine(site, plain, count)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        rules if seeded is None else seed(seeded)(rules),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_OF_AN_EXAMPLE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(900)
def test_the_mount_behaves_like_a_plain_directory(site: Site, tmp_path: Path) -> None:
    """After every one of 50,000 random operations results, errnos, stats and bytes are equal on both."""
    count = Count()
    seeds = itertools.count(0 if site.has_passthrough() else 1, 2)
    while count.operations < OPERATIONS:
        run(site, tmp_path, count, examples=60, seeded=next(seeds))


@pytest.mark.slow
@pytest.mark.timeout(EXERCISE_S + 900)
def test_the_mount_behaves_like_a_plain_directory_for_long(site: Site, tmp_path: Path) -> None:
    """The same for as long as asked, with other examples each time."""
    count, until = Count(), time.monotonic() + EXERCISE_S
    while time.monotonic() < until:
        run(site, tmp_path, count, examples=200)
