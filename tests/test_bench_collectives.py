"""The alpha-beta fit and the benchmark of collectives: right on synthetic times; no test asserts a measured one."""

import json

import numpy as np
import pytest
from scipy.stats import t as students_t

from gpt2lab import cli
from gpt2lab.benchmarks import collectives
from gpt2lab.planner.fit import fit, student
from gpt2lab.planner.links import Link, bandwidths
from gpt2lab.plots.collectives import blocks, sweep_figure

TRUE = Link(latency=40e-6, bandwidth=2e9)
SIZES = [1 << bits for bits in range(12, 25)]


def samples(noise: float, seed: int = 0):
    random = np.random.default_rng(seed)
    for size in SIZES:
        messages, sent = collectives.sent(4, size)
        yield messages, sent, TRUE.time(sent, messages) * (1 + noise * random.standard_normal())


def test_exact_times_give_the_link_back():
    found = fit(list(samples(0.0)))
    assert found.link.latency == pytest.approx(TRUE.latency, rel=1e-9)
    assert found.link.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-9)
    assert found.r2 == pytest.approx(1) and found.spread == pytest.approx(0, abs=1e-9)
    assert found.predict(6, 1e6) == pytest.approx(TRUE.time(1e6, 6))


def test_intervals_hold_the_truth_about_nineteen_times_of_twenty():
    inside = 0
    for seed in range(200):
        found = fit(list(samples(0.05, seed)))
        inside += found.latency[0] <= TRUE.latency <= found.latency[1]
        inside += found.bandwidth[0] <= TRUE.bandwidth <= found.bandwidth[1]
    assert 360 <= inside <= 397  # 380 expected of 400


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 11, 30, 200])
def test_students_t_equals_scipys(freedom):
    assert student(freedom) == pytest.approx(students_t.ppf(0.975, freedom), rel=2e-3)


def test_too_few_or_too_similar_samples_are_refused():
    with pytest.raises(ValueError, match="a line through 2 points"):
        fit([(1, 2, 3), (1, 3, 4)])
    with pytest.raises(ValueError, match="same bytes per message"):
        fit([(2, 10, 1), (2, 10, 2), (4, 20, 3)])


def rows(what="ring"):
    times = {size: TRUE.time(*reversed(collectives.sent(4, size))) for size in SIZES}
    return [
        {"what": name, "ranks": 4, "bytes": s, "seconds": t, "low": t, "high": t, "bus": 1.5 * s / t}
        for s, t in times.items()
        for name in ("all_reduce", what)
    ]


def test_the_model_is_fitted_to_half_of_the_sizes_and_predicts_the_others():
    found = collectives.model(rows(), "ring", 4)
    assert found["fit"].samples == 7 and len(found["predicted over measured"]) == 6
    assert all(ratio == pytest.approx(1) for ratio in found["predicted over measured"].values())
    assert collectives.model(rows()[:8], "ring", 4) is None


def test_a_trial_lasts_from_the_last_arrival_to_the_last_end():
    row = collectives.summary("ring", 2, 1000, [[(0.0, 5.0), (10.0, 12.0)], [(1.0, 4.0), (10.5, 12.5)]])
    assert row["seconds"] == (4.0 + 2.0) / 2
    assert row["bus"] == bandwidths("all_reduce", 2, 1000, 3.0)[1]


def test_the_command_prints_a_table_and_saves_figure_and_json(tmp_path, capsys):
    sizes = ["--sizes", *(str(s) for s in (512, 1024, 4096, 8192, 16384))]
    options = ["--ranks", "2", *sizes, "--trials", "2", "--ours", "ring", "--out", str(tmp_path)]
    assert cli.main(["bench", "collectives", *options]) == 0
    text = capsys.readouterr().out
    assert "bus GB/s" in text and "predicted / measured" in text and "latency" in text
    saved = json.loads((tmp_path / "collectives.json").read_text())
    assert len(saved["rows"]) == 5 * 5 and saved["models"]
    assert (tmp_path / "collectives.png").stat().st_size > 1000


def test_blocks_show_every_number_of_every_rank():
    fig = blocks([[1, 2], [3]], [[4], [5, 6, 7]], "x", owners=[[0], [None, 1, 1]])
    texts = [[t.get_text() for t in ax.texts] for ax in fig.axes]
    assert texts == [["1", "2", "3"], ["4", "5", "6", "7"]]
    assert sweep_figure(rows(), [collectives.model(rows(), "ring", 4)]).axes
