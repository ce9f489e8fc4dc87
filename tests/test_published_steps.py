"""Published steps and ours: sources' own numbers come out of their formulas, and no row has a constant of its own."""

import statistics

import pytest

from gpt2lab.lessons.labs import scaling
from gpt2lab.machine.speed import flops_per_token
from gpt2lab.planner import published_steps as published
from gpt2lab.planner.published_steps import KORTHIKANTI, MEGATRON, ROWS

QUICK = [row for row in ROWS if "interleaved" not in row.plan]


def row(name):
    return next(r for r in ROWS if r.name == name)


def test_table_1_of_narayanan_has_its_number_of_gpus_and_its_aggregate_petaflops():
    """The last column of the table: operations of all GPUs together."""
    printed = (4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0)
    devices = (32, 64, 128, 256, 512, 1024, 1536, 1920, 2520, 3072)
    rows = [r for r in ROWS if r.source == MEGATRON]
    assert tuple(r.devices for r in rows) == devices
    for r, whole in zip(rows, printed, strict=True):
        assert r.devices * r.teraflops / 1000 == pytest.approx(whole, rel=0.012)


def test_models_have_the_size_they_are_named_after():
    sizes = {
        "GPT 1.7B": 1.7e9,
        "GPT 146B": 145.6e9,
        "GPT 1T": 1008e9,
        "BLOOM 176B": 176.2e9,
        "Llama 3 405B": 405e9,
    }
    for name, size in sizes.items():
        layers, width, _, words = row(name).model
        assert 12 * layers * width**2 + words * width == pytest.approx(size, rel=0.04)


def test_korthikantis_mfu_follows_from_its_seconds():
    """The table prints 51.4 % and 56.3 % of the model's own operations, attention not halved."""
    for name, mfu in (("175B, sp", 0.514), ("1T, sp", 0.563)):
        r = row(name)
        layers, width, _, words = r.model
        flops = (
            72
            * r.rows
            * r.length
            * layers
            * width**2
            * (1 + r.length / 6 / width + words / 12 / layers / width)
        )
        assert flops / (r.seconds * r.devices * 312e12) == pytest.approx(mfu, abs=0.002)
        assert flops == pytest.approx(flops_per_token(r.config, r.length) * r.rows * r.length, rel=0.03)


def test_half_of_the_quick_rows_are_within_a_tenth_and_all_but_the_known_ones_within_a_quarter():
    """Llama's rows run on more stages than their source tells: V of its interleaving."""
    errors = {r.name: r.predicted().seconds / r.measured - 1 for r in QUICK}
    assert statistics.median(map(abs, errors.values())) < 0.1
    assert all(abs(e) < 0.25 for name, e in errors.items() if name != "Llama 3 405B, 16k"), errors
    assert 0.25 < errors["Llama 3 405B, 16k"] < 0.55


def test_the_efficiency_is_one_number_and_it_moves_every_row():
    for r in QUICK:
        assert r.predicted(0.35).seconds > 1.3 * r.predicted().seconds
    found = [published.cluster(r, 0.7).device for r in ROWS]
    assert all(device.rate == pytest.approx(0.7 * device.peak) for device in found)


def test_saving_the_second_forward_pays_in_print_and_in_prediction():
    slow, fast = (row(name) for name in ("1T, all again", "1T, sp"))
    assert slow.source == fast.source == KORTHIKANTI
    assert slow.measured / fast.measured == pytest.approx(
        slow.predicted().seconds / fast.predicted().seconds, rel=0.05
    )


def test_strong_scaling_ends_where_rows_end_and_data_parallelism_where_gradients_take_over():
    found = scaling.family("dp", "GPT-2 XL", lambda n: 512, (64, 512, 1024))
    assert "512 rows cannot be dealt to dp=1024" in found[1024]
    assert found[512].seconds > found[64].seconds / 4  # eight times the GPUs
    assert scaling.fits_memory(found[64]) and not scaling.fits_memory(
        scaling.family("dp", "175B", lambda n: 64, (64,))[64]
    )
    assert (
        "tp x pp x dp needs more than 8 GPUs" in scaling.family("tp x pp x dp", "175B", lambda n: 64, (8,))[8]
    )


def test_experts_cost_their_all_to_alls():
    rows = lambda n: 1024
    dense = scaling.family("ZeRO-1", "GPT-2 XL", rows, (64,))[64].seconds
    inside, across = (scaling.routed(ep, "GPT-2 XL", rows, (32, 64)) for ep in (8, 64))
    assert dense < inside[64] < across[64] and across[32] == "64 experts need 64 GPUs"
