"""All schedules by name."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from . import asynchronous, chimera_dualpipe, gpipe_1f1b, interleaved, terapipe, zero_bubble
from .schedule import Schedule


@dataclass(frozen=True)
class Entry:
    """A schedule's name, its generator `make(ranks, micros, **options)` and where it comes from."""

    name: str
    make: Callable[..., Schedule]
    source: str

    @property
    def options(self) -> tuple[str, ...]:
        """What can be chosen besides ranks and micro-batches."""
        return tuple(inspect.signature(self.make).parameters)[2:]


ENTRIES = (
    Entry("naive", gpipe_1f1b.naive, "no paper: one micro-batch at a time"),
    Entry("gpipe", gpipe_1f1b.gpipe, "Huang et al. 2019"),
    Entry("1f1b", gpipe_1f1b.one_forward_one_backward, "Narayanan et al. 2019; Fan et al. 2021"),
    Entry("interleaved", interleaved.interleaved, "Narayanan et al. 2021"),
    Entry("breadth_first", interleaved.breadth_first, "Lamy-Poirier 2023"),
    Entry("zb_h1", zero_bubble.zb_h1, "Qi et al. 2023"),
    Entry("zb_h2", zero_bubble.zb_h2, "Qi et al. 2023"),
    Entry("zb_v", zero_bubble.zb_v, "Qi et al. 2023 and 2024"),
    Entry("chimera", chimera_dualpipe.chimera, "Li & Hoefler 2021"),
    Entry("dualpipe", chimera_dualpipe.dualpipe, "DeepSeek-AI 2024"),
    Entry("dualpipe_v", chimera_dualpipe.dualpipe_v, "Qi et al. 2025"),
    Entry("terapipe", terapipe.terapipe, "Li et al. 2021"),
)
NAMES = tuple(entry.name for entry in ENTRIES)
FREE = (  # without a flush: equal to no serial run, but to an emulator of their staleness
    Entry("ampnet", asynchronous.free_running, "Gaunt et al. 2017"),
    Entry("pipedream", asynchronous.free_running, "Narayanan et al. 2019"),
    Entry("pipedream_vertical", asynchronous.free_running, "Narayanan et al. 2019, vertical sync"),
    Entry("2bw", asynchronous.free_running, "Narayanan et al. 2021"),
)


def find(name: str) -> Entry:
    """The entry of a name; capitals and hyphens do not matter. ValueError with the nearest name otherwise."""
    wanted = name.lower().replace("-", "_")
    names = [entry.name for entry in ENTRIES + FREE]
    if wanted in names:
        return (ENTRIES + FREE)[names.index(wanted)]
    near = difflib.get_close_matches(wanted, names, 1)
    hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
    raise ValueError(f"There is no pipeline schedule {name!r}. {hint}")


def make(name: str, ranks: int, micros: int, **options: int) -> Schedule:
    """The schedule of this name over `ranks` ranks and `micros` micro-batches.

    Options: `chunks` a rank (interleaved, breadth_first), token `slices` (terapipe).
    """
    entry = find(name)
    for option in options:
        if option not in entry.options:
            takes = f"It takes {', '.join(entry.options)}." if entry.options else "It takes no options."
            raise ValueError(f"The schedule {entry.name} has no option {option!r}. {takes}")
    return entry.make(ranks, micros, **options)
