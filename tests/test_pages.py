"""What is made from the lessons for readers and teachers: glossary, index by symptom, guide, and the pages' sources."""

import json
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import submissions
import torch

from gpt2lab.classroom import NOTEBOOKS, lessons_named, site
from gpt2lab.classroom.frames import _needed, draw_explorers
from gpt2lab.classroom.guide import guide, minutes, mistake_of, planned, reading, title
from gpt2lab.classroom.lighter import lighten, needed
from gpt2lab.classroom.site import bold, page, terms
from gpt2lab.lessons.answers import exercises, words_of
from gpt2lab.lessons.source import Cell, prose

LESSONS = lessons_named(NOTEBOOKS, [])
GLOSSARY = (NOTEBOOKS / "glossary.md").read_text()
SYMPTOMS = (NOTEBOOKS / "symptoms.md").read_text()

EMPHASIS = """stands at the end (sum forward, nothing backward) and|<Hx, y> = <x, H'y>|All at once|Backward|Forward
Further|(w/2) E H / k tokens a rank|Gradients|Interleaving|Next|Normalise once, sum everywhere|Predict|Without|Your turn
adds|all|along T|and play your messages again
at most 20|at most 3|batch|before|bit for bit|by name|checked|data or ZeRO last
equal to a serial program that reads the table|equal to autograd|free|in the whole sequence|last start to the last end
loss|loss curves|max(a, b)|maximum|no memory|not|once|order|pipeline first|same|sequence|sequence after tensor|sum
pipeline, tensor, sequence, context, data or ZeRO|sum of exponentials|sum over ranks|target's logit|two copies|unequal
memory|use|w = 2 (N-1) T / N²|whole|with the same bug"""
"""What lessons set in bold because it matters there, and not as a term."""


def texts(lesson):
    return prose(lesson.cells)


def unknown(text, glossary=GLOSSARY):
    """Terms that a text sets in bold and a glossary lacks; sentences and numbers are no terms."""
    plain = set(EMPHASIS.replace("\n", "|").split("|"))
    short = [b.strip() for b in bold(text) if not b.strip().endswith((".", ":", "?")) and not b[0].isdigit()]
    return [b for b in short if b.lower() not in terms(glossary) and b not in plain]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: x.name)
def test_every_term_that_a_lesson_sets_in_bold_is_in_the_glossary(lesson):
    assert unknown(texts(lesson)) == [], (
        "explain it in notebooks/glossary.md; a word that is no term: EMPHASIS here"
    )


def test_a_term_that_the_glossary_lacks_is_found():
    assert unknown("a **new word** and a **bubble**") == ["new word"]
    assert unknown("a **bubble**", GLOSSARY.replace("### bubble", "### froth")) == ["bubble"]


MOST_TERMS = 8


def emphasised(text):
    return re.findall(r"(?<![\w*])\*{1,2}([^*]{2,60}?)\*{1,2}(?![\w*])", " ".join(text.split()))


def introduced(lessons, glossary=GLOSSARY):
    """Lesson -> the terms that it sets in bold or italics before its first exercise, and no lesson before it does."""
    known, found = set(), {}
    names = terms(glossary)
    said = lambda text: {names[b] for b in (b.strip(" .:,").lower() for b in emphasised(text)) if b in names}
    for lesson in lessons:
        first = [i for i, cell in enumerate(lesson.cells) if "exercise" in cell.tags][0]
        found[lesson.name] = said(prose(lesson.cells[:first])) - known
        known |= said(prose(lesson.cells))
    return found


def test_no_lesson_brings_more_new_terms_before_its_first_exercise_than_it_may():
    found = introduced(LESSONS)
    assert {name: sorted(new) for name, new in found.items() if len(new) > MOST_TERMS} == {}
    assert sum(map(len, found.values())) > 25


