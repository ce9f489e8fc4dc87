"""One race for all benchmarks: contestants take turns in the same run, and ratios are taken turn by turn.

Other load on the machine then hits all of them alike, and a ratio is that of two turns of one round. On ranks, of one
thread each, a turn begins when the last rank is ready and ends when the last one is.
"""

import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from ..machine.timing import Times, together
from ..processes.launch import Ranks
from ..ranks import comm
from ..ranks.mesh import Mesh

WARM_UP = 3  # turns until all contestants' memory has settled: the first steps take 25 % longer


@dataclass(frozen=True)
class Contest:
    """What takes turns: `ways` by name; a rank has None for those in which it takes no part.

    `before(name)` runs before each turn, outside of its time. A turn is `calls` calls in a row, and its seconds are
    those of one; where ways time themselves (`own`) they return seconds, or a list of which the median counts.
    `after(name, returned)` runs after each turn that counts. `facts()` says at the end what else was found: {name:
    {what: a number, or words}}.
    """

    ways: dict[str, Callable[[], object] | None]
    before: Callable[[str], object] = lambda name: None
    after: Callable[[str, object], object] = lambda name, returned: None
    calls: int = 1
    own: bool = False
    facts: Callable[[], dict[str, dict]] = dict


@dataclass(frozen=True)
class Outcome:
    """What a heat found: for each contestant its turns' `Times`, and of each rank the facts."""

    times: dict[str, Times]
    facts: list[dict[str, dict]]

    @classmethod
    def of(cls, per_rank: list[tuple]) -> "Outcome":
        """Put together what each rank has seen in its `turns`."""
        spans, facts = zip(*per_rank, strict=True)
        return cls({name: together([one[name] for one in spans]) for name in spans[0]}, list(facts))

    def ratio(self, name: str, rival: str) -> Times:
        """A contestant's seconds over its rival's, turn by turn."""
        pairs = zip(self.times[name].trials, self.times[rival].trials, strict=True)
        return Times(tuple(mine / theirs for mine, theirs in pairs))

    def told(self, name: str) -> str:
        """The facts about a contestant in words: of a number the ranks' smallest and largest, words of the first."""
        per_rank, told = [facts.get(name, {}) for facts in self.facts], []
        for what, first in per_rank[0].items():
            least, most = (pick(facts[what] for facts in per_rank) for pick in (min, max))
            words = first if isinstance(first, str) else f"{least:.3g}"
            told.append(f"{what} {words}" + (f" to {most:.3g}" if words != first and most > least else ""))
        return "; ".join(told)


@dataclass(frozen=True)
class Heat:
    """One size of a race: a contest here, or with `ranks` a function `contest(rank, world_size, args)` that makes it.

    `label` puts the size to a contestant's name, as "{}, 2 ranks". `rivals` says who is compared with whom, and `work`
    what a call does, (amount, unit): its rate is told beside the time.
    """

    label: str
    contest: Contest | Callable[..., Contest]
    args: Namespace | None = None
    ranks: int = 0
    rivals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    work: dict[str, tuple[float, str]] = field(default_factory=dict)

    def rows(self, found: Outcome) -> str:
        """A line for each contestant: median and quartiles of its milliseconds, and of its ratio to each rival."""
        lines = []
        for name, t in found.times.items():
            line = f"  {self.label.format(name):34} {1e3 * t.median:9.3f} ms ({1e3 * t.low:.3f} to {1e3 * t.high:.3f})"
            if name in self.work:
                amount, unit = self.work[name]
                line += f", {amount / t.median:.4g} {unit}"
            for rival in (rival for rival in self.rivals.get(name, ()) if rival in found.times):
                ratio = found.ratio(name, rival)
                line += f", {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {rival}"
            told = found.told(name)
            lines += [line, *([f"      {told}"] if told else [])]
        return "\n".join(lines)


def each(args: Namespace, *options: str, **more: Iterable) -> Iterator[Namespace]:
    """The options once for every combination of the values of some that have several; there these have one value.

    `more` gives values of what is no option, or in place of an option's.
    """
    every = {option: getattr(args, option) for option in options} | more
    for values in product(*every.values()):
        yield Namespace(**vars(args) | dict(zip(every, values, strict=True)))


def run(heats: Iterable[Heat], rounds: int, warm_up: int = WARM_UP) -> dict[str, float]:
    """Run one heat after the other and print its rows; returns the median seconds by name and size."""
    seconds = {}
    for heat in heats:
        found = race(heat, rounds, warm_up)
        print(heat.rows(found), flush=True)
        seconds |= {heat.label.format(name): t.median for name, t in found.times.items()}
    return seconds


def over_sizes(contest, args, rivals: dict, *options, label="{{}}, {ranks} ranks", warm_up=WARM_UP, **more):
    """Run a contest on ranks of its own for every combination of the values of `each`; `label` names their sizes."""
    sizes = list(each(args, "ranks", *options, **more))
    heats = (Heat(label.format(**vars(one)), contest, one, one.ranks, rivals) for one in sizes)
    return run(heats, args.rounds, warm_up)


def race(heat: Heat, rounds: int, warm_up: int = WARM_UP) -> Outcome:
    """The turns of one heat, here or on ranks of its own, which give their memory back at its end."""
    if not heat.ranks:
        return Outcome.of([turns(heat.contest, rounds, warm_up)])
    with Ranks(heat.ranks, timeout=600, echo=False) as pool:
        return Outcome.of(pool.run(on_rank, heat.contest, heat.args, rounds, warm_up))


def on_rank(rank: int, world_size: int, contest, args, rounds: int, warm_up: int = WARM_UP) -> tuple:
    """The `turns` of a heat on one rank, with a barrier before each."""
    made, everyone = contest(rank, world_size, args), Mesh(dp=world_size).world
    return turns(made, rounds, warm_up, lambda: comm.barrier(everyone))


def turns(contest: Contest, rounds: int, warm_up: int, ready: Callable = lambda: None) -> tuple:
    """({name: (start, end) of each turn}, facts); turns that warm up are not kept."""
    spans = {name: [] for name in contest.ways}
    for turn in range(warm_up + rounds):
        for name, way in contest.ways.items():
            contest.before(name)
            ready()
            start, returned = time.perf_counter(), None
            for _ in range(contest.calls if way else 0):
                returned = way()
            end = time.perf_counter()
            if way is None:
                start = end = -math.inf  # before all others
            elif contest.own:
                start, end = 0.0, statistics.median(returned if isinstance(returned, list) else [returned])
            if turn >= warm_up:
                spans[name].append((start / contest.calls, end / contest.calls))
                contest.after(name, returned)
    return spans, contest.facts()


def save_race(folder: str, name: str, numbers, figure) -> None:
    """Write the numbers as JSON and the figure beside it, and say where."""
    from ..plots.style import save_figure

    picture = save_figure(figure, Path(folder, f"{name}.png"))
    picture.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"Saved {picture} and .json")
