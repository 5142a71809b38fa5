"""How many packs are on their way, on lines that are simulated: each pack takes its round trips, then its share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ckptfs.replica.pace import Pace

PACK = 16 << 20
MOST = 32
_STEP_S = 0.002


@dataclass
class _Put:
    left: float
    """Bytes."""
    wait_s: float
    """Until the first of them leaves."""


@dataclass
class Line:
    """A line to a remote, and what became of the packs that were sent over it."""

    bytes_per_s: float
    """Of all connections together ..."""
    connection_bytes_per_s: float = 1e12
    """... and of each."""
    latency_s: float = 0.06
    takes: int = 1000
    """Puts at once; one more is told to slow down, and comes again a second later."""
    failing_share: float = 0.0
    noise: float = 0.0
    """Share by which packs differ in size and delay."""
    encoded_bytes_per_s: float = 1e12
    """How fast packs are made; two may wait for their turn."""
    sent: int = 0
    refused: int = 0
    history: list[int] = field(default_factory=list)
    """The pace after each pack."""

    def carry(self, pace: Pace, packs: int, seed: int = 1) -> float:
        """Send *packs*; the bytes per second."""
        chances = random.Random(seed)
        end, now, made = self.sent + packs, 0.0, 2.0 * PACK
        puts: list[_Put] = []
        seen = self.refused
        while self.sent < end:
            while len(puts) < pace.at_once and made >= PACK:
                made -= PACK
                puts.append(self._begin(len(puts), chances))
            now += _STEP_S
            made = min(made + self.encoded_bytes_per_s * _STEP_S, 2.0 * PACK)
            sending = [put for put in puts if put.wait_s <= 0]
            share = min(self.connection_bytes_per_s, self.bytes_per_s / max(1, len(sending))) * _STEP_S
            for put in puts:
                put.wait_s -= _STEP_S
            for put in sending:
                put.left -= share
                if put.left <= 0:
                    puts.remove(put)
                    pace.ended(trouble=self.refused > seen, others_wait=made >= PACK)
                    seen = self.refused
                    self.sent += 1
                    self.history.append(pace.at_once)
        return packs * PACK / now

    def _begin(self, others: int, chances: random.Random) -> _Put:
        refused = others >= self.takes or chances.random() < self.failing_share
        self.refused += refused
        return _Put(
            PACK * chances.uniform(1 - self.noise, 1 + self.noise),
            self.latency_s * chances.uniform(1, 1 + self.noise) + refused,
        )


class Fixed(Pace):
    """For comparison."""

    def ended(self, *, trouble: bool, others_wait: bool) -> None: ...


def thin(noise: float = 0.0) -> Line:
    """1 Gb/s, 30 ms."""
    return Line(125e6, noise=noise)


def fat(noise: float = 0.0) -> Line:
    """24 Gb/s, of which one connection has 1.2."""
    return Line(3e9, 150e6, noise=noise)


def throttled(noise: float = 0.0) -> Line:
    """Six connections are let in."""
    return Line(1e9, 100e6, takes=6, noise=noise)


NOISE = pytest.mark.parametrize("noise", [0.0, 0.5])


@NOISE
@pytest.mark.parametrize("make", [thin, fat])
def test_it_is_as_fast_as_any_number(make: Callable[[float], Line], noise: float) -> None:
    pace, line = Pace(4, MOST), make(noise)
    line.carry(pace, 600)
    rate = line.carry(pace, 600)
    assert all(rate > 0.95 * make(noise).carry(Fixed(number, MOST), 600) for number in (1, 4, 16, MOST))


@NOISE
def test_a_fat_line_is_filled_soon(noise: float) -> None:
    """Within its first 2 GiB."""
    pace, line = Pace(4, MOST), fat(noise)
    line.carry(pace, 128)
    assert pace.at_once >= 12


def test_no_more_than_memory_allows() -> None:
    pace, line = Pace(4, 6), fat()
    line.carry(pace, 100)
    assert max(line.history) == pace.at_once == 6
    pace.limit(3)  # packs of twice the size
    assert pace.at_once == 3
    pace.limit(6)
    line.carry(pace, 100)
    assert pace.at_once == 6
    assert Pace(4, 1).at_once == 1


@NOISE
def test_a_throttling_remote_is_asked_for_what_it_takes(noise: float) -> None:
    """Nearly as fast as the best number, which nobody can know, and few are refused: a fixed 32 is refused mostly."""
    pace, line = Pace(4, MOST), throttled(noise)
    line.carry(pace, 200)
    line.refused, line.history = 0, []
    rate = line.carry(pace, 600)
    assert rate > 0.75 * throttled(noise).carry(Fixed(6, MOST), 600)
    assert max(line.history) <= 7
    assert line.refused < 600 / 25
    greedy = throttled(noise)
    greedy.carry(Fixed(MOST, MOST), 600)
    assert greedy.refused > 600 / 3


def test_one_at_a_time_where_only_one_is_taken() -> None:
    pace, line = Pace(4, MOST), throttled()
    line.takes = 1
    line.carry(pace, 300)
    assert min(line.history) == 1
    assert line.history[-100:].count(1) > 60 and max(line.history[-100:]) == 2


def test_rare_failures_cost_little() -> None:
    """One request in two hundred fails for no reason of ours."""
    pace, line = Pace(4, MOST), fat()
    line.failing_share = 0.005
    line.carry(pace, 1000)
    line.history.clear()
    line.carry(pace, 2000)
    assert sum(line.history) / 2000 > 8


@NOISE
@pytest.mark.parametrize("make", [thin, fat, throttled])
def test_it_moves_in_small_steps(make: Callable[[float], Line], noise: float) -> None:
    """Up by one, and down only where something was refused."""
    pace, line = Pace(4, MOST), make(noise)
    line.carry(pace, 600)
    steps = [after - before for before, after in zip(line.history, line.history[1:], strict=False)]
    assert max(steps) <= 1
    assert sum(1 for step in steps if step < 0) <= line.refused


def test_where_packs_are_made_slowly_nothing_is_tried() -> None:
    """The line is not what it waits for."""
    pace, line = Pace(4, MOST), fat()
    line.encoded_bytes_per_s = 200e6
    line.carry(pace, 300)
    assert set(line.history) == {4}


def test_a_remote_that_became_better_is_found_out() -> None:
    pace, line = Pace(4, MOST), throttled()
    line.carry(pace, 400)
    assert pace.at_once <= 7
    line.takes = 1000
    line.carry(pace, 1500)
    assert pace.at_once > 12


def test_trouble_of_one_moment_counts_once() -> None:
    """All that is on its way fails together when the remote does."""
    pace = Pace(8, MOST)
    for _ in range(8):
        pace.ended(trouble=True, others_wait=True)
    assert pace.at_once == 4
    pace.ended(trouble=True, others_wait=True)
    pace.ended(trouble=True, others_wait=True)
    assert pace.at_once == 2