def test_a_term_counts_where_it_is_first_emphasised_and_not_again():
    said = lambda name, *texts: SimpleNamespace(
        name=name, cells=[SimpleNamespace(kind=k, text=t, tags=g) for k, t, g in texts], prose=texts[0][1]
    )
    one = said("one", ("markdown", "a **Mesh**, a **word**", ()), ("code", "", ("exercise",)))
    two = said("two", ("markdown", "a **mesh**, a *bubble*", ()), ("code", "", ("exercise",)))
    assert introduced([one, two]) == {"one": {"mesh"}, "two": {"bubble"}}


@pytest.mark.parametrize("name", ["FSDP", "HSDP", "AFAB", "VPP", "CP", "EP", "TP-SP"])
def test_other_peoples_names_lead_to_ours(name):
    assert name.lower() in terms(GLOSSARY)


def shown_in(entry):
    """(lesson, heading) of the cells that an entry names."""
    return re.findall(r'\[(\d\d), "([^"]+)"\]\((\d\d_\w+)\.ipynb\)', entry)


def entries():
    return re.split(r"^### ", SYMPTOMS, flags=re.M)[1:]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.split("\n")[0])
def test_every_symptom_has_its_words_cause_mend_and_a_cell_that_is_there(entry):
    parts = re.findall(r"^- \*\*(.+?):\*\* \S", entry, re.M)
    assert parts == ["PyTorch", "Here", "Cause", "Mend", "Shown in"]
    found = shown_in(entry)
    assert found
    for number, heading, name in found:
        (lesson,) = [x for x in LESSONS if x.name == name]
        assert name.startswith(number)
        assert heading in re.findall(r"^#+ (.+)$", texts(lesson), re.M), f"{name} has no heading {heading!r}"


CONFUSIONS = """Mean of means|Divided twice, or not at all|`no_sync`|Pipeline and accumulation|A scaling bug that
The loss is there on the last|Fewer micro-batches|Clipping|Tied embeddings|One rank calls a collective|Uneven batches
"ZeRO-3 needs more memory|"DDP is slower|Learning rate against|`set_epoch`|Unused parameters|Does the order of the mesh
Seeds and dropout|A length, a head count|DualPipe against|Experts: doubled|Several machines|The estimate of memory
Why did the solver""".replace("\n", "|").split("|")
"""What learners stumble over, as found in public issues of other projects: an entry for each."""
FAULTS = [
    "A rank raises",
    "A rank is killed",
    "A rank hangs or leaves early",
    "Two ranks made",
    "A NaN",
    "A full disk",
]


def test_all_known_confusions_and_faults_are_indexed():
    assert len(CONFUSIONS) == 24
    for start in CONFUSIONS + FAULTS:
        assert len([entry for entry in entries() if entry.startswith(start)]) == 1, start


WORDS = re.compile(r"^- \*\*PyTorch:\*\* (.+)$", re.M)
NOT_HERE = {
    "Watchdog caught collective operation timeout",
    "Connection closed by peer",
    "CUDA out of memory.",
}
"""Words of the builds for GPUs."""
SAYS = "nn/utils/clip_grad distributed/pipelining/schedules distributed/tensor/_dispatch"
SAYS += " distributed/fsdp/_fully_shard/_fsdp_state"


