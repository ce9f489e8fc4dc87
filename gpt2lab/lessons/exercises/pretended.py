"""Pretended ranks: threads of this process whose calls answer for what all of them give."""

import threading
from collections.abc import Callable

TIMEOUT = 20.0
"""Seconds for which a pretended rank waits for another."""


class Meeting:
    """Where pretended ranks meet: `exchange(rank, value)` gives the values of all, once all have come."""

    def __init__(self, ranks: int):
        self.values, self.barrier = [None] * ranks, threading.Barrier(ranks, timeout=TIMEOUT)

    def exchange(self, rank: int, value) -> list:
        """Every rank's value, in the order of ranks."""
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()  # nobody begins the next exchange while another still reads this one
        return found


def together(run: Callable, ranks: int) -> list:
    """What `run(rank, exchange)` gives on each of some pretended ranks; `exchange(value)` gives everybody's values.

    What the first of them raises is raised here. Where some wait for a rank that has ended, AssertionError says so.
    """
    meeting, found, errors = Meeting(ranks), [None] * ranks, []

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank, lambda value: meeting.exchange(rank, value))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    assert not errors and not any(thread.is_alive() for thread in threads), (
        "some ranks wait for others that never come: all ranks must make the same calls"
    )
    return found
