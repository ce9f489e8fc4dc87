"""Networks as data: their weights are the published ones, and GPT-2 from the same data costs exactly what it costs."""

import json
from dataclasses import fields, replace

import pytest

from gpt2lab import cli
from gpt2lab.machine.speed import flops_per_token
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner import models, sends
from gpt2lab.planner.cost import predict
from gpt2lab.planner.gathers import gather_counts, reduce_counts
from gpt2lab.planner.kept import kept_by_dense_block
from gpt2lab.planner.memory import memory
from gpt2lab.planner.models import KINDS, MODELS, Transformer, find_model, network_of, units
from gpt2lab.planner.problem import CLUSTERS
from gpt2lab.planner.share import RankShare, check

H100 = CLUSTERS["h100x64"]
SMALL = Transformer(64, 32, 4, 8, 32, kv_heads=2, mlp=48, **KINDS["llama"])


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_as_many_as_published(name):
    said, config = MODELS[name]["parameters"], find_model(name)
    digits = len(said.partition("e")[0].partition(".")[2])
    assert round(config.parameters / 1e9, digits) == float(said) / 1e9
    assert MODELS[name]["source"]


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_of_tensor_ranks_holds_every_weight_once(name):
    config = replace(find_model(name), n_layer=4)
    for text in ("serial", "tp=8", "pp=4,tp=2"):
        plan, cut, whole = Plan.parse(text), 0, 0
        for stage in range(plan.pp):
            for tp in range(plan.tp):
                for p in RankShare(plan, config, 8, 128, pp=stage, tp=tp).parameters:
                    cut += p.elements * p.cut
                    whole += p.elements * (not p.cut and tp == 0)
        twice = config.vocab_size * config.n_embd * (config.tied and plan.pp > 1)
        assert cut + whole - twice == config.parameters, text


PLANS = (
    "serial", "micro=4,recompute=on,loss=chunked", "dp=2,zero=3", "dp=4,zero=2,micro=2,shard=2", "tp=4,sp=on,micro=2",
    "pp=4,dp=2,micro=8,schedule=zb_h1,zero=1", "pp=2,tp=2,micro=4,sp=on,schedule=zb_h1", "pp=2,dp=2,zero=3,micro=2",
    "cp=4,tp=2", "cp=4,exchange=heads", "cp=4,layout=zigzag,exchange=ring,micro=2", "pp=2,micro=2,recompute=on",
)  # fmt: skip


@pytest.mark.parametrize("text", PLANS)
def test_gpt2_from_the_data_of_networks_costs_exactly_what_it_costs(text):
    plan = Plan.parse(text)
    for name in ("nano", "gpt2", "gpt2-xl"):
        config = replace(PRESETS[name], vocab_size=5000, n_head=8)
        assert predict(plan, units(config), 16, 128, H100, 2) == predict(plan, config, 16, 128, H100, 2)
        assert memory(plan, units(config), 16, 128) == memory(plan, config, 16, 128)
        assert units(config).parameters == config.parameters
        assert units(config).flops_per_token(99) == flops_per_token(config, 99)


def test_what_differs_from_gpt2_is_counted():
    plain, share = Transformer(64, 32, 4, 8, 32), RankShare(Plan(), SMALL, 2, 32, 2)
    # two norms' inputs and outputs, a root mean square of each where GPT-2 has two numbers; q, k, v; attention and its
    # sums of 8 heads; the gate, what it gates, their product, and the gate's sigmoid unit
    numbers = 4 * 32 + 4 + 32 + 2 * 8 + 32 + 8 + 4 * 48
    assert kept_by_dense_block(share, 2, 32) == 2 * 64 * numbers
    assert SMALL.multiplied == 32 * 32 * 2 + 2 * 32 * 8 + 3 * 32 * 48
    assert SMALL.parameters == 2 * 64 * 32 + 4 * (SMALL.multiplied + 2 * 32) + 32
    assert SMALL.flops_per_token(0) == 6 * (SMALL.parameters - 64 * 32)  # the embedding is looked up
    four = replace(SMALL, mlps=4, active=2)
    assert four.block - SMALL.block == 3 * 3 * 32 * 48 + 4 * 32  # three more, and a router
    assert four.flops_per_token(0) - SMALL.flops_per_token(0) == 6 * 4 * (3 * 32 * 48 + 4 * 32)
    borrowed = lambda config: sends.by_axis(sends.sends(RankShare(Plan(cp=4), config, 2, 32)))["cp"]
    assert borrowed(SMALL)[0] * 4 == borrowed(plain)[0] and borrowed(SMALL)[1] == borrowed(plain)[1]