def not_pytorchs(symptoms):
    """What is quoted as PyTorch's and stands neither in its sources nor in its library; ... is any name or number."""
    home, pieces = Path(torch.__file__).parent, set()
    for quote in re.findall(r"`([^`]+)`", "\n".join(WORDS.findall(symptoms))):
        if quote.count(" ") > 1 and quote not in NOT_HERE:
            pieces |= {p.strip() for p in quote.split("...") if len(p) > 5}
    sources = "".join((home / f"{name}.py").read_text() for name in SAYS.split())
    sources = re.sub(r"\"\n\s*f?\"|\\\n|`", "", sources)  # strings over several lines
    with (
        (home / "lib" / "libtorch_cpu.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        return {p for p in pieces if p not in sources and library.find(p.encode()) < 0}


@pytest.mark.rotates
def test_pytorchs_words_are_pytorchs_own():
    assert not_pytorchs(SYMPTOMS) == set()
    assert not_pytorchs(SYMPTOMS.replace("Timed out waiting", "Timed out here")) == {"Timed out here"}


def test_the_guide_has_all_that_the_lessons_say():
    whole = guide(LESSONS)
    for lesson in LESSONS:
        part = whole.split(f"\n## {title(lesson)}\n")[1].split("\n## ")[0]
        assert f"**Minutes:** {minutes(lesson)}: " in part
        for exercise in exercises(lesson):
            for wrong in exercise.wrong:
                assert f'{mistake_of(wrong)[0]} FAIL, saying "{words_of(wrong)}":'.strip() in part
        wrong = [w for e in exercises(lesson) for w in e.wrong]
        assert len({bool(mistake_of(w)[0]) for w in wrong}) == 1, (
            "a sentence at every wrong answer or at none"
        )
        assert part.split("### Exam questions")[1].count("*Answer:*") >= 2
        assert "**In 45 minutes, skip:**" in part and "**Depends on the machine:**" in part
        assert all(name in part.split("**In 45 minutes, skip:** ")[1] for name in planned(lesson)["skip"])


AT_HOME = re.compile(r"Drill|Questions|Read on|Appendix")


def in_class(lesson) -> list:
    """The cells for 45 minutes: without what is skipped (a heading with all under it, an exercise) or is for home."""
    skip, kept, level = planned(lesson)["skip"], [], 0
    titles = {e.cell.id: e.titles for e in exercises(lesson)}
    for cell in lesson.cells:
        for marks, name in re.findall(r"^(#+) (.+)$", cell.text, re.M) if cell.kind == "markdown" else ():
            if not level or len(marks) <= level:
                level = len(marks) if name in skip or AT_HOME.match(name) else 0
        if not level and not set(titles.get(cell.id, ())) & set(skip):
            kept.append(cell)
    return kept


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: x.name)
def test_what_is_skipped_by_hand_is_in_the_lesson_and_leaves_45_minutes(lesson):
    names = [name for _, name in re.findall(r"^(#+) (.+)$", prose(lesson.cells), re.M)]
    names += [title for e in exercises(lesson) for title in e.titles]
    skip = planned(lesson)["skip"]
    assert [name for name in skip if names.count(name) != 1] == [] and len(skip) == len(set(skip))
    left = in_class(lesson)
    assert 30 <= minutes(lesson, left) <= 45 < minutes(lesson) <= 180
    assert any("exercise" in cell.tags for cell in left), "at least one exercise belongs into the class"
    assert {"Drill", "Questions"} & {*re.findall(r"^## (.+)$", prose(lesson.cells), re.M)}
    assert not {"Drill", "Questions"} & {*re.findall(r"^## (.+)$", prose(left), re.M)}
    assert 0 <= planned(lesson)["seconds"] < 300


def test_minutes_follow_the_two_lessons_that_were_timed():
    timed = {"07": (100, 130), "17": (85, 95)}
    found = {lesson.name[:2]: minutes(lesson) for lesson in LESSONS}
    assert all(low <= found[name] <= high for name, (low, high) in timed.items())


def test_exam_questions_stand_in_no_notebook():
    questions = re.findall(r"^\d\. (.+)$", (NOTEBOOKS / "exam.md").read_text(), re.M)
    assert len(questions) >= 2 * len(LESSONS)
    said = "\n".join(path.read_text() for path in NOTEBOOKS.rglob("*.ipynb"))
    assert not [q for q in questions if json.dumps(q)[1:-1] in said]


def test_every_lesson_says_what_to_read():
    parts = re.split(r"^## ", reading(LESSONS), flags=re.M)[1:]
    assert len(parts) == len(LESSONS) and all(len(part.split()) > 5 for part in parts)
    assert not [part for part in parts if "**Next" in part]


def reading_list(lesson):
    """The entries of the list in a lesson's last cell: (what, why)."""
    last = lesson.cells[-1].text.partition("## Read on\n")[2].split("\n\n**Next")[0]
    entries = [" ".join(entry.split()) for entry in re.split(r"^- ", last, flags=re.M)[1:]]
    return [tuple(re.split(r": ", entry, maxsplit=1)) for entry in entries]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: x.name)
