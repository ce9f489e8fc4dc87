"""What `gpt2lab plan` answers besides the plan: tokens a second, days, the line that launches it; what it is for."""

import json
import shlex
from types import SimpleNamespace

import pytest

from gpt2lab import cli
from gpt2lab.commands import train
from gpt2lab.commands.plan import count, launching_line, wired
from gpt2lab.machine.options import parser_of
from gpt2lab.machine.speed import flops_per_token
from gpt2lab.model import PRESETS
from gpt2lab.plan import Plan
from gpt2lab.planner.cost import predict
from gpt2lab.planner.problem import find_cluster
from gpt2lab.run import Options

NANO = ["plan", "--config", "nano", "--rows", "8", "--length", "64"]


def asked(capsys, *more) -> str:
    """What the command prints."""
    assert cli.main([*NANO, *more]) == 0
    return capsys.readouterr().out


def test_tokens_a_second_and_days_follow_from_the_seconds_of_a_step(capsys):
    best = json.loads(asked(capsys, "--cluster", "h100x64", "--ranks", "2", "--tokens", "2B", "--json"))[
        "best"
    ]
    rate = 8 * 64 / best["seconds"]
    assert best["tokens_a_second"] == pytest.approx(rate)
    assert best["tokens_a_second_and_rank"] == pytest.approx(rate / best["ranks"])
    assert best["days"] == pytest.approx(2e9 / rate / 86_400)
    used = flops_per_token(PRESETS["nano"], 64) * rate / best["ranks"] / 989e12
    assert best["mfu"] == pytest.approx(used)
    told = asked(capsys, "--cluster", "h100x64", "--ranks", "2", "--tokens", "2B")
    assert (
        f"{rate:,.0f} tokens a second" in told
        and f"MFU {used:.1%}" in told
        and "days for 2e+09 tokens" in told
    )
    assert "days" not in asked(capsys, "--cluster", "h100x64", "--ranks", "2")


@pytest.mark.parametrize(
    ("text", "number"), [("2T", 2e12), ("300b", 3e11), ("1.5e9", 1.5e9), ("1.5M", 1.5e6)]
)
def test_numbers_of_tokens_are_read(text, number):
    assert count(text) == number


def trained_by(line: str) -> Plan:
    """The plan that the command of a launching line trains with."""
    args = parser_of(train).parse_args(shlex.split(line.partition(" -m gpt2lab train ")[2]))
    assert (args.config, args.batch, args.sequence) == ("nano", 8, 64)
    plain = {} if args.chunked is None else {"chunked": args.chunked}
    return Options(config="nano", plan=args.plan, batch=8, sequence=64, dtype=args.dtype, **plain).the_plan()


@pytest.mark.parametrize(
    ("more", "begins", "dtype"),
    [
        (["--cluster", "laptop", "--ranks", "1"], "python -m gpt2lab train", "float32"),
        (["--cluster", "laptop", "--ranks", "4"], "torchrun --standalone --nproc-per-node ", "float32"),
        (["--cluster", "h100x64", "--ranks", "8", "--memory", "45MiB", "--cards", "4"],
         "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 2 ",
         "bfloat16"),
    ],
)  # fmt: skip
def test_the_line_that_launches_a_plan_trains_with_that_plan(more, begins, dtype, capsys):
    told = asked(capsys, *more)
    (line,) = (line.strip() for line in told.splitlines() if line.startswith("  launch: "))
    assert line.removeprefix("launch: ").startswith(begins) and f"--dtype {dtype}" in line
    assert str(trained_by(line)) == told.split(" ")[0]


def test_sums_beside_products_begin_in_order_on_gpus():
    args = SimpleNamespace(config="nano", precision="bf16", rows=8, length=64)
    line = lambda plan: launching_line(Plan.parse(plan), PRESETS["nano"], args, find_cluster("h100x64"))
    for plan, before in {
        "tp=2": "CUDA_DEVICE_MAX_CONNECTIONS=1 ",
        "dp=2": "",
        "dp=2,tp=2,zero=3": "",
    }.items():
        assert line(plan).startswith(f"launch: {before}torchrun ") and trained_by(line(plan)) == Plan.parse(
            plan
        )


def test_what_this_package_cannot_launch_is_said(capsys):
    assert "not launched: this package builds nano, mini" in asked(
        capsys, "--cluster", "h100x64", "--layers", "2"
    )
    without_zero = asked(capsys, "--cluster", "h100x64", "--ranks", "1")
    assert "not launched: this package has float32 masters beside bf16 only with ZeRO." in without_zero
    assert "launch: python" in asked(capsys, "--cluster", "h100x64", "--ranks", "1", "--precision", "bf16")


def test_wires_and_cards_of_ones_own_take_the_place_of_the_clusters(capsys):
    cluster = find_cluster("h100x64")
    found = wired(cluster, 4, 1.25e9)
    assert (found.network.node, found.network.between.bandwidth, found.devices) == (4, 1.25e9 / 4, 64)
    assert wired(cluster, None, None) == cluster
    with pytest.raises(
        ValueError, match="--between would change nothing: 8 ranks are on one machine. Leave it out."
    ):
        wired(cluster.with_devices(8), None, 1e9)
    assert (
        wired(cluster, 4, None).network.between == cluster.network.between
    )  # a network card a GPU, as before
    laptop = wired(find_cluster("laptop"), 2, 1e6)
    assert laptop.network.inside == find_cluster("laptop").network.between and laptop.network.node == 2
    price = lambda cluster: predict(Plan(dp=16), PRESETS["gpt2"], 16, 64, cluster, 2).seconds
    assert (
        price(wired(cluster, None, 1e9)) > 2 * price(cluster) > 2 * price(wired(cluster, 16, None))
    )  # one machine
