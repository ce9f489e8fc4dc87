"""The table of equality: every plan that is compared with the serial run, on which model, and how deep.

A line is a depth (`verify.DEPTHS`), a model, perhaps a batch (rows x tokens; else 7 x 11), and a plan; `{a|b}` stands
for a line with a and a line with b. Every strategy, schedule, exchange, router and kind of pair has a `full` line: five
updates by SGD and five by AdamW, with clipping. Where an option decides who updates what, the others are `steps` (two
updates by AdamW); where it only moves activations or gradients, losses, `gradients` and their norm say all. `muon` is
three updates by Muon, for each way in which its matrices may lie.
"""

import os
import re
from dataclasses import dataclass, replace
from itertools import product

from context_cases import config as twelve_heads
from tensor_cases import CONFIG as SMALL
from trained import NOISY, TINY

from gpt2lab.compositions import ALL, MEANING, PAIRS, TRIPLES, WITH_EXPERTS, WITHOUT_FLUSH, used
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.context.exchanges import EXCHANGES
from gpt2lab.plan import Plan
from gpt2lab.reference import CONFIG, EXPERTS
from gpt2lab.schedules import NAMES

MODELS = {
    "tiny": TINY,  # 3 layers
    "tiny-window": replace(TINY, window=3),
    "noisy": NOISY,  # 2 layers, dropout
    "odd": CONFIG,  # 5 layers, 4 heads
    "odd-noisy": replace(CONFIG, dropout=0.2),
    "experts": EXPERTS,
    "small": SMALL,  # 2 layers, 4 heads
    "small-noisy": replace(SMALL, dropout=0.1),
    "heads6": replace(SMALL, n_head=6),
    "heads12": replace(SMALL, n_head=12),
    "heads12-noisy": replace(SMALL, n_head=12, dropout=0.2),
    "uneven": GPT2Config(vocab_size=41, n_positions=16, n_layer=2, n_head=3, n_embd=15),
    "narrow": GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=4, n_embd=4),
    "one-layer": twelve_heads(),
    **{f"window{n}": twelve_heads(n) for n in (2, 3, 6)},
}

_HALOS = "|".join(name for name in EXCHANGES if name.startswith("halo"))
_WHOLE = "|".join(name for name in EXCHANGES if not name.startswith("halo"))
_SCHEDULES = "|".join(NAMES)

TABLE = {
    "each strategy": """
        steps tiny-window {dp=2,micro=2|dp=2,data=servers|dp=2,zero=1|dp=2,zero=2|dp=2,zero=3}
        steps tiny-window {tp=2|tp=2,sp=on|pp=2,micro=3|pp=2,micro=3,schedule=zb_h1,recompute=on}
        steps tiny-window cp=2,exchange={ring,layout=zigzag|heads|halo-kv}""",
    "data": """
        full odd serial
        steps odd-noisy loss=chunked{|,micro=3,recompute=on}
        full tiny dp=3,data={naive|bucket|server|servers}
        steps tiny dp={1|2|4|5},data={naive|bucket|server|servers}
        gradients {tiny|noisy} dp={2,micro=3|3,micro=2|2,micro=2,bucket=1,recompute=on|2,cp=2,bucket=1}
        gradients {tiny|noisy} dp=3,micro=2,data={naive|server|servers}
        gradients odd dp=3{|,micro=2|,recompute=on}""",
    "zero": """
        full tiny dp=3,{zero=1|zero=2|zero=3|zero=3,data=owner|zero=3,refill=on}
        steps tiny dp={1|2|4|5},{zero=1|zero=2|zero=3|zero=3,data=owner|zero=3,refill=on}
        steps {tiny|noisy} {dp=2,micro=3|dp=3,micro=2,recompute=on|dp=2,cp=2},{zero=1|zero=2|zero=3|zero=3,data=owner}
        steps odd dp=2,tp=2,{zero=1|sp=on,zero=2}
        steps odd pp=2,dp=2,micro=2,zero={1|3}
        steps odd {dp=3|dp=2,pp=2,micro=2,recompute=on},zero=3,loss=chunked
        steps noisy {dp=3,micro=2|dp=2,cp=2,exchange=ring|dp=2,tp=2,sp=on},zero=3,refill=on
        steps noisy {dp=2,loss=chunked|dp=4,shard=2},zero=3,refill=on
        full odd dp=4,zero={1|2|3},shard=2
        steps odd dp=4,zero=3,{shard=2,data=owner|shard=4|shard=2,loss=chunked,recompute=on|tp=2,shard=2,sp=on}
        steps odd {dp=2,cp=2,zero=3,shard=2,layout=zigzag,exchange=ring|cp=4,zero=2,shard=2|dp=6,zero=3,shard=3}
        steps odd pp=2,dp=4,zero=2,shard=2,micro=1,schedule=zb_h1
        steps noisy {dp=4,zero=3,shard=2|dp=2,cp=2,zero=1,shard=2}""",
    "tensor": """
        full heads12-noisy tp=2{|,sp=on}
        gradients heads12-noisy tp=4{|,sp=on}
        gradients small-noisy {dp=2,tp=2|tp=2,micro=3,recompute=on}{|,sp=on}
        gradients heads6 tp=3
        gradients heads12 tp=3,sp=on
        gradients small 2x{1|2|3|5|16} tp=4,sp=on
        steps uneven tp=3
        steps narrow tp=4""",
    "pipeline": f"""
        full odd pp=3,micro=5,schedule={{{_SCHEDULES}}}
        gradients odd pp={{2|4}},micro=5,schedule={{{_SCHEDULES}}}
        gradients odd-noisy pp=2,micro=3,schedule={{1f1b|zb_v|chimera|terapipe}}
        gradients odd pp=2,micro=3,schedule={{zb_h1,recompute=on|zb_v,loss=chunked|interleaved,chunks=3}}
        gradients odd pp=2,micro=2,schedule=terapipe,chunks={{5|3,recompute=on}}
        gradients odd pp=2,dp=2,micro=3,schedule=zb_v
        steps odd pp=2,dp=2,micro=2,schedule={{chimera,zero=2|1f1b,zero=3|zb_h1,zero=2}}
        gradients odd pp=2,tp=2,micro=3,schedule={{zb_h2|1f1b,sp=on}}
        gradients odd pp=2,tp=2,micro=2,schedule=dualpipe
        gradients odd pp=2,cp=2,micro=3,schedule=interleaved""",
    "context": f"""
        full small-noisy 4x11 cp=3,exchange={{qkv|kv|kv-allreduce|kv-roots|triangle|ring|double-ring}}
        full small-noisy 4x11 cp={{4,exchange=heads,layout=zigzag|2,exchange=ring,recompute=on}}
        full window3 3x11 cp=3,exchange={{{_HALOS}}}
        gradients one-layer 2x11 cp={{2,layout=unequal|2,layout=zigzag}},exchange={{{_WHOLE}}}
        gradients one-layer 2x11 cp={{3,layout=contiguous|3,layout=interleaved}},exchange={{{_WHOLE}}}
        gradients window6 2x11 cp={{2,layout=unequal|3,layout=contiguous}},exchange={{{_HALOS}}}
        gradients {{window3|window6}} 3x11 {{cp=3,exchange=halo-kv|cp=4,exchange=halo-x}}
        gradients {{window3|window6}} 3x11 cp=2,dp=2,exchange=halo-x-isend
        gradients small-noisy 4x11 dp=2,cp=2,exchange=ring,layout=interleaved,micro=2
        gradients odd 2x2 cp=3,loss={{whole|chunked}}""",
    "muon": """
        muon tiny {dp=2,micro=2|dp=2,data=servers|tp=2|tp=2,sp=on|cp=2,exchange=ring|dp=3,zero=3,data=owner}
        muon odd {serial|pp=3,micro=5|dp=2,tp=2|dp=2,cp=2|pp=2,tp=2,micro=2|tp=4|dp=4,zero=3,shard=2,data=owner}
        muon odd pp=2,dp=2,micro=2,schedule=chimera
        muon experts dp=2,ep=2,tp=2
        muon heads6 tp=3""",
    "without a flush": """
        full odd-noisy pp=3,micro=2,schedule={pipedream|ampnet,active=2}
        full odd-noisy pp=3,schedule=pipedream,recompute=on""",
}

