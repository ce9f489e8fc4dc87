"""Cells on live ranks: variables stay, each rank has a column, errors are those of launch and say what is lost."""

import pytest
from planting import is_killed

from gpt2lab import RankFailed, kept
from gpt2lab.lessons import on_ranks
from gpt2lab.lessons.on_ranks import RankCells, run_cell
from gpt2lab.lessons.source import read_lesson

pytestmark = pytest.mark.live

FIRST = """import torch
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

axis = Mesh(dp=2)["dp"]
x = torch.arange(2.0) + 10 * rank
"""


@pytest.fixture(scope="module")
def cells():
    cells = RankCells()
    cells.ranks_magic("2", FIRST)
    yield cells
    cells.stop()


def test_variables_stay_and_what_ranks_print_and_the_last_value_are_columns(cells, capsys):
    cells.ranks_magic(
        "2", "def total(t):\n    return comm.all_reduce(t, axis)\n\nprint('here')\ntotal(x).tolist()"
    )
    said = "rank 0         rank 1\nhere           here\n[10.0, 12.0]   [10.0, 12.0]\n"
    assert capsys.readouterr().out == said
    cells.ranks_magic("2", "y = total(x)\ny;")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "text, said",
    [
        ("'x' * 40 * (1 + rank)", f"[rank 0] {'x' * 40!r}\n[rank 1] {'x' * 80!r}\n"),
        (r"print('10 %\r20 %')", "[rank 0] 10 %\r20 %\n[rank 1] 10 %\r20 %\n"),
        (r"if rank: print('a\tb\n\nc')", "rank 1\na       b\n\nc\n"),
        (
            r"print('one' if rank else '1\n2', end='')",
            "rank 0   rank 1\n1        one\n2\n",
        ),
    ],
    ids=["too wide", "moves the cursor", "one rank alone", "of unequal length"],
)
def test_what_no_columns_can_show_comes_line_by_line(cells, text, said, capsys):
    cells.ranks_magic("2", text)
    assert capsys.readouterr().out == said


def test_some_ranks_alone_and_their_status(cells, capsys):
    cells.ranks_magic("1,", "own = rank, world_size\nown")
    assert capsys.readouterr().out == "rank 1\n(1, 2)\n"
    cells.ranks_magic("status")
    rank_0, rank_1 = capsys.readouterr().out.splitlines()
    assert "own" not in rank_0 and rank_1.startswith("rank 1 has Mesh, axis") and "own" in rank_1


@pytest.mark.parametrize(
    "line, cell, said",
    [
        ("0,2", "x", "Rank 2 is asked for, and 2 ranks are running. Write %%ranks 4"),
        ("five", "x", "'five' says nothing that ranks can do. Write %%ranks 4"),
        ("status", "x", "'status' says nothing"),
        ("4", None, "'4' says nothing"),
        ("0", "x", "ranks=0: the number of ranks"),
        ("1000000", "x", "'1000000' says nothing"),
    ],
)
def test_another_line_is_refused_and_the_ranks_stay(cells, line, cell, said, capsys):
    with pytest.raises(ValueError, match=said):
        cells.ranks_magic(line, cell)
    cells.ranks_magic("2", "x.numel()")
    assert capsys.readouterr().out == "rank 0   rank 1\n2        2\n"


@pytest.mark.parametrize(
    "text", ["y = (1,", "%time x", "!ls", "return x", "await x", " x = 1", "x\0", "'\ud800'"]
)
def test_what_is_no_python_is_told_before_any_rank_runs_it(cells, text, capsys):
    with pytest.raises((SyntaxError, ValueError)) as told:
        cells.ranks_magic("2", "print('ran')\n" + text)
    assert told.value.__notes__ == [on_ranks.PLAIN]
    cells.ranks_magic("2", "x.numel()")
    assert capsys.readouterr().out == "rank 0   rank 1\n2        2\n"


@pytest.mark.parametrize(
    "text, shown", [("5; # quiet", ""), ("5 # loud;", "5"), ("(5,\n'ä') ;", ""), ("'ä;'", "'ä;'")]
)
def test_a_semicolon_after_the_last_value_hides_it(cells, text, shown, capsys):
    cells.ranks_magic("0,", text)
    assert capsys.readouterr().out == f"rank 0\n{shown}\n" * bool(shown)


def test_an_error_names_the_rank_and_the_line_and_what_is_lost(capsys):
    cells = RankCells()
    with pytest.raises(ValueError, match="Rank 0 is asked for, and no rank is running"):
        cells.ranks_magic("0,", "x")
    cells.ranks_magic("2", "x = rank")
    with pytest.raises(RankFailed) as failed:
        cells.ranks_magic("2", "y = 1\nx / 0 if rank else None")
    assert failed.value.rank == 1 and failed.value.ename == "ZeroDivisionError"
    assert "line 3" in str(failed.value) and "x / 0 if rank" in str(failed.value)
    assert failed.value.__notes__ == [on_ranks.GONE]
    cells.ranks_magic("status")
    assert "No ranks are running." in capsys.readouterr().out
    cells.ranks_magic("2", "z = 1")
    assert capsys.readouterr().out == on_ranks.GONE + "\n"
    cells.ranks_magic("1", "rank")  # another number: new ranks
    assert capsys.readouterr().out == on_ranks.GONE + "\nrank 0\n0\n" and cells.ranks.size == 1
    cells.stop()
    assert cells.ranks is None


def test_a_notebook_has_the_magic(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    try:
        shell = InteractiveShell.instance()
        on_ranks.load()
        shell.run_line_magic("ranks", "status")
        assert capsys.readouterr().out.startswith("No ranks are running.")
    finally:
        InteractiveShell.clear_instance()
    on_ranks.load()  # nothing to do where no notebook is


def test_a_cell_tagged_so_begins_with_the_magic_in_notebooks(tmp_path):
    path = tmp_path / "07_small.py"
    path.write_text('# %% tags=["ranks 4"]\nx = 1\n')
    lesson = read_lesson(path)
    assert [lesson.notebook(student).cells[0].source for student in (True, False)] == ["%%ranks 4\nx = 1"] * 2
    path.write_text('# %% tags=["ranks four"]\nx = 1\n')
    with pytest.raises(ValueError, match="unknown tag 'ranks four'"):
        read_lesson(path)


def two_cells(capsys):
    kept.pop("cells", None)
    for text, chosen in (("a = 1", [0]), ("a + rank", [0]), ("a", [1])):
        run_cell(0, 1, on_ranks.compiled(text, 1), chosen)
    kept.pop("cells")
    assert capsys.readouterr().out == "1\n"


@pytest.mark.parametrize(
    "right, wrong",
    [
        ('if "cells" not in kept:', "if True:"),
        ("if rank not in chosen:", "if False:"),
        ("for code in codes:", "for code in codes[:1]:"),
        ('{"rank": rank,', '{"rank": 7,'),
    ],
    ids=["variables forgotten", "all ranks run it", "no value shown", "another rank's number"],
)
def test_a_mutant_of_a_cell_is_noticed(capsys, right, wrong):
    assert is_killed((run_cell, right, wrong), lambda: two_cells(capsys))
