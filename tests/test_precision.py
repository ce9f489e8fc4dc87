"""Bytes of a precision and its rate belong together, and are those of papers and of other programs."""

import pytest

from gpt2lab import cli
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner import moments
from gpt2lab.planner.cost import predict
from gpt2lab.planner.memory import memory
from gpt2lab.planner.problem import CLUSTERS, EFFICIENCY, PRECISIONS, Device, find_cluster
from gpt2lab.planner.share import RankShare
from gpt2lab.schedules import Op

XL = PRESETS["gpt2-xl"]  # the model with which the ZeRO paper opens: 1.5 billion parameters
ZERO, MEGATRON = (PRECISIONS[f"bf16-mixed{more}"] for more in ("", "-fp32-grads"))


def bytes_a_parameter(plan: str, precision, rows: int = 1) -> float:
    """Weights, gradients and optimizer of a rank after its backward, over the model's parameters."""
    parsed = Plan.parse(plan)
    share = RankShare(parsed, XL, parsed.dp * rows, 8, precision[0], mixed=precision[1])
    walk = moments.Walk(share, 2, [0])
    for micro in range(parsed.micro):
        walk.forward(Op("F", 0, micro))
        walk.backward(Op("B", 0, micro))
    return sum(walk.now[part] for part in ("weights", "gradients", "optimizer")) / XL.parameters


@pytest.mark.parametrize("d", [4, 64])
@pytest.mark.parametrize(
    ("stage", "precision", "right"),
    [
        (0, ZERO, lambda d: 16),  # Rajbhandari et al. 2020, section 3.1: 2 + 2 + K, K = 12
        (1, ZERO, lambda d: 4 + 12 / d),  # their figure 1
        (2, ZERO, lambda d: 2 + 14 / d),
        (3, ZERO, lambda d: 16 / d),
        # Megatron Core's guide, "Distributed Optimizer": bf16 parameters, fp32 gradients
        (0, MEGATRON, lambda d: 18),
        (1, MEGATRON, lambda d: 6 + 12 / d),
        (0, PRECISIONS["float32"], lambda d: 16),  # the same table, fp32 parameters and gradients
        (1, PRECISIONS["float32"], lambda d: 8 + 8 / d),
        (0, PRECISIONS["bf16"], lambda d: 8),  # no masters: Micikevicius et al. 2018 say what that costs
    ],
)
def test_stages_of_zero_hold_the_bytes_a_parameter_that_papers_say(stage, precision, right, d):
    assert bytes_a_parameter(f"dp={d},zero={stage}", precision) == pytest.approx(right(d), rel=1e-4)


def test_the_opening_example_of_the_zero_paper_is_answered_as_there():
    """1.5 billion parameters need 24 GB before any activation, and a batch of 32 does not fit into a V100's 32 GB."""

    def need(plan, itemsize, mixed):
        return max(held.total for held in memory(Plan.parse(plan), XL, 32, 1024, itemsize, mixed=mixed))

    one_by_one = "micro=32,recompute=on,loss=chunked"  # of the sequences: hardly more
    assert 24e9 < need(one_by_one, *ZERO) < 32e9
    for whole in ("serial", "recompute=on"):
        assert need(whole, *ZERO) > 32e9
    # what the command said of 2-byte numbers before: half of the states, so that it "fits"
    assert need(one_by_one, 2, 0) < 14e9
    assert need("dp=8,zero=3,micro=4,recompute=on", *ZERO) < 8e9  # with ZeRO on eight of them


def test_numbers_have_the_rate_of_their_precision():
    config = GPT2Config(n_positions=2048, n_layer=4, n_head=16, n_embd=2048)
    ask = lambda name, itemsize: predict(Plan(), config, 1, 2048, CLUSTERS[name].with_devices(1), itemsize)
    for name, slower in (("h100x64", 989 / 67), ("a100x64", 312 / 19.5), ("v100x64", 125 / 15.7)):
        fast, slow = ask(name, 2), ask(name, 4)
        assert 0.6 * slower < slow.seconds / fast.seconds < slower
        assert slow.mfu > fast.mfu  # of the peak of its own precision
    assert Device(1.0).with_numbers(8) == Device(1.0)  # of one rate
    words = "No rate is known here for numbers of 1 bytes. Use numbers of 2 or 4 or 8"
    with pytest.raises(ValueError, match=words):
        CLUSTERS["h100x64"].device.with_numbers(1)


def test_float32_gradients_are_summed_in_four_bytes():
    asked = Plan(dp=8, zero=1), XL, 8, 64, CLUSTERS["h100x64"], 2
    four, two = (predict(*asked, mixed=mixed).sent["dp+cp"] for mixed in (4, 2))
    assert four / two == pytest.approx(1.5, rel=1e-6)  # the sum in 4 bytes, the new weights in 2


