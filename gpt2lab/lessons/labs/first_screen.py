"""Record what the README's moving picture shows: `python -m gpt2lab.lessons.labs.first_screen` writes its file anew."""

import json
from pathlib import Path

from ...plots.moving import RECORD
from ...processes.launch import Ranks
from ...ranks import trace
from ...schedules import Cost
from ...verify import verify
from .recorded import WORK, pipeline_spans

PLAN, RANKS, MICROS = "pp=4,micro=8,schedule=1f1b", 4, 8


def record(path: Path = RECORD) -> None:
    """Run one paced step on live ranks and the comparison of its plan with serial GPT-2; write both as JSON."""
    cost = Cost(forward=WORK, backward=2 * WORK, hop=WORK / 3)
    with Ranks(RANKS, echo=False) as ranks:
        spans = trace.merge(ranks.run(pipeline_spans, "1f1b", MICROS, cost))
        report = verify(PLAN, rows=9, ranks=ranks)
    boxes = [[s.rank, s.name, s.kind, round(s.start, 4), round(s.end, 4)] for s in spans if s.lane == "work"]
    claims = [[c.name, c.digits] for c in report.claims]
    lines = ",\n".join(json.dumps(box) for box in boxes)
    rows = ",\n".join(json.dumps(claim) for claim in claims)
    path.write_text(f'{{"plan": "{PLAN}",\n"spans": [\n{lines}],\n"claims": [\n{rows}]}}\n')


if __name__ == "__main__":
    record()