# `make test-all`: every layout with every exchange on 2, 3 and 4 ranks.
SLOW = f"""
    full {{one-layer|window3}} 2x11 cp={{2|3|4}},layout={{contiguous|unequal|interleaved|zigzag}},exchange={{{_WHOLE}}}
    full {{window2|window6}} 2x11 cp={{2|3|4}},layout={{contiguous|unequal}},exchange={{{_HALOS}}}"""


@dataclass(frozen=True)
class Row:
    """One comparison: which strategy it is there for, how deep it goes, and what is run."""

    group: str
    depth: str
    name: str  # of the model
    plan: str
    config: GPT2Config
    rows: int = 7
    length: int = 11

    def __str__(self) -> str:
        size = "" if (self.rows, self.length) == (7, 11) else f" {self.rows}x{self.length}"
        return f"{self.group}: {self.depth} {self.name}{size} {self.plan}"


def spelled_out(line: str) -> list[str]:
    """The lines for which one with braces stands."""
    parts = re.split(r"\{([^}]*)\}", line)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def read(group: str, text: str) -> list[Row]:
    """The rows of a text of the table."""
    found = []
    for line in (one for lines in text.strip().split("\n") for one in spelled_out(lines)):
        depth, name, *batch, plan = line.split()
        sizes = [int(n) for n in batch[0].split("x")] if batch else []
        found.append(Row(group, depth, name, plan, MODELS[name], *sizes))
    return found


def composed(group: str, compositions, kinds=lambda one: {one.plan}) -> list[Row]:
    """Rows for compositions: at full depth where one is the first of a kind that it stands for, else `steps`."""
    met, found = set(), []
    for one in compositions:
        name = " ".join(["odd", one.router, "window" * bool(one.window), "noisy" * bool(one.dropout)]).split()
        depth = "steps" if kinds(one) <= met else "full"
        found.append(Row(group, depth, "-".join(name), one.plan, one.config))
        met |= kinds(one)
    return found


def _axes(composition) -> set:
    """The two axes of a plan, or its router and each axis beside that of experts."""
    names = [name for name in used(Plan.parse(composition.plan)) if name in MEANING.values()]
    return (
        {(composition.router, name) for name in names} | {composition.router}
        if composition.router
        else {(*names,)}
    )


ROWS = [
    *[row for group, text in TABLE.items() for row in read(group, text)],
    *composed("pairs", PAIRS, _axes),
    *composed("experts", WITH_EXPERTS, _axes),
    *composed("without a flush", WITHOUT_FLUSH, lambda one: {Plan.parse(one.plan).schedule}),
]
SLOW_ROWS = [*read("context", SLOW), *composed("three and four axes", (*TRIPLES, *ALL))]


def one_of_each_kind() -> list[Row]:
    """What runs over the other transports, as numbers are made above them: one row of each kind, with two updates."""
    return [replace(row, depth="steps") for row in ROWS if row.depth == "full"]


def rows() -> list[Row]:
    """The rows to run."""
    return one_of_each_kind() if os.environ.get("GPT2LAB_BACKEND") == "gloo" else ROWS
