"""Every schedule: complete, without deadlock, within its memory, equal to published formulas; as text and figure."""

import time
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab.commands import schedule as command
from gpt2lab.machine.options import parser_of
from gpt2lab.plots import schedule as plots
from gpt2lab.plots.style import png
from gpt2lab.schedules import (
    NAMES,
    Cost,
    Op,
    Schedule,
    ScheduleError,
    best_slices,
    check,
    draw,
    from_csv,
    make,
    simulate,
    summary,
    to_csv,
)
from gpt2lab.schedules.terapipe import latency, terapipe

# --- what papers promise: p ranks, m micro-batches, v chunks a rank


def makespan(name, p, m, forward=1, input_grad=1, weight_grad=1, v=2):
    """The time from the first start to the last end, or None where no paper gives it for these sizes."""
    tf, tb = forward, input_grad + weight_grad
    if name == "naive":
        return m * p * (tf + tb)
    if name in ("gpipe", "1f1b"):
        return (m + p - 1) * (tf + tb)
    if name == "interleaved" and m % p == 0 or name == "breadth_first" and m >= p:
        return m * (tf + tb) + Fraction((p - 1) * (tf + tb), v)
    if name == "chimera" and p % 2 == 0 and (tf == tb and m % p == 0 or 2 * tf == tb and m == p):
        return m * (tf + tb) + (p - 2) * tb
    return None


def messages(name, p, m, v=2, slices=2):
    """Activations and gradients sent from rank to rank in one step: one of each for every micro-batch and every border
    between stages on different ranks, p - 1; v p - 1 with v chunks; 2 (p - 1) along a V, whose middle is inside a rank.
    """
    borders = dict.fromkeys(("interleaved", "breadth_first"), v * p - 1)
    borders |= dict.fromkeys(("zb_v", "dualpipe_v"), 2 * (p - 1))
    return (p > 1) * 2 * m * borders.get(name, p - 1) * (slices if name == "terapipe" else 1)


def own_idle(
    name: str,
    p: int,
    m: int,
    forward: float = 1,
    input_grad: float = 1,
    weight_grad: float = 1,
    joint: float | None = None,
):
    """Idle time in a rank's own span, from its first start to its last end; None where none is published.

    For DualPipe and DualPipeV it is idle time in the makespan. Zero Bubble (Qi et al. 2023, Table 2) needs enough
    micro-batches, p for ZB-H1 and 2p - 1 for ZB-H2, and weight gradients no longer than the gaps that they fill.
    `joint` is DualPipe's time for a forward and a backward that overlap (DeepSeek-V3 2024, Table 2), m even and at
    least 2p; DualPipeV is DualPipe of 2p ranks, folded: its times are those of half a rank's share.
    """
    tf, ti, tw = forward, input_grad, weight_grad
    if name == "1f1b":
        return (p - 1) * (tf + ti + tw)
    if name == "zb_h1" and m >= p and tw <= tf:
        return (p - 1) * (tf + ti - tw)
    if name == "zb_h2" and m >= 2 * p - 1 and tw <= min(tf, ti):
        return (p - 1) * (tf + ti - 2 * tw)
    if name == "zb_v" and m >= 2 * p and tf == ti == tw:
        return 0
    if joint is not None and tw <= tf <= ti and m >= 2 * p:
        if name == "dualpipe" and p % 2 == m % 2 == 0:
            return (Fraction(p, 2) - 1) * (joint + ti + tw - 3 * tw)
        if name == "dualpipe_v":
            return (p - 1) * (joint + ti + tw - 3 * tw)
    return None