def test_a_head_of_its_own_is_at_the_last_stage_and_tied_to_nothing():
    plan = Plan.parse("pp=2,dp=2,micro=2,zero=3")
    first, last = (RankShare(plan, SMALL, 8, 32, pp=stage) for stage in (0, 1))
    for share, has, lacks in ((first, "wte", "lm_head"), (last, "lm_head", "wte")):
        assert (has, False) in share.sizes and (lacks, False) not in share.sizes
        assert gather_counts(share)[has, False] and reduce_counts(share)[has, False] == 2
        assert "tie" not in sends.by_axis(sends.sends(share))
    one, tied = (memory(Plan(), replace(SMALL, tied=tied), 2, 32)[0] for tied in (False, True))
    more = {part: one.parts[part] - tied.parts[part] for part in ("weights", "optimizer")}
    assert more == {"weights": 4 * 64 * 32, "optimizer": 8 * 64 * 32}


@pytest.mark.parametrize(
    "text", ["serial", "micro=2", "dp=2,zero=1", "dp=2,zero=2,micro=2", "dp=2,zero=3,micro=2", "pp=2,micro=4"]
)
def test_memory_grows_by_what_a_head_of_its_own_holds(text):
    """Sixteen bytes a weight in float32 on one rank, less where they are shared out; never less than tied."""
    plan = Plan.parse(text)
    for own, tied in zip(
        *(memory(plan, replace(SMALL, tied=tied), 8, 32) for tied in (False, True)), strict=True
    ):
        assert 0 <= own.total - tied.total <= 20 * 64 * 32


def test_heads_of_keys_decide_how_far_attention_is_cut():
    for text in ("tp=4", "cp=4,exchange=heads", "tp=2,cp=2,exchange=heads"):
        with pytest.raises(ValueError, match="2 heads of keys cannot be split over 4 ranks. Use a divisor."):
            check(Plan.parse(text), SMALL, 8, 32)
    check(Plan.parse("tp=2,cp=4"), SMALL, 8, 32)


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
         "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
        "n_inner": None}  # fmt: skip


def test_a_config_of_hugging_face_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    found = find_model(str(tmp_path / "config.json"))
    assert all(getattr(found, f.name) == getattr(PRESETS["gpt2"], f.name) for f in fields(GPT2Config))
    found = network_of(LLAMA, "x")
    assert (found.kv_heads, found.mlp, found.gated, found.tied, found.bias) == (2, 96, True, False, False)
    assert network_of(LLAMA | {"tie_word_embeddings": True}, "x").tied
    mixtral = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert (network_of(mixtral, "x").mlps, network_of(mixtral, "x").active) == (4, 2)
    assert not network_of(GPT2 | {"tie_word_embeddings": False}, "x").tied


def test_the_published_config_of_bloom_is_read_in_its_own_words():
    """Those of 2022, and those of later files: n_embed or hidden_size, n_head or num_attention_heads, seq_length."""
    words = {"model_type": "bloom", "n_layer": 70, "vocab_size": 250880, "seq_length": 2048, "n_inner": None}
    for names in (("n_embed", "num_attention_heads"), ("hidden_size", "n_head")):
        assert network_of(words | dict(zip(names, (14336, 112), strict=True)), "x") == find_model(
            "bloom-176b"
        )