def test_old_words_and_wrong_ones_get_a_way_out(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--precision", "bf16-mixd"])
    assert "Did you mean bf16-mixed" in capsys.readouterr().err
    assert cli.main(["plan", "--precision", "bf16", "--run"]) == 2
    assert "--run trains in float32, not in bf16." in capsys.readouterr().err
    terapipe = ["--plan", "pp=2,schedule=terapipe", "--config", "nano", "--precision", "bf16-mixed"]
    assert cli.main(["memory", *terapipe]) == 2
    assert "has no formula of its memory, by which mixed precision" in capsys.readouterr().err


def test_gpus_train_in_mixed_precision_unless_told_otherwise(capsys):
    ask = ["plan", "--config", "nano", "--ranks", "2", "--rows", "2", "--length", "16"]
    for cluster, precision in (("h100x64", "bf16-mixed"), ("laptop", "float32")):
        assert cli.main([*ask, "--cluster", cluster]) == 0
        assert f", {precision}, " in capsys.readouterr().out


WORDS = {
    "machines": "2",
    "cards": "4",
    "memory": '"24GB"',
    "copy": "1e12",
    "peak": "{ bf16 = 165e12, float32 = 82e12 }",
    "inside": '"32GB"',
    "between": '"10gbit"',
}


def cluster(folder, **changes):
    """A file that says what a cluster has; what is None it does not say."""
    lines = [f"{word} = {value}\n" for word, value in (WORDS | changes).items() if value is not None]
    (folder / "mine.toml").write_text("".join(lines), errors="surrogateescape")
    return str(folder / "mine.toml")


def test_a_cluster_is_a_file(tmp_path):
    found = find_cluster(cluster(tmp_path))
    assert (found.devices, found.network.node, found.device.memory) == (8, 4, 24e9)
    assert found.network.between.bandwidth == 10e9 / 8 / 4 and found.device.rate == EFFICIENCY * 165e12
    assert found.device.with_numbers(4).peak == 82e12


WHOLE, DICT = "Use a whole number from 1 to 65,536.", "Use a dict of which each is a number of more than 0."
NO_CLUSTER = [  # a word, another value of it, and what is said
    ("cards", None, "does not say 'cards'. Use the words machines, cards, memory"),
    ("cart", "1", "cannot say 'cart'"),
    ("[a]\nb", "1", "mine.toml cannot say 'a'. Use the words machines, .*, without a heading."),
    ("memory", '"lots"', "mine.toml, memory: 'lots' is no size. Use for example 4GiB"),
    ("memory", "0", "mine.toml, memory: 0 is no size."),
    ("between", '"0gbit"', "mine.toml, between: '0gbit' is no size."),
    ("cards", "0", f"mine.toml says cards = 0. {WHOLE}"),
    ("cards", "'4'", f"mine.toml says cards = '4'. {WHOLE}"),
    ("cards", "4.0", f"mine.toml says cards = 4.0. {WHOLE}"),
    ("machines", "true", f"mine.toml says machines = True. {WHOLE}"),
    ("machines", "{}", f"mine.toml says machines = {{}}. {WHOLE}"),
    ("machines", "0", f"mine.toml says machines = 0. {WHOLE}"),
    ("peak", "165e12", f"says peak = 165000000000000.0. {DICT}"),
    ("peak", "{ bf16 = '165e12' }", f"mine.toml says peak = {{'bf16': '165e12'}}. {DICT}"),
    ("peak", "{ bf16 = 1, float32 = -82e12 }", f"peak = .*'float32': -82000000000000.0}}. {DICT}"),
    ("peak", "{ float32 = 0 }", f"mine.toml says peak = {{'float32': 0}}. {DICT}"),
    ("peak", "{ float32 = nan }", f"mine.toml says peak = {{'float32': nan}}. {DICT}"),
    ("peak", "{}", r"mine.toml has the precisions \[\]. Use one or more of float64,"),
    (
        "peak",
        "{ bf16 = 1, float31 = 1 }",
        r"has the precisions \['bf16', 'float31'\]. Use one or more of float64",
    ),
    ("efficiency", "2", "mine.toml says efficiency = 2. Use a number of more than 0, at most 1."),
    ("launch", "'x'", "mine.toml says launch = 'x'. Use a number of 0 or more."),
    ("machines", "[" * 10**5, "mine.toml cannot be read as a cluster: maximum recursion"),
    ("machines", "", "cannot be read as a cluster"),
    ("machines", '"\udcff"', "mine.toml cannot be read as a cluster: .* Use another file."),
]


@pytest.mark.parametrize("word, value, said", NO_CLUSTER, ids=[f"{w} {v}"[:30] for w, v, _ in NO_CLUSTER])
def test_a_file_that_is_no_cluster_is_refused_with_the_reason(word, value, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        find_cluster(cluster(tmp_path, **{word: value}))
    with pytest.raises(ValueError, match="none.toml cannot be read as a cluster: .* Use another file."):
        find_cluster(str(tmp_path / "none.toml"))