def peak_activations(name: str, p: int, m: int, rank: int, v: int = 2, slices: int = 2):
    """The most activations that a rank holds, counted in stages (a chunk, a token slice) and micro-batches.

    Exact where enough micro-batches fill the pipeline: m a multiple of p for interleaved and Chimera, m >= 2p
    for the V-shaped and dual schedules.
    """
    exact = {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(v * m, 2 * (p - 1 - rank) + (v - 1) * p + 1) if v > 1 else min(m, p - rank),
        "breadth_first": v * m,
        "zb_h1": min(m, p),
        "zb_h2": min(m, 2 * p - 1),
        "zb_v": min(2 * m, 2 * p),
        "chimera": min(p // 2, p - rank) + min(p // 2, rank + 1),
        "dualpipe": p + 1,
        "dualpipe_v": 2 * p + 1,
        "terapipe": m * slices,
    }
    return exact[name]


def peak_memory(name: str, p: int, rank: int) -> tuple[int, int] | None:
    """The peak of a rank of a zero-bubble schedule: (whole activations, micro-batches between I and W), or None.

    Qi et al. 2023, section 2.3, (p - i + 1) MB + (i - 1) MW and (2p - 2i + 1) MB + (2i - 2) MW with ranks counted from
    1; for enough micro-batches.
    """
    return {"zb_h1": (p - rank, rank), "zb_h2": (2 * p - 1 - 2 * rank, 2 * rank)}.get(name)


# --- the schedules beside the papers


RANKS, MICROS, TIMES = st.integers(1, 8), st.integers(1, 20), st.integers(1, 7)
QUICK = settings(max_examples=60, deadline=None)
CHUNKED = ("interleaved", "breadth_first")


def options(name, chunks, slices):
    return {"chunks": chunks} if name in CHUNKED else {"slices": slices} if name == "terapipe" else {}


@pytest.mark.parametrize("name", NAMES)
@given(p=RANKS, m=MICROS, chunks=st.integers(1, 4), slices=st.integers(1, 4))
@QUICK
def test_every_size_is_complete_and_finishes_within_its_promise(name, p, m, chunks, slices):
    schedule = check(make(name, p, m, **options(name, chunks, slices)))
    assert (schedule.ranks, schedule.micros, len(schedule.promise)) == (p, m, p)
    for rank in range(p):
        assert schedule.held(rank)[-1] == 0 if schedule.orders[rank] else True


@pytest.mark.parametrize("name", NAMES)
@given(p=RANKS, m=MICROS, chunks=st.integers(1, 3), slices=st.integers(1, 3))
@QUICK
def test_csv_reads_back_equal(name, p, m, chunks, slices):
    schedule = make(name, p, m, **options(name, chunks, slices))
    assert from_csv(to_csv(schedule)) == schedule


@pytest.mark.parametrize("name", NAMES)
@given(p=RANKS, m=MICROS, f=TIMES, i=TIMES, w=TIMES, hop=st.integers(0, 3), v=st.integers(1, 3))
@QUICK
def test_the_clock_keeps_every_dependency_and_never_beats_the_critical_path(name, p, m, f, i, w, hop, v):
    schedule = make(name, p, m, **options(name, v, 2))
    timeline = simulate(schedule, Cost(f, i, w, hop=hop))
    done = {(b.op if b.op.kind != "B" else b.op._replace(kind="I")): b for row in timeline.rows for b in row}
    assert len(done) == sum(map(len, schedule.orders))
    for row in timeline.rows:
        assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
        for box in row:
            for need in schedule.needs(box.op):
                away = schedule.placement[need.stage] != schedule.placement[box.op.stage]
                assert done[need].end + hop * away <= box.start
    assert timeline.makespan >= schedule.depth * (f + i)
    assert 0 <= timeline.span_bubble <= timeline.bubble < 1
    blocking = simulate(schedule, Cost(f, i, w, hop=hop, blocking=True))
    assert blocking.makespan >= timeline.makespan


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "breadth_first"])
@given(p=RANKS, m=MICROS, f=TIMES, b=TIMES, v=st.integers(1, 4))
@QUICK
def test_makespan_equals_the_formula(name, p, m, f, b, v):
    schedule = make(name, p, m, **options(name, v, 1))
    expected = makespan(name, p, m, f, Fraction(b, 2), Fraction(b, 2), v)
    if expected is None:
        return
    share = v if name in CHUNKED else 1
    timeline = simulate(schedule, Cost(Fraction(f, share), backward=Fraction(b, share)))
    assert timeline.makespan == expected
    if name in ("gpipe", "1f1b"):
        assert timeline.bubble == Fraction(p - 1, m + p - 1)
        assert timeline.bubble_over_ideal == Fraction(p - 1, m)


@pytest.mark.parametrize("twice", [False, True], ids=["equal times", "a backward takes two forwards"])
@given(half=st.integers(1, 6), units=st.integers(1, 4))
@QUICK
def test_chimera_has_its_published_bubble(twice, half, units):
    """Also with more micro-batches than stages, where times are equal."""
    p, m = 2 * half, 2 * half * (1 if twice else units)
    backward = 2 if twice else 1
    timeline = simulate(make("chimera", p, m), Cost(backward=backward))
    assert timeline.bubble == (p - 2) / (Fraction(3 * m, 2) + p - 2 if twice else Fraction(2 * m + p - 2))
    assert timeline.makespan == makespan("chimera", p, m, 1, Fraction(backward, 2), Fraction(backward, 2))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
