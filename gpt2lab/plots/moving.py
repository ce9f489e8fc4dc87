"""The README's moving picture: a recorded step of four live ranks, and the comparison with one rank after it.

An SVG whose parts are animated by CSS, so that it stays sharp, needs no script and moves inside an <img>. Who has asked
the system for less motion, and programs that show no motion, see its end.
"""

import json
from html import escape
from pathlib import Path

from .style import COLORS, RIGHT, ink, rank_color

RECORD = Path(__file__).parent / "recorded_step.json"
WIDTH, LEFT, TOP, ROW, LINE = 860, 74, 66, 40, 23  # in pixels
RUN, FIRST, EACH, LOOP = 6.0, 6.6, 0.45, 13.0
"""Seconds: the step, slowed down; when the first line of the comparison comes; from line to line; until it repeats."""

CSS = """
text { font: 13px Verdana, DejaVu Sans, sans-serif; fill: #222 }
.small { font-size: 11px; fill: #666 } .title { font-size: 15px; font-weight: bold }
.in { text-anchor: middle; font-size: 11px } .equal { fill: RIGHT; font-weight: bold }
.grow { transform-box: fill-box; transform-origin: 0 50% }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
""".replace("RIGHT", RIGHT)


def moving_step() -> str:
    """The picture as SVG text; the same record always gives the same text."""
    record = json.loads(RECORD.read_text())
    length = max(end for *_, end in record["spans"])
    ranks = 1 + max(span[0] for span in record["spans"])
    bottom = TOP + ROW * ranks
    picture = _Picture()
    picture.add(f'<text class="title" x="12" y="24">One training step of GPT-2 on {ranks} live ranks</text>')
    said = "1F1B, 8 micro-batches: recorded; computing paced to 30 and 60 ms, shown slowed down"
    picture.add(f'<text class="small" x="12" y="43">{said}</text>')
    _legend(picture)
    for rank in range(ranks):
        middle = TOP + ROW * rank + ROW / 2
        picture.add(f'<rect x="12" y="{middle - 8:g}" width="5" height="16" fill="{rank_color(rank)}"/>')
        picture.add(f'<text x="23" y="{middle + 5:g}">rank {rank}</text>')
        picture.add(f'<path d="M{LEFT} {middle + 17:g}H{WIDTH - 12}" stroke="#ddd"/>')
    scale = (WIDTH - LEFT - 12) / length
    for rank, name, kind, start, end in record["spans"]:
        x, y, wide = LEFT + start * scale, TOP + ROW * rank + 5, (end - start) * scale
        color, moves = COLORS[kind], picture.grows(start / length * RUN, end / length * RUN)
        box = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="28" rx="2" fill="{color}" stroke="white"'
        picture.add(f'<rect class="grow" {box} {moves}/>')
        if wide > 14:
            look = f'style="fill: {ink(color)}; {picture.appears(end / length * RUN)}"'
            picture.add(f'<text class="in" x="{x + wide / 2:.1f}" y="{y + 18}" {look}>{name[1:]}</text>')
    _comparison(picture, record, bottom + 26)
    return picture.svg(bottom + 26 + LINE * (len(record["claims"]) + 1))


def _legend(picture: "_Picture") -> None:
    for x, kind, word in ((600, "forward", "forward"), (690, "backward", "backward")):
        picture.add(f'<rect x="{x}" y="13" width="14" height="14" rx="2" fill="{COLORS[kind]}"/>')
        picture.add(f'<text class="small" x="{x + 20}" y="24">{word}</text>')


def _comparison(picture: "_Picture", record: dict, y: float) -> None:
    """A line for each claim, one after the other."""
    words = f"The same step on one rank, in float64, beside {record['plan']}: largest relative difference"
    picture.add(
        f'<text class="small" x="{LEFT}" y="{y}" style="{picture.appears(FIRST - EACH)}">{words}</text>'
    )
    for n, (name, digits) in enumerate(record["claims"]):
        y += LINE
        fade = picture.appears(FIRST + n * EACH)
        picture.add(f'<g style="{fade}"><text class="equal" x="{LEFT}" y="{y}">equal</text>')
        picture.add(f'<text x="{LEFT + 60}" y="{y}">{escape(name)}</text>')
        picture.add(f'<text x="{LEFT + 330}" y="{y}">{escape(digits)}</text></g>')


class _Picture:
    """Parts of an SVG and the animations that they ask for."""

    def __init__(self):
        self.parts, self.rules = [], {}

    def add(self, part: str) -> None:
        """Draw an element over what is there."""
        self.parts.append(part)

    def grows(self, start: float, end: float) -> str:
        """Attributes of a part that grows from its left side between two times of the loop, in seconds."""
        steps = f"0%,{_percent(start)}{{transform:scaleX(0)}}{_percent(end)},100%{{transform:scaleX(1)}}"
        return f'style="{self._rule(steps)}"'

    def appears(self, at: float) -> str:
        """The style of a part that is seen from this time of the loop on."""
        return self._rule(f"0%,{_percent(at)}{{opacity:0}}{_percent(at + 0.15)},100%{{opacity:1}}")

    def _rule(self, steps: str) -> str:
        name = self.rules.setdefault(steps, f"k{len(self.rules)}")
        return f"animation: {name} {LOOP:g}s linear infinite"

    def svg(self, height: float) -> str:
        """The whole file."""
        rules = "\n".join(f"@keyframes {name}{{{steps}}}" for steps, name in self.rules.items())
        size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        back = '<rect width="100%" height="100%" rx="8" fill="white"/>'
        return "\n".join([head, f"<style>{CSS}{rules}\n</style>", back, *self.parts, "</svg>", ""])


def _percent(seconds: float) -> str:
    return f"{100 * seconds / LOOP:.2f}%"
