"""Schedules as text, as figures, at the command line; TeraPipe's dynamic programme."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab.commands import schedule as command
from gpt2lab.machine.options import parser_of
from gpt2lab.plots import schedule as plots
from gpt2lab.plots.style import png
from gpt2lab.schedules import NAMES, Cost, best_slices, draw, make, simulate, summary
from gpt2lab.schedules.terapipe import latency, terapipe


def test_1f1b_is_drawn_as_text():
    assert draw(simulate(make("1f1b", 2, 3), Cost(backward=2))) == (
        "rank 0  | F0 F1 .. .. B0 -- F2 B1 -- .. B2 -- | holds 2\n"
        "rank 1  | .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. | holds 1"
    )


def test_fractions_and_floats_are_drawn_too():
    assert "0F0" in draw(simulate(make("zb_v", 2, 4), Cost(0.5, 0.25, 0.3)))
    assert "7.5" in summary(simulate(make("1f1b", 2, 4), Cost(0.5, 0.5, 0.5)))
    assert draw(make("1f1b", 4, 64), width=80).splitlines()[0].endswith(" ... | holds 4")


def run(line):
    return command.run(parser_of(command).parse_args(line.split()))


@pytest.mark.parametrize("name", NAMES)
def test_the_command_draws_every_schedule(name, capsys, tmp_path):
    assert run(f"{name} --stages 4 --micro 8 --width 200") == 0
    shown = capsys.readouterr().out
    assert shown.count("| holds") == 4 and "bubble" in shown
    run(f"{name} --csv")
    path = tmp_path / "own.csv"
    path.write_text(capsys.readouterr().out)
    assert run(f"{path} --width 200") == 0
    assert capsys.readouterr().out == shown


def test_the_command_charges_recomputation(capsys):
    for option, makespan in (("", 33), (" --recompute", 44)):
        run("1f1b --stages 4 --micro 8" + option)
        assert f"makespan      {makespan}\n" in capsys.readouterr().out


def test_the_command_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="Deadlock"):
        run("1f1b --buffers 0")
    with pytest.raises(ValueError, match="Did you mean gpipe"):
        run("gpip")


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_figure(name):
    timeline = simulate(make(name, 3, 6))
    fig = plots.schedule(timeline, name, seen=[(0, 0.0, 1.5)])
    (ax,) = fig.axes
    peaks = [text.get_text() for text in ax.texts if text.get_fontsize() == 7 and text.get_va() == "top"]
    assert peaks == [f"{float(timeline.schedule.activations(r)):.3g}" for r in range(3)]
    assert png(fig)[:4] == b"\x89PNG"


def test_a_comparison_shows_each_schedule():
    fig = plots.side_by_side([("gpipe", 0.3, 0.3, 8.0, 1, 96), ("zb_h2", 0.2, 0.0, 7.0, 1, 96)])
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["gpipe", "zb_h2"]


def test_the_best_micro_batch_is_a_trade_of_speed_against_the_bubble():
    (ax,) = plots.micro_batches({1: 10.0, 4: 8.0, 16: 5.0}, ranks=4).axes
    *_, product = ax.lines
    assert list(product.get_ydata()) == pytest.approx([1 / 4, 0.8 * 4 / 7, 0.5 * 16 / 19])


def every_slicing(tokens):
    for count in range(tokens):
        for cuts in combinations(range(1, tokens), count):
            ends = (0, *cuts, tokens)
            yield [b - a for a, b in zip(ends, ends[1:], strict=False)]


def times(slices, time):
    return [time(n, sum(slices[:k])) for k, n in enumerate(slices)]


@given(
    tokens=st.integers(1, 10),
    ranks=st.integers(1, 6),
    micros=st.integers(1, 3),
    fixed=st.integers(0, 9),
    quadratic=st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_dynamic_programme_finds_what_brute_force_finds(tokens, ranks, micros, fixed, quadratic):
    time = lambda length, context: fixed + length * (4 + quadratic * (2 * context + length))
    best = best_slices(tokens, time, ranks, micros)
    assert sum(best) == tokens
    least = min(latency(times(s, time), ranks, micros) for s in every_slicing(tokens))
    assert latency(times(best, time), ranks, micros) == least


@given(
    ranks=st.integers(1, 6),
    micros=st.integers(1, 3),
    slices=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_the_simulated_forward_takes_the_published_latency(ranks, micros, slices):
    timeline = simulate(terapipe(ranks, micros, len(slices)), Cost(factors=slices))
    forward = max(box.end for row in timeline.rows for box in row if box.op.kind == "F")
    assert forward == latency(slices, ranks, micros)


def test_later_slices_get_fewer_tokens():
    best = best_slices(64, lambda length, context: length * (16 + 2 * context + length), ranks=8)
    assert best[0] > best[-1] and sum(best) == 64
