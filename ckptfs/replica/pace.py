"""How many packs are put at once: more and more, until memory or the remote sets the limit. Pure.

After a round without trouble (as many packs as are on their way, while others waited) the number grows by one. Trouble
is a request that had to be repeated: 503 SlowDown, 429, a timeout, a broken connection. It halves the number, once for
all that were on their way; what met it is tried again only after a rest at one less, of 2, 4 and from then on 8 rounds.

More packs than fill the line do no harm but in memory, whose bound is a setting. So rates are not compared: on
simulated lines whose packs differ in size and delay, a rule that stepped back when a step brought no more reached a
third of a fat line's rate, because it took noise for an answer.
"""

from __future__ import annotations

_LONGEST_REST = 8
"""A remote that fails one request in a hundred for no reason of ours would be left with few packs if this were long."""


class Pace:
    """`at_once` packs should be on their way now."""

    def __init__(self, first: int, most: int) -> None:
        """It begins with *first* and stays within 1 and *most*."""
        self.at_once = max(1, min(first, most))
        self._most = most
        self._ceiling = most
        """The largest number that met no trouble lately."""
        self._rest, self._rested = 1, 0
        """Rounds to stay at the ceiling, and rounds stayed."""
        self._calm = 0
        """Packs of this round."""
        self._passing = 0
        """Packs that were begun before the number was halved: what becomes of them says nothing about the new one."""

    def limit(self, most: int) -> None:
        """From now on *most* may be on their way: they are of another size."""
        if most != self._most:
            self._most = self._ceiling = most
            self.at_once = min(self.at_once, most)

    def ended(self, *, trouble: bool, others_wait: bool) -> None:
        """A put has ended. *trouble*: since the one before, a request had to be repeated. *others_wait*: another pack
        was ready to take its place."""
        if self._passing:
            self._passing -= 1
        elif trouble:
            self._halve()
        else:
            self._calm += 1
            if self._calm >= self.at_once and others_wait:
                self._calm = 0
                self._grow()

    def _grow(self) -> None:
        if self.at_once == self._ceiling < self._most:
            self._rested += 1
            if self._rested >= self._rest:
                self._ceiling, self._rested = self._ceiling + 1, 0
        self.at_once = min(self.at_once + 1, self._ceiling)

    def _halve(self) -> None:
        self._passing, self._calm = self.at_once, 0
        self._ceiling = max(1, self.at_once - 1)
        self._rest, self._rested = min(2 * self._rest, _LONGEST_REST), 0
        self.at_once = max(1, self.at_once // 2)
