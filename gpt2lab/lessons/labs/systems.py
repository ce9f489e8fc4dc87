"""The table of systems: who proposed which technique for which models, with sources, and what is tested here."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OURS = "gpt2lab"


@dataclass(frozen=True)
class System:
    """A system, the kind of model that it is best for, and for each technique where that is said (ours: tested)."""

    name: str
    model: str
    paper: str
    ticks: dict[str, str]


@cache
def registry() -> dict:
    """The data file: {"techniques": {key: words}, "models": {key: words}, "system": [...], "ours": {...}}."""
    return tomllib.loads(Path(__file__).with_name("systems.toml").read_text())


def systems() -> list[System]:
    """All systems, model by model in the registry's order; in each group ours is the last."""
    data, found = registry(), []
    for model in data["models"]:
        found += [System(**one) for one in data["system"] if one["model"] == model]
        ours = data["ours"].get(model, {})
        ticks = {technique: f"{one['plan']}: {one['test']}" for technique, one in ours.items()}
        found += [System(OURS, model, "this package", ticks)] if ticks else []
    return found