def test_the_last_cell_of_every_lesson_says_what_to_read_and_why(lesson):
    found = reading_list(lesson)
    assert len(found) >= 3
    for entry in found:
        assert len(entry) == 2 and len(entry[1].split()) >= 3, f"say in a few words why: {entry[0]}"
        assert re.search(r"\b(19|20)\d\d\b|BSC", entry[0]), f"author and year: {entry[0]}"


def test_a_page_shows_blank_exercises_with_solutions_folded_and_describes_every_figure():
    (lesson,) = lessons_named(NOTEBOOKS, ["07"])
    anchors = terms(GLOSSARY)
    made = page(lesson, anchors, {})
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    prompt = lambda cell: cell.metadata.get("mystnb", {}).get("code_prompt_show")
    folded = [cell for cell in code if prompt(cell) == "Show a solution"]
    imports = [cell.source for cell in code if prompt(cell) == "Show the imports"]
    assert imports and not [text for text in imports if "def " in text or "check(" in text]
    setup = [cell.source for cell in code if "setup" in cell.metadata.get("tags", ()) and not prompt(cell)]
    assert setup and not [text for text in setup if text.startswith(("import ", "from "))]
    assert len(folded) == len(exercises(lesson))
    assert [cell.source for cell in folded] == [e.cell.solved() for e in exercises(lesson)]
    for i, cell in enumerate(made.cells):
        if cell in folded:
            above = [c for c in made.cells[:i] if "<summary>Hint" not in c.source]
            assert "NotImplementedError" in above[-1].source  # no hint stands under a solution
        if any("image/png" in o.get("data", {}) for o in cell.get("outputs", ())):
            assert len(cell.metadata.mystnb.image.alt) > 10
    linked = re.findall(r"\(glossary\.md#([\w-]+)\)", "\n".join(cell.source for cell in made.cells))
    assert "bubble" in linked and len(linked) == len(set(linked)) and set(linked) <= set(anchors.values())
    assert f"work/{lesson.name}.ipynb" in made.cells[1].source
    nbformat.validate(made)


def test_pages_are_written_into_a_new_folder_or_that_of_the_last_time(tmp_path, monkeypatch, capsys):
    """The notebooks of any folder that was named were deleted."""
    written, new, other = [], tmp_path / "site", tmp_path / "work"
    monkeypatch.setattr(site, "write_pages", lambda folder, *_: written.append(folder))
    monkeypatch.setattr("sys.argv", ["site", str(new)])
    site.main()
    (new / "_static" / "frames").mkdir(parents=True)
    site.main()
    other.mkdir()
    (other / "07_mine.ipynb").touch()
    monkeypatch.setattr("sys.argv", ["site", str(other)])
    with pytest.raises(SystemExit) as ended:
        site.main()
    assert ended.value.code == 2 and written == [new, new]
    assert f"{other} holds other files, which would be deleted." in capsys.readouterr().err


EXPLORER = """
# %%
from gpt2lab.lessons import explore
from gpt2lab.plots.style import figure

low = 1

def draw(n, way):
    fig, ax = figure(2, 1)
    ax.plot([low, n])
    return fig

# %% tags=["ranks 2"]
low = "there, and not here"

# %%
explore(draw, "computed", "{n} by {way}.", "A line to {n}", n=(1, 9, 4), way=["up", "down"])
"""


