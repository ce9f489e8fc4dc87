"""Which strategies go together: the plans that the tests compare with the serial run, and a table made from them."""

from dataclasses import dataclass, replace
from itertools import product

from .model import GPT2Config
from .plan import Plan
from .ranks.mesh import NAMES
from .reference import CONFIG, EXPERTS

MEANING = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor", "ep": "expert"}


@dataclass(frozen=True)
class Composition:
    """A plan that is tested, with the window or dropout of the model it is tested on, and the router of its experts."""

    plan: str
    window: int | None = None
    dropout: float = 0.0
    router: str = ""

    @property
    def config(self) -> GPT2Config:
        """The model: verification's odd sizes."""
        more = MORE.get(self.router, {})
        experts = replace(EXPERTS.experts, router=self.router, **more) if self.router else None
        return replace(CONFIG, window=self.window, dropout=self.dropout, experts=experts)


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

MORE = {  # what each router is tested with
    "switch": {"top_k": 1, "capacity": 1.0, "group": "batch"},
    "gshard": {"random_second": True},
    "mixtral": {"gated": True},
    "deepseek": {"speed": 0.05},
}
WITH_EXPERTS = (  # on 4 ranks
    Composition("dp=4,ep=4", router="mixtral"),
    Composition("dp=4,ep=2", router="deepseek"),
    Composition("dp=4,ep=2,data=naive", router="switch"),
    Composition("dp=4,ep=4", router="expert_choice"),
    Composition("dp=4,ep=2,zero=1", router="gshard"),
    Composition("dp=4,ep=2,zero=3", router="deepseek"),
    Composition("dp=4,ep=4,node=2,zero=3", router="gshard"),
    Composition("dp=2,ep=2,tp=2", router="mixtral"),
    Composition("dp=2,ep=2,tp=2,sp=on,zero=2,recompute=on", router="deepseek", dropout=0.1),
    Composition("dp=2,ep=2,cp=2", router="gshard", dropout=0.1),
    Composition("pp=2,dp=2,ep=2,micro=3,schedule=zb_h1,zero=2", router="deepseek"),
    Composition("pp=2,dp=2,ep=2,micro=2,schedule=interleaved,recompute=on", router="mixtral"),
    Composition("tp=4,sp=on", router="deepseek"),
)

TRIPLES = (  # on 8 ranks
    Composition("pp=2,dp=2,tp=2,micro=3,zero=1"),
    Composition("pp=2,dp=2,tp=2,micro=2,schedule=zb_h1,zero=3,sp=on"),
    Composition("pp=2,dp=2,cp=2,micro=3,layout=zigzag,exchange=ring"),
    Composition("pp=2,cp=2,tp=2,micro=2,schedule=interleaved,sp=on"),
    Composition("dp=2,cp=2,tp=2,zero=3,sp=on,layout=interleaved"),
    Composition("pp=2,dp=2,ep=2,tp=2,micro=2,sp=on,zero=2", router="deepseek"),
)

ALL = (Composition("pp=2,dp=2,cp=2,tp=2,micro=2,zero=2,sp=on,layout=zigzag,exchange=ring"),)  # on 16 ranks
WITHOUT_FLUSH = (  # equal not to the serial run, but to an emulator of their staleness
    Composition("pp=4,schedule=pipedream"),
    Composition("pp=4,schedule=ampnet"),
    Composition("pp=4,micro=4,schedule=2bw"),
    Composition("pp=3,micro=2,schedule=pipedream_vertical"),
    Composition("pp=2,dp=2,micro=2,schedule=pipedream", dropout=0.1),
    Composition("pp=2,dp=2,micro=2,schedule=2bw", dropout=0.1),
    Composition("pp=2,dp=2,schedule=ampnet,data=naive"),
    Composition("pp=2,tp=2,schedule=pipedream", dropout=0.1),
    Composition("pp=2,tp=2,micro=3,schedule=2bw,sp=on", dropout=0.1),
    Composition("pp=2,tp=2,schedule=ampnet"),
    Composition("pp=2,cp=2,schedule=pipedream,exchange=ring"),
)
TESTED = (*PAIRS, *WITH_EXPERTS, *TRIPLES, *ALL)


def used(plan: Plan) -> list[str]:
    """The strategies that a plan uses, by name."""
    names = [MEANING[axis] for axis in (*NAMES, "ep") if getattr(plan, axis) > 1]
    extra = {"sequence": plan.sp, f"ZeRO-{plan.zero}": plan.zero > 0, "recompute": plan.recompute}
    return names + [name for name, there in extra.items() if there]


def plans_by_pair(tested=TESTED) -> dict[tuple[str, str], list[str]]:
    """For each two strategies the tested plans that use both."""
    found: dict[tuple[str, str], list[str]] = {}
    for composition in tested:
        for pair in product(used(Plan.parse(composition.plan)), repeat=2):
            found.setdefault(pair, []).append(composition.plan)
    return found