@given(p=RANKS, extra=st.integers(0, 9), f=TIMES, i=TIMES, w=TIMES)
@QUICK
def test_zero_bubble_schedules_have_their_published_idle_time(name, p, extra, f, i, w):
    m = 2 * p - 1 + extra
    timeline = simulate(make(name, p, m), Cost(f, i, w))
    idle = max(timeline.span(r) for r in range(p)) - m * (f + i + w)
    promised = own_idle(name, p, m, f, i, w)
    if promised is None:
        assert w > min(f, i) and idle >= 0
    else:
        assert idle == promised


@given(p=RANKS, extra=st.integers(0, 9), t=TIMES)
@QUICK
def test_zb_v_has_no_bubble_where_all_times_are_equal(p, extra, t):
    timeline = simulate(make("zb_v", p, 2 * p + extra), Cost(t, t, t))
    assert timeline.span_bubble == 0 == own_idle("zb_v", p, 2 * p + extra, t, t, t)
    assert timeline.makespan == (6 * (2 * p + extra) + p - 1) * t  # two stages of three parts each


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
@given(half=st.integers(1, 4), extra=st.integers(0, 4), f=TIMES, i=TIMES, w=TIMES, saved=st.integers(0, 3))
@QUICK
def test_dualpipe_has_its_published_bubble(name, half, extra, f, i, w, saved):
    p, m = (2 * half, 4 * half + 2 * extra) if name == "dualpipe" else (half, 2 * half + extra)
    w, f, i = sorted((f, i, w))  # the paper's case: TW <= TF <= TI
    joint = max(f + i + w - saved, f, i + w)
    timeline = simulate(make(name, p, m), Cost(f, i, w, joint=joint))
    idle = max(timeline.makespan - timeline.busy(r) for r in range(p))
    assert idle == own_idle(name, p, m, f, i, w, joint)


def test_recomputation_adds_a_forward_to_every_backward():
    for name, factors in product(("1f1b", "zb_h1"), ((1,), (1, 3))):
        again = simulate(make(name, 4, 8), Cost(2, 3, 1, factors=factors, recompute=True))
        assert again == replace(simulate(make(name, 4, 8), Cost(2, 5, 1, factors=factors)), cost=again.cost)
    assert simulate(make("gpipe", 4, 8), Cost(1, backward=2, recompute=True)).makespan == (8 + 3) * (
        1 + 2 + 1
    )


@pytest.mark.parametrize("sizes, chunks", [((4, 5), 2), ((5, 7), 3)])
def test_a_block_whose_backward_waits_for_its_own_forward_runs_apart_and_no_other(sizes, chunks):
    timeline = simulate(make("interleaved", *sizes, chunks=chunks), Cost(joint=Fraction(5, 2)))
    pairs = [
        (a, b) for row in timeline.rows for a, b in pairwise(row) if (a.op.kind, b.op.kind) == ("F", "B")
    ]
    apart = [(a.op, a.end - a.start) for a, b in pairs if a.op.stage != b.op.stage and b.end - a.start != 2.5]
    assert apart == [(Op("F", 0, sizes[1] - 1), 1)]


def test_the_published_profiled_row_comes_out_to_four_decimals():
    """Qi et al. 2023, Tables 5 and 9: p = 8, m = 24."""
    cost = Cost(18.522, 18.086, 9.337, hop=0.601)
    found = {name: simulate(make(name, 8, 24), cost).span_bubble for name in ("1f1b", "zb_h1", "zb_h2")}
    assert {name: f"{bubble:.4f}" for name, bubble in found.items()} == {
        "1f1b": "0.2431",
        "zb_h1": "0.1585",
        "zb_h2": "0.1083",
    }


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(2, 8), rounds=st.integers(2, 4), v=st.integers(1, 4))
@QUICK
def test_peak_activations_and_messages_equal_the_formulas(name, p, rounds, v):
    p += p % 2 if name in ("chimera", "dualpipe") else 0
    m, sizes = p * rounds, {"v": v, "slices": v}
    schedule = make(name, p, m, **options(name, v, v))
    peaks = [schedule.peak(rank) for rank in range(p)]
    assert peaks == [peak_activations(name, p, m, rank, **sizes) for rank in range(p)]
    assert peaks == list(schedule.promise)
    assert sum(schedule.messages(r) for r in range(p)) == messages(name, p, m, **sizes)
    assert {schedule.weights(r) for r in range(p)} == {2 if schedule.copies == 2 else 1}


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
@given(p=RANKS, extra=st.integers(0, 9), share=st.fractions(0, 1, max_denominator=7))
@QUICK
def test_zero_bubble_schedules_have_their_published_peak_memory(name, p, extra, share):
    """Whole activations count 1, those between I and W any `share` of it."""
    schedule = make(name, p, 2 * p - 1 + extra)
    for rank in range(p):
        steps = zip(schedule.held(rank), schedule.waiting(rank), strict=True)
        whole, between = peak_memory(name, p, rank)
        assert max(held - waits + share * waits for held, waits in steps) == whole + share * between


