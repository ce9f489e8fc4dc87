"""The alpha-beta fit and the benchmark of collectives: right on synthetic times; no test asserts a measured one."""

import json

import numpy as np
import pytest

from gpt2lab import cli
from gpt2lab.benchmarks import collectives
from gpt2lab.benchmarks.races import RACES
from gpt2lab.machine.links import ALL_REDUCE, Link, bandwidths
from gpt2lab.machine.timing import together
from gpt2lab.planner.fit import fit
from gpt2lab.plots.collectives import blocks, sweep_figure

TRUE = Link(latency=40e-6, bandwidth=2e9)
SIZES = [1 << bits for bits in range(12, 25)]


def samples(noise: float, seed: int = 0):
    random = np.random.default_rng(seed)
    for size in SIZES:
        messages, sent = collectives.cost("ring", 4, size)
        yield messages, sent, TRUE.time(sent, messages) * (1 + noise * random.standard_normal())


def test_exact_times_give_the_link_back():
    found = fit(list(samples(0.0)))
    assert found.link.latency == pytest.approx(TRUE.latency, rel=1e-9)
    assert found.link.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-9)
    assert found.r2 == pytest.approx(1)


def test_intervals_hold_the_truth_about_nineteen_times_of_twenty():
    inside = 0
    for seed in range(200):
        found = fit(list(samples(0.05, seed)))
        inside += found.latency[0] <= TRUE.latency <= found.latency[1]
        inside += found.bandwidth[0] <= TRUE.bandwidth <= found.bandwidth[1]
    assert 360 <= inside <= 397  # 380 expected of 400


def rows(what="ring", n=4):
    """What would be measured if every algorithm took just what its formula says on the true link."""
    return [
        {"what": name, "ranks": n, "bytes": s, "seconds": t, "low": t, "high": t, "bus": 1.5 * s / t}
        for s in reversed(SIZES)
        for name in ("all_reduce", what)
        for t in [TRUE.time(*reversed(collectives.cost(name, n, s)))]
    ]


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("what", [*ALL_REDUCE, "all_reduce"])
def test_the_model_is_fitted_to_half_of_the_sizes_and_predicts_the_others(what, n):
    found = collectives.model(rows(what, n), what, n)
    if what not in ALL_REDUCE:
        found = collectives.model(rows(n=n), what, n)
    assert list(found["predicted over measured"]) == SIZES[1::2]
    assert all(ratio == pytest.approx(1) for ratio in found["predicted over measured"].values())
    assert found["fit"].link.latency == pytest.approx(TRUE.latency, rel=1e-6)
    assert found["fit"].link.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)


def test_a_model_needs_five_sizes_and_a_formula():
    assert collectives.model(rows()[:8], "ring", 4) is None
    without = [row | {"what": "hierarchical"} for row in rows()]
    assert collectives.model(without, "hierarchical", 4) is None


def test_what_samples_leave_open_is_called_undetermined():
    large = enumerate((1.1, 0.9, 1.1, 0.9, 1.0), start=1)
    noisy = fit([(6, i * 10**7, factor * i * 1e-2) for i, factor in large])
    assert noisy.undetermined == ("latency",) and "latency undetermined (95 %: below" in str(noisy)
    small = fit([(6, size, 1e-3 * factor) for size, factor in ((10, 1.1), (20, 0.9), (30, 1.1), (40, 1.0))])
    assert small.undetermined == ("bandwidth",) and "bandwidth undetermined (95 %: above" in str(small)
    steep = fit([(1, size, size**1.2) for size in (1, 2, 4, 8, 16)])  # a line through these begins below zero
    assert steep.undetermined == ("latency",)
    assert fit(list(samples(0.01))).undetermined == () and "r2 1.000" in str(fit(list(samples(0.0))))


def test_a_trial_lasts_from_the_last_arrival_to_the_last_end():
    times = together([[(0.0, 5.0), (10.0, 12.0)], [(1.0, 4.0), (10.5, 12.5)]])
    row = collectives.summary_row("ring", 2, 1000, times)
    assert row["seconds"] == (4.0 + 2.0) / 2
    assert row["bus"] == bandwidths("all_reduce", 2, 1000, 3.0)[1]


@pytest.mark.rotates
def test_the_command_prints_a_table_and_saves_figure_and_json(tmp_path, capsys):
    sizes = ["--sizes", *(str(s) for s in (512, 1024, 4096, 8192, 16384))]
    options = ["--ranks", "2", *sizes, "--trials", "2", "--ours", "ring", "--out", str(tmp_path)]
    assert cli.main(["bench", "collectives", *options]) == 0
    text = capsys.readouterr().out
    assert "GB/s of bus" in text and "predicted / measured" in text and "latency" in text
    saved = json.loads((tmp_path / "collectives.json").read_text())
    assert len(saved["rows"]) == 5 * 5 and saved["models"]
    assert (tmp_path / "collectives.png").stat().st_size > 1000


def test_no_two_operations_of_a_sweep_look_alike():
    names = [*collectives.LIBRARY, *RACES["collectives"].options["ours"]]
    shown = [{"what": n, "ranks": 2, "bytes": b, "seconds": 1.0, "bus": 1.0} for n in names for b in (4, 8)]
    assert len({line.get_color() for line in sweep_figure(shown).axes[1].lines}) == len(names)


def test_blocks_show_every_number_of_every_rank():
    fig = blocks([[1, 2], [3]], [[4], [5, 6, 7]], "x", owners=[[0], [None, 1, 1]])
    texts = [[t.get_text() for t in ax.texts] for ax in fig.axes]
    assert texts == [["1", "2", "3"], ["4", "5", "6", "7"]]
    assert sweep_figure(rows(), [collectives.model(rows(), "ring", 4)]).axes
