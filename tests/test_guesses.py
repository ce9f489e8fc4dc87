"""Guesses before a result: asked for in every lesson that says Predict, taken in any front end, shown beside it."""

import ast
import re

import pytest

from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.lessons import guesses
from gpt2lab.lessons.guesses import predict

WIDGET = "application/vnd.jupyter.widget-view+json"
ASK = re.compile(r"\bPredict\b")


class Line:
    """What a front end shows, changed in place where the kernel says so."""

    def __init__(self, bundle, raw, display_id=None):
        self.id = display_id
        self.update(bundle, raw)

    def update(self, bundle, raw):
        self.bundle, self.text = bundle, bundle["text/markdown"]
        assert raw and not re.search(r"[*\\&]", bundle["text/plain"])


@pytest.fixture
def shown(monkeypatch):
    """What has been displayed, in order."""
    lines = []
    monkeypatch.setattr(
        "IPython.display.display", lambda *thing, **how: lines.append(Line(*thing, **how)) or lines[-1]
    )
    monkeypatch.setattr(guesses, "_clicked", {})
    return lines


def test_where_nothing_is_live_question_answers_and_result_are_text(shown):
    predict("How many?", "one", "two").beside("two", "counted")
    predict("How many?", "one", "two", mine="one").beside("two", "counted")
    predict("How many?", 1, 2, mine=2).beside(2, "computed")
    texts = [line.text for line in shown]
    assert texts[:2] == ["**Predict:** How many?", "○ one &emsp; ○ two"]
    assert shown[1].bundle == {"text/markdown": texts[1], "text/plain": "○ one  ○ two"}
    assert texts[2] == "It is **two** (counted). *No guess was given.*"
    assert texts[4] == "● one &emsp; ○ two"
    assert texts[5] == "You said **one**; it is **two** (counted)."
    assert texts[8] == "You said **2**, and so it is (computed)."
    assert str(predict("How many?", 1, 2)) == "nothing" and {line.id for line in shown} == {None}


@pytest.mark.parametrize(
    "mine, said",
    [
        (120, "You said **120 GB**; it is **31.4 GB** (computed), 3.82 times too much."),
        (3, "You said **3 GB**; it is **31.4 GB** (computed), 10.5 times too little."),
        (31, "You said **31 GB**; it is **31.4 GB** (computed), close."),
        (4_500.0, "You said **4,500 GB**; it is **31.4 GB** (computed), 143 times too much."),
        (44, "You said **44 GB**; it is **31.4 GB** (computed), 1.4 times too much."),
        (None, "It is **31.4 GB** (computed). *No guess was given.*"),
    ],
)
def test_a_number_is_compared_by_its_factor(shown, mine, said):
    predict("How much?", unit="GB", mine=mine).beside(31.4, "computed")
    assert shown[-1].text == said


def test_a_click_before_or_after_the_result_changes_its_line_and_is_remembered(shown, monkeypatch):
    import ipywidgets

    monkeypatch.setenv("GPT2LAB_STATIC", "0")
    made = []
    for kind in ("ToggleButtons", "BoundedFloatText"):
        make = getattr(ipywidgets, kind)
        monkeypatch.setattr(
            ipywidgets, kind, lambda *a, make=make, **k: made.append(make(*a, **k)) or made[-1]
        )
    guess = predict("Which?", "one", "two")
    assert shown[1].bundle[WIDGET]["model_id"] == made[0].model_id and made[0].value is None
    guess.beside("two", "counted")
    assert shown[2].id is True  # without one, its handle could change nothing
    for answer, words in (("one", "You said **one**; it is"), ("two", "You said **two**, and so it is")):
        made[0].value = answer
        assert shown[2].text.startswith(words) and len(shown) == 3
    assert predict("Which?", "one", "two").said == made[1].value == "two"
    number = predict("How many?", unit="GB")
    made[2].value = 5
    made[2].value = 0  # an empty field
    assert number.said == 5 and predict("How many?", unit="GB").said == made[3].value == 5


@pytest.mark.parametrize(
    "ask, words",
    [
        (lambda: predict("?", "a", "b", mine="c"), "'c' is none of the answers: 'a', 'b'"),
        (lambda: predict("?", "a", "b").beside("c", "counted"), "'c' is none of the answers: 'a', 'b'"),
        (lambda: predict("?", unit="GB", mine="much"), "a number of GB above 0, not 'much'"),
        (lambda: predict("?", unit="GB", mine=0), "a number of GB above 0, not 0"),
        (lambda: predict("?", unit="GB", mine=True), "a number of GB above 0, not True"),
        (lambda: predict("?", *"abcdef"), "two to five answers, or none and a unit; these are 6"),
        (lambda: predict("?", "a"), "two to five answers, or none and a unit; these are 1"),
        (lambda: predict("?"), "two to five answers, or none and a unit; these are 0"),
        (
            lambda: predict("?", "a", "b").beside("a", "guessed"),
            "'guessed' is no clock. Use one of: measured",
        ),
    ],
)
def test_what_is_no_answer_is_refused_with_the_answers(shown, ask, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ask()


# ---- in every lesson


def calls(text: str, name: str) -> list[ast.Call]:
    """The calls of this function or method in a cell."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [c for c in found if name in (getattr(c.func, "id", ""), getattr(c.func, "attr", ""))]


def faults(cells) -> list[str]:
    """Prompts that collect no guess, guesses that stand beside no result, and results that are typed."""
    found, asked, open_ = [], "", ""
    for cell in (c for c in cells if "wrong" not in c.tags):
        if cell.kind == "markdown":
            asked += f"\n{cell.text}" * bool(ASK.search(cell.text))
            continue
        text = cell.solved()
        if asked and not calls(text, "predict") and 'check("predict: ' not in text:
            found.append(f"no guess: {asked}")
        asked = ""
        for call in sorted(calls(text, "predict") + calls(text, "beside"), key=lambda c: c.lineno):
            if getattr(call.func, "id", "") == "predict":
                found += [f"no result: {open_}"] * bool(open_)
                open_ = ast.unparse(call)
            else:
                open_ = ""
                named = any(isinstance(node, ast.Name) for node in ast.walk(call.args[0]))
                found += [f"typed: {ast.unparse(call)}"] * (not named)
    return found + [f"no guess: {asked}"] * bool(asked) + [f"no result: {open_}"] * bool(open_)


@pytest.mark.parametrize("lesson", lessons_named(NOTEBOOKS, []), ids=lambda lesson: lesson.name)
def test_every_prompt_collects_a_guess_that_stands_beside_a_result_of_the_lesson(lesson):
    assert not faults(lesson.cells)


def test_a_prompt_without_a_guess_a_guess_without_a_result_and_a_typed_result_are_found(tmp_path):
    from gpt2lab.lessons.source import read_lesson

    def found(*cells):
        path = tmp_path / "07_small.py"
        path.write_text("\n\n".join(f"# %%{cell}" for cell in cells))
        return [fault.split(":")[0] for fault in faults(read_lesson(path).cells)]

    prompt, ask, look = (
        " [markdown]\n# **Predict** it.",
        '\ng = predict("?", 1, 2)',
        "\ng.beside(x, 'counted')",
    )
    assert found(prompt, ask, look) == [] and found(prompt, '\ncheck("predict: x", y)') == []
    assert found(prompt, "\nx = 1") == found(prompt) == ["no guess"]
    assert found(ask) == found(ask, ask, look) == ["no result"]
    assert found(ask, "\ng.beside(31.4, 'counted')") == ["typed"]