def test_frames_vary_one_control_at_a_time(tmp_path):
    lesson = submissions.lesson(tmp_path, submissions.SOURCE + EXPLORER)
    ((explorer,),) = draw_explorers(lesson, tmp_path).values()
    assert [f["value"] for f in explorer["frames"]["n"]] == ["1", "3", "4", "5", "7", "9"]
    assert [f["value"] for f in explorer["frames"]["way"]] == ["up", "down"]
    assert explorer["start"] == {"n": 2, "way": 0}
    assert explorer["frames"]["n"][0]["caption"] == "Computed: 1 by up."
    assert explorer["frames"]["way"][1]["alt"] == "A line to 4"
    files = [f["file"] for frames in explorer["frames"].values() for f in frames]
    assert len(files) == 8 and len(set(files)) == 7
    assert all(Path(tmp_path, file).stat().st_size > 100 for file in files)


def test_of_cells_above_only_those_run_that_an_explorer_needs():
    texts = ["a = 1", "a, b = 2, 3\nc = b", "for b in range(3):\n    total = total + b", "use(a, lambda: c)"]
    cells = [Cell(str(i), "code", text, ()) for i, text in enumerate(texts)]
    assert _needed(cells[3], cells) == [cells[1], cells[3]]
    total = Cell("4", "code", "total = b = 0", ())
    assert _needed(cells[2], [total, *cells]) == [total, cells[2]]


def test_an_explorer_that_needs_a_stopwatch_or_fails_keeps_its_posters(tmp_path, capfd):
    for old, new, said in (
        ("# %%\nfrom", '# %% tags=["measured"]\nfrom', ""),
        ("ax.plot", "ax.plott", "no slider moves in cell"),
    ):
        lesson = submissions.lesson(tmp_path, submissions.SOURCE + EXPLORER.replace(old, new))
        assert draw_explorers(lesson, tmp_path) == {}
        error = capfd.readouterr().err
        assert said in error and bool(said) == ("has no attribute 'plott'" in error)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda x: x.name)
def test_drill_answers_are_folded(lesson):
    drill = re.split(r"^## (?:Drill|Questions)\s*$", texts(lesson), flags=re.M)[1]
    assert "<details>" in drill
    assert not re.search(r"[.)] [2-9]\. [A-Z]", drill), "an answer begins a line"


KEPT = [
    "a{color:red}",
    ".on b{x:y}",
    '.on[href$=".pdf"],#here:not(.off){content:"}.off{"}',
    ".on{mask:url(data:a;b,c)}",
    ".a\\/b{x:y}",
    "@media print{.on{x:y}}",
    "@keyframes off{to{x:y}}",
    '@import "x.css";',
]
DROPPED = [
    ".off{x:y}",
    ".on .off,#off{x:y}",
    "@media print{.off{x:y}}",
    "@font-face{src:url(../vendor/a.woff2)}",
    "/* .on{x:y} */",
]


def test_of_a_style_sheet_those_rules_stay_that_can_match():
    known = {"on", "here", "a/b"}
    assert needed("".join(KEPT), known).split("\n") == KEPT
    assert needed("".join(DROPPED), known) == ""
    assert needed(".on,.off , b{x:y}", known) == ".on,b{x:y}"


def test_a_built_page_asks_only_for_what_it_needs(tmp_path):
    names = [f"_static/{name}" for name in ("scripts/fontawesome.js", "searchtools.js", "pages.js")]
    for name in [*names, "_static/vendor/a.woff2", "_static/a.css", "_static/scripts/fontawesome.js.map"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('box.className = "made"')
    (tmp_path / "_static/a.css").write_text(".made{x:y}.there{x:y}.off{x:y}")
    head = "".join(f'<script defer src="{name}?digest=1"></script>' for name in names)
    for name in ("07.html", "search.html"):
        (tmp_path / name).write_text(head + '<b class="there">')
    lighten(tmp_path)
    lighten(tmp_path)  # a second time changes nothing
    asked = lambda page: re.findall(r'src="([^?]*)', (tmp_path / page).read_text())
    assert asked("07.html") == names[2:3] and asked("search.html") == names[1:3]
    assert (tmp_path / "_static/a.css").read_text() == ".made{x:y}\n.there{x:y}"
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["07.html", "a.css", "pages.js", "search.html", "searchtools.js"]
