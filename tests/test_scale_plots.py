"""The figures of lesson 19 show what they are given."""

from gpt2lab.plots import scale as plots


def test_bars_of_bytes_are_as_long_as_the_bytes():
    fig = plots.crossed({"inside": {"dp+cp": 2e6}, "across": {"dp+cp": 1e6, "tp": 3e6}})
    widths = [p.get_width() for p in fig.axes[0].patches]
    assert sorted(w for w in widths if w) == [1, 2, 3]
    assert [t.get_text().strip() for t in fig.axes[0].texts] == ["2.0 MB", "4.0 MB"]


def test_a_line_an_algorithm_in_milliseconds():
    ax = plots.all_reduces((8, 64), {"ring": (1e-3, 2e-3), "tree": (3e-3, 4e-3)}).axes[0]
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1, 2], [3, 4]]


def test_what_does_not_fit_is_hollow():
    ax = plots.scaling({"dp": {8: (2.0, False), 16: (1.0, True)}}, "s", "", lambda n: 16 / n).axes[0]
    marks = {
        line.get_xdata()[0]: line
        for line in ax.lines
        if line.get_marker() == "o" and len(line.get_xdata()) == 1
    }
    assert marks[8].get_markerfacecolor() == "white" != marks[16].get_markerfacecolor()


def test_an_error_is_a_dot_on_its_sources_line():
    rows = [("a", "x", 0.2), ("b", "y", -0.1), ("c", "y", 0.05)]
    ax = plots.beside_published(rows).axes[0]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [(d.get_xdata().tolist(), d.get_ydata().tolist()) for d in dots] == [
        ([20], [0]),
        ([-10, 5], [1, 1]),
    ]
    assert [t.get_text() for t in ax.texts] == ["a", "b"]  # of each source the row that is furthest off


def test_policies_are_lines_and_levels_and_stragglers_start_at_zero():
    ax = plots.goodputs((0, 4), {"hot spares": (0.2, 0.8)}, {"wait": 0.1}).axes[0]
    assert ax.lines[0].get_ydata().tolist() == [20, 80] and ax.lines[1].get_ydata() == [10, 10]
    ax = plots.stragglers((1, 8), {"3%": (1.0, 1.05)}).axes[0]
    assert [round(y, 6) for y in ax.lines[0].get_ydata()] == [0, 5]
