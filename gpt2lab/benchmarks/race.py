"""One race for all benchmarks: contestants take turns in the same run, and ratios are taken turn by turn.

Other load on the machine then hits all of them alike, and a ratio is that of two turns that follow one another. On
ranks a turn begins when the last rank is ready and ends when the last one is.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..machine.timing import Times, together
from ..processes.launch import Ranks
from ..ranks import comm
from ..ranks.mesh import Mesh

WARM_UP = 3  # turns until all contestants' memory has settled: the first steps take 25 % longer


@dataclass(frozen=True)
class Contest:
    """What takes turns: `ways` by name. `before(name)` runs before each turn, outside of its time.

    A turn is `calls` calls in a row, and its seconds are those of one; where ways time themselves (`own`) they return
    seconds, or a list of which the median counts. `after(name, returned)` gives more numbers of a turn, and `facts()`
    says, at the end, what else was found.
    """

    ways: dict[str, Callable[[], object]]
    before: Callable[[str], object] = lambda name: None
    after: Callable[[str, object], object] = lambda name, returned: None
    calls: int = 1
    own: bool = False
    facts: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """What a heat found: for each contestant its turns' `Times`; of each rank the facts, and more numbers by name."""

    times: dict[str, Times]
    facts: list
    more: list[dict[str, list]]

    @classmethod
    def of(cls, per_rank: list[tuple]) -> "Outcome":
        """Put together what each rank has seen in its `turns`."""
        spans, more, facts = zip(*per_rank, strict=True)
        return cls(
            {name: together([one[name] for one in spans]) for name in spans[0]}, list(facts), list(more)
        )

    def ratio(self, name: str, rival: str) -> Times:
        """A contestant's seconds over its rival's, turn by turn."""
        pairs = zip(self.times[name].trials, self.times[rival].trials, strict=True)
        return Times(tuple(mine / theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Heat:
    """One size of a race. `make(*given)` makes the contest here; with `ranks` it is `make(rank, world_size, *given)`.

    `label` puts the size to a contestant's name, as "{}, 2 ranks". `rivals` are those with which the others are
    compared. `notes` gives, by name, words for a line below that of a contestant.
    """

    label: str
    make: Callable[..., Contest]
    given: tuple = ()
    ranks: int = 0
    rivals: tuple[str, ...] = ()
    notes: Callable[[Outcome], dict[str, str]] = lambda found: {}

    def rows(self, found: Outcome) -> str:
        """A line for each contestant: median and quartiles of its milliseconds, and of its ratio to each rival."""
        notes, lines = self.notes(found), []
        rivals = [rival for rival in self.rivals if rival in found.times]
        for name, t in found.times.items():
            line = f"  {self.label.format(name):34} {1e3 * t.median:9.3f} ms ({1e3 * t.low:.3f} to {1e3 * t.high:.3f})"
            for rival in rivals if name not in rivals else ():
                ratio = found.ratio(name, rival)
                line += f", {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {rival}"
            lines += [line, *([f"      {notes[name]}"] if name in notes else [])]
        return "\n".join(lines)


def here(ways: dict[str, Callable[[], object]], label: str = "{}", **more) -> Heat:
    """A heat of contestants that are made already, in this process."""
    return Heat(label, lambda: Contest(ways), **more)


def apart(rival: str) -> Callable[[Outcome], dict[str, str]]:
    """Notes of a heat whose facts are how far the contestants' gradients are apart, as a relative difference."""
    return lambda found: {rival: f"gradients differ by {max(found.facts):.0e}"}


def run(heats: Iterable[Heat], rounds: int, warm_up: int = WARM_UP) -> dict[str, float]:
    """Run one heat after the other and print its rows; returns the median seconds by name and size."""
    seconds = {}
    for heat in heats:
        found = race(heat, rounds, warm_up)
        print(heat.rows(found), flush=True)
        seconds |= {heat.label.format(name): t.median for name, t in found.times.items()}
    return seconds


def race(heat: Heat, rounds: int, warm_up: int = WARM_UP) -> Outcome:
    """The turns of one heat, here or on ranks of its own, which give their memory back at its end."""
    if not heat.ranks:
        return Outcome.of([turns(heat.make(*heat.given), rounds, warm_up)])
    with Ranks(heat.ranks, timeout=600, echo=False) as pool:
        return Outcome.of(pool.run(on_rank, heat.make, heat.given, rounds, warm_up))


def on_rank(rank: int, world_size: int, make, given: tuple, rounds: int, warm_up: int = WARM_UP) -> tuple:
    """The `turns` of a heat on one rank, with a barrier before each."""
    contest, everyone = make(rank, world_size, *given), Mesh(dp=world_size).world
    return turns(contest, rounds, warm_up, lambda: comm.barrier(everyone))


def turns(contest: Contest, rounds: int, warm_up: int, ready: Callable = lambda: None) -> tuple:
    """({name: (start, end) of each turn}, {name: more numbers of each}, facts); turns that warm up are not kept."""
    spans, more = ({name: [] for name in contest.ways} for _ in range(2))
    for turn in range(warm_up + rounds):
        for name, way in contest.ways.items():
            contest.before(name)
            ready()
            start = time.perf_counter()
            for _ in range(contest.calls):
                returned = way()
            end = time.perf_counter()
            if contest.own:
                start, end = 0.0, statistics.median(returned if isinstance(returned, list) else [returned])
            if turn >= warm_up:
                spans[name].append((start / contest.calls, end / contest.calls))
                more[name].append(contest.after(name, returned))
    return spans, more, contest.facts()


def save_race(folder: str, name: str, numbers, figure) -> None:
    """Write the numbers as JSON and the figure beside it, and say where."""
    from ..plots.style import save_figure

    picture = save_figure(figure, Path(folder, f"{name}.png"))
    picture.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"Saved {picture} and .json")
