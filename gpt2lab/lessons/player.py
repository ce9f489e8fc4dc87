"""The step player: a recorded run of live ranks, played, scrubbed and stepped through in the page itself.

It is one piece of HTML with an inline SVG and a script of its own, so it works in the lab and in any static page.
"""

import hashlib
import json
from importlib.resources import files

from ..plots import steps
from ..plots.style import COLORS, ink, rank_color
from .display import show


def play(run, clock: str, caption: str, alt: str) -> None:
    """Show a run of live ranks (per rank: spans, communication log) as a strip of pictures and as a player.

    `clock`, `caption` and `alt` are those of `show`. Keys: space plays, arrows step, Home and End jump.
    """
    from IPython.display import display

    show(steps.strip(run), clock, caption, alt)
    display({"text/html": html(run, alt), "text/plain": f"[player: {alt}]"}, raw=True)


def html(run, alt: str) -> str:
    """The player of a run as HTML that needs nothing else."""
    data = json.dumps(drawing_of(run), separators=(",", ":")).replace("<", "\\u003c")
    name = f"run-{hashlib.sha256(data.encode()).hexdigest()[:8]}"
    script = files(__package__).joinpath("player.js").read_text().replace("NAME", name).replace("DATA", data)
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return (
        f'<div id="{name}" tabindex="0" role="group" aria-label="{label}"></div>\n<script>\n{script}</script>'
    )


def drawing_of(run) -> dict:
    """What the script draws: times in milliseconds, colours, and the moments."""
    zero, end = steps.extent(run)
    ms = lambda t: round(1e3 * (t - zero), 1)
    bars = [
        (rank, s.name, COLORS[s.kind], ms(s.start), ms(s.end))
        for rank, (spans, _) in enumerate(run)
        for s in spans
        if s.lane == "work"
    ]
    sent = [(rank, ms(e.start), ms(e.end)) for rank, (_, log) in enumerate(run) for e in log if e.targets]
    look = lambda w: w and (w[0], COLORS[w[1]], ink(COLORS[w[1]]))
    every = [
        {
            "t": ms(zero + m.time),
            "work": [look(w) for w in m.work],
            "holds": m.holds,
            "sends": m.sends,
            "words": m.words,
        }
        for m in steps.moments(run)
    ]
    colors = [rank_color(rank) for rank in range(len(run))]
    return {
        "end": ms(end),
        "ranks": colors,
        "comm": COLORS["comm"],
        "bars": bars,
        "sent": sent,
        "moments": every,
    }
