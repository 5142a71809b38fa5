"""How many requests may be going on, and how much they bring."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from ckptfs.replica.slots import Slots


@pytest.mark.parametrize(
    ("sizes", "at_once"),
    [((1, 1, 1, 1, 1), 3), ((40, 40, 40), 2), ((60, 60), 1), ((500, 500), 1), ((90, 20, 5), 2)],
)
def test_number_and_bytes_are_bounded(sizes: tuple[int, ...], at_once: int) -> None:
    """Three holders, 100 bytes; one that brings more is alone, and who comes later does not overtake."""

    async def main() -> None:
        slots, inside, most, order = Slots(3, 100), 0, 0, []

        async def hold(index: int, size: int) -> None:
            nonlocal inside, most
            async with slots.take(size):
                order.append(index)
                inside += 1
                most = max(most, inside)
                await trio.testing.wait_all_tasks_blocked()
                await trio.sleep(0.001)
                inside -= 1

        async with trio.open_nursery() as nursery:
            for index, size in enumerate(sizes):
                nursery.start_soon(hold, index, size)
                await trio.testing.wait_all_tasks_blocked()
        assert order == list(range(len(sizes)))
        assert most == at_once

    trio.run(main)


def test_who_gives_up_or_fails_leaves_the_slot_to_others() -> None:
    async def main() -> None:
        slots = Slots(1, 100)
        with pytest.raises(RuntimeError):
            async with slots.take(1):
                with trio.move_on_after(0.01) as waiting:
                    async with slots.take(1):
                        raise AssertionError("two at once")
                assert waiting.cancelled_caught
                raise RuntimeError
        with trio.fail_after(1):
            async with slots.take(1):
                pass

    trio.run(main)