NO_CONFIG = [  # words in place of those of LLAMA, or the file itself, and what is said
    ({"model_type": "bert"}, "is of the kind (model_type) 'bert', which is not known here. Use gpt2, bloom, llama"),
    ({"model_type": "lama"}, "Did you mean llama?"),
    ({"hidden_size": None}, "does not say hidden_size. Use the config.json of a llama."),
    ({"head_dim": 32}, "has 4 heads of 32, which is not its width 64."),
    ({"model_type": ["llama"]}, "Did you mean llama?"),
    ({"model_type": "LLaMA"}, "Did you mean llama?"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3 heads of keys (4 % 3 = 1)"),
    ({"intermediate_size": -1}, "says intermediate_size = -1. Use a whole number of 1 or more."),
    ({"intermediate_size": None}, "does not say intermediate_size"),
    ({"num_hidden_layers": "two"}, "says num_hidden_layers = 'two'. Use a whole number from 1 to 10,000."),
    ({"num_hidden_layers": 10**6}, "says num_hidden_layers = 1000000. Use a whole number from 1 to 10,000."),
    ({"num_attention_heads": 0}, "says num_attention_heads = 0. Use a whole number of 1 or more."),
    ({"num_attention_heads": 4.0}, "says num_attention_heads = 4.0. Use a whole number of 1 or more."),
    ({"hidden_size": [64]}, "says hidden_size = [64]. Use a whole number of 1 or more."),
    ({"hidden_size": True}, "says hidden_size = True. Use a whole number of 1 or more."),
    ({"head_dim": 0}, "says head_dim = 0. Use a whole number of 1 or more."),
    ({"head_dim": "16"}, "says head_dim = '16'. Use a whole number of 1 or more."),
    ({"tie_word_embeddings": "false"}, "says tie_word_embeddings = 'false'. Use True or False."),
    ({"attention_bias": True}, "says attention_bias, and such weights are not counted here. Leave it out."),
    ({"sliding_window": 8}, "says sliding_window = 8 of 128 positions, and windows are not counted here."),
    ({"n_embd": 128}, "says n_embd and another hidden_size. Leave one of them out."),
    ({"model_type": "mistral", "num_key_value_heads": None}, "does not say num_key_value_heads."),
    ({"model_type": "mixtral"}, "does not say num_local_experts. Use the config.json of a mixtral."),
    ({"num_local_experts": 2, "num_experts_per_tok": 4}, "A token cannot pass 4 of 2 MLPs. Use fewer."),
    ([], "cannot be read as a model: it is no table of words. Use another file."),
    (b"7", "cannot be read as a model: it is no table of words. Use another file."),
    (b"{", "cannot be read as a model: Expecting property name"),
    (b"[" * 10**5, "cannot be read as a model: maximum recursion depth"),
    (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read as a model: Exceeds the limit"),
    (b"\xff\xfe", "cannot be read as a model: 'utf-8' codec can't decode byte 0xff"),
]  # fmt: skip


@pytest.mark.parametrize("words, said", NO_CONFIG)
def test_a_config_that_is_none_gets_a_sentence(words, said, tmp_path, capsys):
    path = tmp_path / "config.json"
    text = json.dumps(LLAMA | words if isinstance(words, dict) else words) if type(words) is not bytes else ""
    path.write_bytes(words if type(words) is bytes else text.encode())
    assert cli.main(["plan", "--config", str(path), "--cluster", "h100x64"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_sizes_of_ones_own_take_the_place_of_a_models():
    found = find_model("llama3-8b", 131_072, n_layer=40, mlp=10_000)
    assert (found.n_layer, found.mlp, found.kv_heads, found.n_positions) == (40, 10_000, 8, 131_072)
    assert find_model("llama3-8b", n_embd=2048, n_head=16).kv_heads == 16
    # still one that is built here
    assert find_model("gpt2", 2000) == replace(PRESETS["gpt2"], n_positions=2000)
    assert isinstance(find_model("gpt2", kv_heads=4), Transformer)
    assert find_model("gpt2", 100) == PRESETS["gpt2"]
    with pytest.raises(ValueError, match="No model is called 'lama3-8b'. Did you mean llama3-8b?"):
        find_model("lama3-8b")


def test_what_is_not_built_here_is_computed_and_not_trained(capsys):
    ask = ["--config", "llama3-8b", "--layers", "2", "--rows", "2", "--length", "64"]
    assert cli.main(["memory", *ask, "--plan", "pp=2,micro=2"]) == 0
    assert "llama3-8b, 2 rows, float32, MiB (computed)" in capsys.readouterr().out


def test_a_kind_must_say_the_same_words_however_the_table_is_ordered(monkeypatch):
    mixtral = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for table in (models.HUGGING_FACE, dict(reversed(models.HUGGING_FACE.items()))):
        monkeypatch.setattr(models, "HUGGING_FACE", table)
        assert network_of(LLAMA | {"num_key_value_heads": None}, "x").kv_heads == 4
        for word in ("num_key_value_heads", "intermediate_size", "num_experts_per_tok"):
            with pytest.raises(ValueError, match=f"does not say {word}. Use the config.json of a mixtral."):
                network_of(mixtral | {word: None}, "x")


def test_more_layers_than_are_run_are_computed_at_once(capsys):
    assert cli.main(["memory", "--config", "nano", "--layers", "5000", "--length", "8", "--rows", "1"]) == 0
    assert "MiB (computed)" in capsys.readouterr().out


def test_of_long_rows_no_more_than_the_peak_is_reached_where_attention_is_counted_as_computed():
    cluster, config = H100.with_devices(1), find_model("gpt2", 100_000)
    found = predict(Plan(), config, 1, 100_000, cluster, 2)
    assert found.causal < 0.6 < found.mfu and found.mfu / found.causal == pytest.approx(1.9, rel=0.1)
    short = predict(Plan(), config, 1, 1, cluster, 2)  # one token sees itself: nothing is left out
    assert short.causal == short.mfu
