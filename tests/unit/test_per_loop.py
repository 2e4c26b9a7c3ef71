"""State of one event loop, and the turns of a loop."""

from __future__ import annotations

import asyncio

from celery_dq.per_loop import PIECES_PER_TURN, LoopTurns, PerLoop


class Closing:
    """A value that notes its end."""

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def test_each_loop_has_one_value_that_is_closed_at_its_end() -> None:
    values = PerLoop(Closing)

    async def get() -> Closing:
        first = await values.get()
        assert await values.get() is first
        assert not first.closed
        return first

    one, other = asyncio.run(get()), asyncio.run(get())
    assert one is not other
    assert one.closed
    assert other.closed


def test_a_value_of_a_loop_that_was_only_closed_is_forgotten() -> None:
    values = PerLoop(Closing)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(values.get())
    loop.close()
    asyncio.run(values.get())
    assert values._values == {}


def test_coroutines_run_their_pieces_in_turns_and_in_order() -> None:
    async def runs() -> list[int]:
        turns, order, counts = LoopTurns(), list[int](), list[int]()

        async def piece(number: int) -> None:
            await turns.wait()
            order.append(number)

        pieces = [asyncio.create_task(piece(number)) for number in range(50)]
        await asyncio.sleep(0)
        pieces[20].cancel()
        while not all(each.done() for each in pieces):
            before = len(order)
            await asyncio.sleep(0)
            counts.append(len(order) - before)
        assert max(counts) <= PIECES_PER_TURN
        return order

    assert asyncio.run(runs()) == [number for number in range(50) if number != 20]