def test_gpipe_needs_no_buffers_and_1f1b_one():
    check(make("gpipe", 4, 8), buffers=0)
    check(make("1f1b", 4, 8), buffers=1)


def changed(schedule, change):
    orders = [list(order) for order in schedule.orders]
    change(orders)
    return replace(schedule, orders=tuple(map(tuple, orders)))


def swap_first_backward(orders):
    orders[1].insert(0, orders[1].pop(orders[1].index(Op("B", 1, 0))))


MISTAKES = {
    "an operation is lost": (lambda o: o[1].pop(3), "stage 1 runs micro-batch 0 with F=1 B=0"),
    "an operation runs twice": (lambda o: o[1].append(o[1][0]), "1F0 runs 2 times"),
    "another rank's stage": (lambda o: o[1].append(o[0].pop()), "0B7 runs on rank 1, but stage 0 is on"),
    "a stage that is not there": (lambda o: o[1].append(Op("F", 9, 0)), "9F0 names stage 9 of 4"),
    "a micro-batch that is not there": (lambda o: o[1].append(Op("F", 1, 8)), "micro-batch 8 of 8"),
    "a kind that is not there": (lambda o: o[1].append(Op("X", 1, 0)), "1X0 has an unknown kind"),
    "the backward before the forward": (swap_first_backward, "Deadlock: .*rank 1 waits at 1B0 for 1F0"),
    "a forward too early for memory": (lambda o: o[0].insert(4, o[0].pop(5)), "rank 0 holds 5 .* 4 were"),
    "half a backward": (lambda o: o[1].__setitem__(o[1].index(Op("B", 1, 0)), Op("I", 1, 0)), "I=1 W=0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_checker_finds_a_mutant(mistake):
    change, message = MISTAKES[mistake]
    with pytest.raises(ScheduleError, match=message):
        check(changed(make("1f1b", 4, 8), change))


def test_the_checker_finds_a_micro_batch_in_the_wrong_copy_of_the_model():
    with pytest.raises(ScheduleError, match="4F0: micro-batch 0 does not pass stage 4. Remove it."):
        check(changed(make("chimera", 4, 4), lambda o: o[3].append(Op("F", 4, 0))))


@given(st.permutations(range(6)))
@QUICK
def test_any_forward_order_of_gpipe_is_right_only_if_all_ranks_agree_enough(order):
    """With the same order on both ranks nothing waits forever; the checker and the clock agree on any other."""
    forward = [tuple(Op("F", s, i) for i in order) for s in (0, 1)]
    backward = [tuple(Op("B", s, i) for i in sorted(order)) for s in (0, 1)]
    schedule = Schedule((forward[0] + backward[0], forward[1] + backward[1]), (0, 1), 6)
    check(schedule)
    assert simulate(schedule).makespan == 21


def test_a_published_name_is_taken():
    assert make("ZB-H1", 2, 2) == make("zb_h1", 2, 2)


@pytest.mark.rotates
@pytest.mark.parametrize("name", NAMES)
def test_64_ranks_and_512_micro_batches_are_generated_whole(name):
    seconds = []
    for _ in range(3):
        start = time.process_time()
        schedule = make(name, 64, 512)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2, seconds  # about 0.1 s; a margin for slow machines, against quadratic mistakes
    assert sum(map(len, schedule.orders)) >= 2 * 64 * 512


def test_pytorch_notation_with_idle_slots_and_joint_blocks_is_read():
    text = '0F0,,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1F0,1B0,"1F1",1B1,1F2,1B2\n'
    schedule = check(from_csv(text))
    assert (schedule.ranks, schedule.micros, schedule.copies) == (2, 3, 1)


def test_an_empty_line_is_an_idle_rank_and_slices_are_said_once():
    idle = from_csv("0F0,0B0\n\n1F0,1B0\n\n")
    assert idle.placement == (0, 2) and [idle.peak(rank) for rank in range(3)] == [1, 0, 1]
    sliced = make("terapipe", 2, 2, slices=3)
    bare = "\n".join(to_csv(sliced).splitlines()[1:])
    assert from_csv(bare, slices=3) == from_csv(to_csv(sliced), slices=3) == sliced
    with pytest.raises(ScheduleError, match="says slices=3, but slices=2 was asked for"):
        from_csv(to_csv(sliced), slices=2)
    assert from_csv(to_csv(sliced).replace("micros=2", "micros=two"), slices=3) == sliced  # any other comment


# --- as text, as figures, at the command line


def test_1f1b_is_drawn_as_text():
    assert draw(simulate(make("1f1b", 2, 3), Cost(backward=2))) == (
        "rank 0  | F0 F1 .. .. B0 -- F2 B1 -- .. B2 -- | holds 2\n"
        "rank 1  | .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. | holds 1"
    )


def test_fractions_and_floats_are_drawn_too():
    assert draw(simulate(make("1f1b", 2, 3), Cost(Fraction(1, 2), backward=1))) == draw(
        simulate(make("1f1b", 2, 3), Cost(backward=2))
    )
    assert "0F0" in draw(simulate(make("zb_v", 2, 4), Cost(0.5, 0.25, 0.3)))
    assert "7.5" in summary(simulate(make("1f1b", 2, 4), Cost(0.5, 0.5, 0.5)))
    for width in (32, 80):
        lines = draw(make("1f1b", 4, 64), width=width).splitlines()
        assert max(map(len, lines)) <= width and lines[0].endswith(" ... | holds 4")
    assert max(map(len, draw(make("1f1b", 4, 64), width=4).splitlines())) < 32


def test_what_takes_no_time_takes_no_column():
    assert draw(simulate(make("1f1b", 1, 2), Cost(0, 0.0, 0))) == "rank 0  |  | holds 1"
    assert draw(simulate(make("zb_h1", 2, 2), Cost(weight_grad=0))) == (
        "rank 0  | F0 F1 .. I0 .. I1 | holds 2\nrank 1  | .. F0 I0 F1 I1 .. | holds 2"
    )


def run_command(line):
    return command.run(parser_of(command).parse_args(line.split()))


@pytest.mark.parametrize("name", NAMES)
def test_the_command_draws_every_schedule(name, capsys, tmp_path):
    run_command(f"{name} --stages 4 --micro 8 --width 200")
    shown = capsys.readouterr().out
    assert shown.count("| holds") == 4 and "bubble" in shown
    run_command(f"{name} --csv")
    path = tmp_path / "own.csv"
    path.write_text(capsys.readouterr().out)
    run_command(f"{path} --width 200")
    assert capsys.readouterr().out == shown


def test_the_command_charges_recomputation(capsys):
    for option, end in (("", 33), (" --recompute", 44)):
        run_command("1f1b --stages 4 --micro 8" + option)
        assert f"makespan      {end}\n" in capsys.readouterr().out


@pytest.mark.rotates
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_figure(name):
    timeline = simulate(make(name, 3, 6))
    fig = plots.schedule(timeline, name, seen=[(0, 0.0, 1.5)])
    (ax,) = fig.axes
    peaks = [text.get_text() for text in ax.texts if text.get_ha() == "left"]
    assert peaks == [f"{float(timeline.schedule.activations(r)):.3g}" for r in range(3)]
    assert png(fig)[:4] == b"\x89PNG"


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
@QUICK
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
@QUICK
def test_the_simulated_forward_takes_the_published_latency(ranks, micros, slices):
    timeline = simulate(terapipe(ranks, micros, len(slices)), Cost(factors=slices))
    forward = max(box.end for row in timeline.rows for box in row if box.op.kind == "F")
    assert forward == latency(slices, ranks, micros)


def test_later_slices_get_fewer_tokens():
    best = best_slices(64, lambda length, context: length * (16 + 2 * context + length), ranks=8)
    assert best[0] > best[-1] and sum(best) == 64


def test_a_schedule_without_an_operation_takes_no_time():
    empty = simulate(Schedule(((), ()), (0, 1), 1))
    assert (empty.makespan, empty.bubble, empty.span_bubble, empty.bubble_over_ideal, empty.span(0)) == (
        0,
    ) * 5
