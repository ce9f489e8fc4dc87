"""A question before a result: `predict` takes the reader's guess, and `beside` shows it with what came out.

In JupyterLab the answers are buttons, or a field for a number. Everywhere else they are text, and `mine=` in the call
says which one is yours.
"""

import re
from dataclasses import dataclass, field
from math import isfinite

from .display import CLOCKS
from .environment import static

_clicked: dict[str, str | float] = {}  # by question, so that a cell that runs again remembers


@dataclass
class Guess:
    """What a reader says to a question: one of `answers`, or where there are none a number of `unit`."""

    question: str
    answers: tuple[str, ...]
    unit: str = ""
    said: str | float | None = None
    _shown: list = field(default_factory=list)  # the lines beside results, with what was found

    def __str__(self) -> str:
        return "nothing" if self.said is None else self._text(self.said)

    def say(self, said) -> None:
        """Take a guess, also after the result. Raises ValueError when it is none of the answers, or no number."""
        self.said = self._answer(said)
        for line, *result in self._shown:
            line.update(_text_in(self.line(*result)), raw=True)

    def beside(self, found, clock: str) -> None:
        """Show the guess beside `found`, which comes from the cell; `clock` says where from, one of display.CLOCKS."""
        from IPython.display import display

        if clock not in CLOCKS:
            raise ValueError(f"{clock!r} is no clock. Use one of: {', '.join(CLOCKS)}.")
        result = self._answer(found), clock
        line = display(_text_in(self.line(*result)), raw=True, display_id=None if static() else True)
        if line:
            self._shown.append((line, *result))

    def line(self, found, clock: str) -> str:
        """Guess and result in one line of Markdown."""
        if self.said is None:
            return f"It is **{self._text(found)}** ({clock}). *No guess was given.*"
        if self.said == found:
            return f"You said **{self}**, and so it is ({clock})."
        words = f"You said **{self}**; it is **{self._text(found)}** ({clock})"
        if self.answers:
            return f"{words}."
        factor = max(self.said / found, found / self.said)
        way = "much" if self.said > found else "little"
        return f"{words}, " + ("close." if factor < 1.05 else f"{factor:,.3g} times too {way}.")

    def choices(self) -> str:
        """The answers in a line, a full circle at what was said; of a number a line to write on."""
        marks = [f"{'●' if answer == self.said else '○'} {answer}" for answer in self.answers]
        return " &emsp; ".join(marks) or (f"\\_\\_\\_ {self.unit}" if self.said is None else str(self))

    def _answer(self, given) -> str | float:
        if self.answers:
            if str(given) not in self.answers:
                raise ValueError(f"{given!r} is none of the answers: {', '.join(map(repr, self.answers))}.")
            return str(given)
        if isinstance(given, str | bool) or not isfinite(given) or given <= 0:
            raise ValueError(f"Asked for is a number of {self.unit} above 0, not {given!r}.")
        return float(given)

    def _text(self, answer) -> str:
        if self.answers:
            return answer
        return f"{answer:,.0f} {self.unit}" if answer >= 1000 else f"{answer:.4g} {self.unit}"


def predict(question: str, *answers, unit: str = "", mine=None) -> Guess:
    """Ask for a guess: one of two to five answers, or without them a number of `unit`. `mine` is yours, if you like.

    Raises ValueError for another number of answers, and when `mine` is none of them.
    """
    from IPython.display import display

    if not (2 <= len(answers) <= 5 or unit and not answers):
        raise ValueError(f"Give two to five answers, or none and a unit; these are {len(answers)}.")
    guess = Guess(question, tuple(map(str, answers)), unit)
    mine = _clicked.get(question) if mine is None else mine
    if mine is not None:
        guess.say(mine)
    display(_text_in(f"**Predict:** {question}"), raw=True)
    display(_text_in(guess.choices()) | ({} if static() else _view(guess)), raw=True)
    return guess


def _text_in(markdown: str) -> dict:
    """Markdown, and the same for a screen that knows neither this nor widgets."""
    return {"text/markdown": markdown, "text/plain": re.sub(r"\*|\\|&emsp;", "", markdown)}


def _view(guess: Guess) -> dict:
    """A row of buttons or a field, as what a screen shows instead of text."""
    import ipywidgets

    if guess.answers:
        look = {"style": {"button_width": "auto"}, "layout": {"width": "100%"}}
        widget = ipywidgets.ToggleButtons(options=guess.answers, value=guess.said, **look)
    else:
        widget = ipywidgets.BoundedFloatText(
            guess.said or 0, min=0, max=1e15, step=None, description=guess.unit
        )

    def clicked(change):
        if change["new"]:
            guess.say(change["new"])
            _clicked[guess.question] = guess.said

    widget.observe(clicked, "value")
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}
