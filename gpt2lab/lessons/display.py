"""Figures with captions, live sliders (in static pages: pictures), verdicts, tables, and source code, in a cell."""

import base64
import inspect
from html import escape

from .environment import static

CLOCKS = ("measured", "counted", "computed", "paced", "simulated", "from a paper", "drawing")
"""Where the numbers of a figure come from; every caption begins with one of these words."""
ENLARGED = """<style>
.gpt2lab-figure { display: block; overflow-x: auto; }
.gpt2lab-figure input { position: absolute; opacity: 0; }
.gpt2lab-figure img { max-width: 100%; height: auto; cursor: zoom-in; }
.gpt2lab-figure input:focus-visible + img { outline: 2px solid; }
.gpt2lab-figure input:checked + img { width: auto; max-width: none; cursor: zoom-out; }
</style>"""
"""A click on a figure, or the space bar, shows it at all the dots that it has, and back."""


def show(fig, clock: str, caption: str, alt: str) -> None:
    """Show a figure with alt text and one caption line that begins with `clock`, one of CLOCKS.

    The caption is visible text, because JupyterLab does not read alt text out. The figure has twice as many dots as it
    takes in; before a reader a click enlarges it.
    """
    from IPython.display import Markdown, display

    from ..plots.style import png  # only here: every rank that runs a lesson's function imports this file

    if clock not in CLOCKS:
        raise ValueError(
            f"{clock!r} does not say where the numbers come from. Use one of: {', '.join(CLOCKS)}."
        )
    words, width = f"[figure: {alt}]", round(fig.get_figwidth() * fig.dpi)
    fig.set_dpi(2 * fig.dpi)
    encoded = base64.b64encode(png(fig, colours=128 if static() else None)).decode()
    fig.set_dpi(fig.dpi / 2)
    if static():
        about = {"image/png": {"alt": alt, "width": width}}
        display({"image/png": encoded, "text/plain": words}, metadata=about, raw=True)
    else:
        source = f"data:image/png;base64,{encoded}"
        box = f'<img alt="{escape(alt)}" title="Click to enlarge" width="{width}" src="{source}">'
        box = f'{ENLARGED}<label class="gpt2lab-figure"><input type="checkbox" aria-label="enlarge">{box}</label>'
        display({"text/html": box, "text/plain": words}, raw=True)
    display(Markdown(f"*{clock.capitalize()}: {caption}*"))


def explore(draw, clock: str, caption: str, alt: str, posters=None, **controls) -> None:
    """Let the reader vary the arguments of `draw(**arguments) -> Figure`; without live widgets show posters.

    A control is (low, high, start), whole numbers or floats, for a slider, or a list of choices, the first of
    which is the start. `posters` lists arguments to draw instead in a static page; by default the starting
    values. Caption and alt text may name arguments in braces. In a static page both ends of every control are
    drawn as well, and thrown away, so that a control that breaks the figure is found by CI.
    """
    start = {name: _values(control)[2] for name, control in controls.items()}

    def picture(**arguments):
        show(draw(**arguments), clock, caption.format(**arguments), alt.format(**arguments))

    if static():
        for name, control in controls.items():
            for value in _values(control)[:2]:
                draw(**(start | {name: value}))
        for arguments in posters or [start]:
            picture(**(start | arguments))
        print(f"Open this lesson with `make lab` to vary {', '.join(controls)}.")
    else:
        _live(picture, controls)


def _values(control) -> tuple:
    """(first, last, start) of a control."""
    if isinstance(control, tuple):
        return control
    return control[0], control[-1], control[0]


def _live(picture, controls) -> None:
    import ipywidgets
    from IPython.display import display

    style = {"description_width": f"{max(map(len, controls))}ch"}  # sliders begin below each other
    widgets = {name: _widget(ipywidgets, name, control, style) for name, control in controls.items()}
    bar = ipywidgets.IntProgress(value=1, max=1, description="drawing")

    def drawn(**arguments):
        bar.layout.visibility = "visible"
        try:
            picture(**arguments)
        finally:
            bar.layout.visibility = "hidden"

    output = ipywidgets.interactive_output(drawn, widgets)
    beside = ipywidgets.Layout(flex_flow="row wrap", align_items="center")  # a narrow window puts them below
    display(ipywidgets.Box([output, ipywidgets.VBox([*widgets.values(), bar])], layout=beside))


def _widget(ipywidgets, name: str, control, style: dict):
    look = {"description": name.replace("_", " "), "style": style}
    if not isinstance(control, tuple):
        return ipywidgets.Dropdown(options=control, value=control[0], **look)
    low, high, start = control
    whole = all(isinstance(x, int) for x in control)
    kind, step = (ipywidgets.IntSlider, 1) if whole else (ipywidgets.FloatSlider, (high - low) / 50)
    return kind(min=low, max=high, step=step, value=start, continuous_update=False, **look)


def show_verdict(status: str, name: str, why: str) -> None:
    """Say PASS, TODO or FAIL of an exercise: in colour before a reader, as a line of text everywhere else."""
    from IPython import get_ipython
    from IPython.display import display

    rest = f": {why}" if why else ""
    line = f"{status}  {name}{rest}"
    if static() or get_ipython() is None:
        print(line)
        return
    from ..plots.style import VERDICTS  # imports matplotlib, as in `show`

    look = f"border-left: 6px solid {VERDICTS[status]}; padding: 0.3em 0.8em; white-space: pre-wrap"
    badge = f"background: {VERDICTS[status]}; color: #fff; padding: 0.1em 0.5em; border-radius: 3px"
    text = f'<b style="{badge}">{status}</b>  <b>{escape(name)}</b>{escape(rest)}'
    display({"text/html": f'<div style="{look}">{text}</div>', "text/plain": line}, raw=True)


def show_source(*objects) -> None:
    """Show the source of package functions or classes, each under the name of its file."""
    from IPython.display import Markdown, display

    for thing in objects:
        _, ours, rest = inspect.getsourcefile(inspect.unwrap(thing)).rpartition("/gpt2lab/")
        where = f"`gpt2lab/{rest}`\n" if ours else ""
        display(Markdown(f"{where}```python\n{inspect.getsource(thing).rstrip()}\n```"))


def table(rows, header, folded: str = "") -> None:
    """Show rows of values under a header; numbers are aligned right, floats printed with four digits.

    With `folded` the reader sees these words, and a click on them opens the table.
    """
    from IPython.display import Markdown, display

    rows = [list(row) for row in rows]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    lines = [header, ["--:" if r else ":--" for r in right], *([_text(v) for v in row] for row in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    before, after = (f"<details><summary>{folded}</summary>\n\n", "\n\n</details>") if folded else ("", "")
    display(Markdown(before + text + after))


def _text(value) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", r"\|")  # a bare one would end the cell
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
