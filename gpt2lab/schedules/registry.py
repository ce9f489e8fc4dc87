"""All schedules by name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from ..machine.arguments import checked
from ..machine.words import did_you_mean
from . import asynchronous, chimera_dualpipe, gpipe_1f1b, interleaved, terapipe, zero_bubble
from .schedule import Schedule, require


@dataclass(frozen=True)
class Generator:
    """A schedule's name, the function `make(ranks, micros, **options)` that generates it, and its paper."""

    name: str
    make: Callable[..., Schedule]
    source: str

    @property
    def options(self) -> tuple[str, ...]:
        """The options besides ranks and micro-batches."""
        return tuple(inspect.signature(self.make).parameters)[2:]


GENERATORS = (
    Generator("naive", gpipe_1f1b.naive, "no paper: one micro-batch at a time"),
    Generator("gpipe", gpipe_1f1b.gpipe, "Huang et al. 2019"),
    Generator("1f1b", gpipe_1f1b.one_forward_one_backward, "Narayanan et al. 2019; Fan et al. 2021"),
    Generator("interleaved", interleaved.interleaved, "Narayanan et al. 2021"),
    Generator("breadth_first", interleaved.breadth_first, "Lamy-Poirier 2023"),
    Generator("zb_h1", zero_bubble.zb_h1, "Qi et al. 2023"),
    Generator("zb_h2", zero_bubble.zb_h2, "Qi et al. 2023"),
    Generator("zb_v", zero_bubble.zb_v, "Qi et al. 2023 and 2024"),
    Generator("chimera", chimera_dualpipe.chimera, "Li & Hoefler 2021"),
    Generator("dualpipe", chimera_dualpipe.dualpipe, "DeepSeek-AI 2024"),
    Generator("dualpipe_v", chimera_dualpipe.dualpipe_v, "Qi et al. 2025"),
    Generator("terapipe", terapipe.terapipe, "Li et al. 2021"),
)
NAMES = tuple(generator.name for generator in GENERATORS)
# without a flush: not equal to a serial run, but to an emulator of their staleness
FREE = tuple(Generator(name, asynchronous.free_running, paper) for name, paper in asynchronous.FREE.items())


@checked()
def find(name: str) -> Generator:
    """The generator of this name (capitals and hyphens do not matter), or ValueError with the nearest name."""
    wanted, known = name.lower().replace("-", "_"), {g.name: g for g in GENERATORS + FREE}
    if wanted in known:
        return known[wanted]
    hint = did_you_mean(wanted, known, f"There are {', '.join(known)}.")
    raise ValueError(f"There is no pipeline schedule {name!r}. {hint}")


@checked()
def make(name: str, ranks: int, micros: int, **options: int) -> Schedule:
    """The schedule of this name over `ranks` ranks and `micros` micro-batches.

    Options: `chunks` per rank (interleaved, breadth_first), token `slices` (terapipe).
    """
    generator = find(name)
    for option in options:
        if option not in generator.options:
            takes = ", ".join(generator.options) or "no options"
            raise ValueError(f"The schedule {generator.name} has no option {option!r}. It takes {takes}.")
    if generator in GENERATORS:
        require(ranks, micros, **options)
    return generator.make(ranks, micros, **options)
