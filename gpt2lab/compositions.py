"""Which strategies go together: the plans that the tests compare with the serial run, and a table made from them."""

from dataclasses import dataclass, replace

from .model import GPT2Config
from .plan import Plan
from .ranks.mesh import NAMES
from .verify import CONFIG

MEANING = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


@dataclass(frozen=True)
class Composition:
    """A plan that is tested, with the window or dropout of the model it is tested on."""

    plan: str
    window: int | None = None
    dropout: float = 0.0

    @property
    def config(self) -> GPT2Config:
        """The model: verification's odd sizes."""
        return replace(CONFIG, window=self.window, dropout=self.dropout)


PAIRS = (  # on 4 ranks
    Composition("pp=2,dp=2,micro=3"),
    Composition("pp=2,dp=2,micro=2,schedule=gpipe,zero=1"),
    Composition("pp=2,dp=2,micro=2,schedule=interleaved,zero=2"),
    Composition("pp=2,dp=2,micro=2,schedule=zb_h1,zero=3"),
    Composition("pp=2,dp=2,micro=2,schedule=dualpipe_v,recompute=on"),
    Composition("pp=2,cp=2,micro=3"),
    Composition("pp=2,cp=2,micro=2,schedule=zb_v,layout=zigzag,exchange=ring"),
    Composition("pp=2,cp=2,micro=2,schedule=chimera,exchange=halo-kv", window=3),
    Composition("pp=2,tp=2,micro=3", dropout=0.1),
    Composition("pp=2,tp=2,micro=3,sp=on", dropout=0.1),
    Composition("pp=2,tp=2,micro=2,schedule=interleaved"),
    Composition("pp=2,tp=2,micro=4,schedule=zb_h2,sp=on"),
    Composition("dp=2,cp=2", dropout=0.1),
    Composition("dp=2,cp=2,zero=3,layout=interleaved,exchange=heads"),
    Composition("dp=2,cp=2,zero=2,exchange=halo-x", window=3),
    Composition("dp=2,tp=2,micro=2", dropout=0.1),
    Composition("dp=2,tp=2,sp=on,zero=1"),
    Composition("dp=2,tp=2,sp=on,zero=2,recompute=on"),
    Composition("dp=2,tp=2,zero=3"),
    Composition("cp=2,tp=2,layout=zigzag,exchange=ring", dropout=0.1),
    Composition("cp=2,tp=2,sp=on,exchange=heads"),
)

TRIPLES = (  # on 8 ranks
    Composition("pp=2,dp=2,tp=2,micro=3,zero=1"),
    Composition("pp=2,dp=2,tp=2,micro=2,schedule=zb_h1,zero=3,sp=on"),
    Composition("pp=2,dp=2,cp=2,micro=3,layout=zigzag,exchange=ring"),
    Composition("pp=2,cp=2,tp=2,micro=2,schedule=interleaved,sp=on"),
    Composition("dp=2,cp=2,tp=2,zero=3,sp=on,layout=interleaved"),
)

ALL = (Composition("pp=2,dp=2,cp=2,tp=2,micro=2,zero=2,sp=on,layout=zigzag,exchange=ring"),)  # on 16 ranks
TESTED = (*PAIRS, *TRIPLES, *ALL)


def used(plan: Plan) -> list[str]:
    """The strategies that a plan uses, by name."""
    names = [MEANING[axis] for axis in NAMES if getattr(plan, axis) > 1]
    extra = {"sequence": plan.sp, f"ZeRO-{plan.zero}": plan.zero > 0, "recompute": plan.recompute}
    return names + [name for name, there in extra.items() if there]


def table(tested=TESTED) -> dict[tuple[str, str], list[str]]:
    """For each two strategies the tested plans that use both."""
    found: dict[tuple[str, str], list[str]] = {}
    for composition in tested:
        names = used(Plan.parse(composition.plan))
        for a in names:
            for b in names:
                found.setdefault((a, b), []).append(composition.plan)
    return found
