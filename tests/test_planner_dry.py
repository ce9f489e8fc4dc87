"""A dry run by itself: what it says by part, of which rank, and what it leaves as it was.

`test_planner_costs` compares it with live ranks. Here planted bugs are noticed by closed forms.
"""

from dataclasses import replace

import pytest
import torch
from planting import bugs, is_killed

from gpt2lab.experts.mixture import Experts
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.zero.costs import bytes_held, shard_length, zero_bytes_sent
from gpt2lab.plan import Plan
from gpt2lab.planner import dry
from gpt2lab.planner.dry import dry_run, fullest_ranks
from gpt2lab.planner.numberless import KNOWN, Numberless, _attention, numberless
from gpt2lab.planner.share import RankShare
from gpt2lab.ranks import comm
from gpt2lab.ranks.traffic import Event
from gpt2lab.transport.pretended import PretendedGroup, one_of

CONFIG = GPT2Config(vocab_size=300, n_positions=32, n_layer=2, n_head=4, n_embd=32)
WORDS = replace(CONFIG, vocab_size=9000)
WTE = 4 * 9000 * 32  # bytes of the embedding of a model that is mostly words


def run(text, config=CONFIG, rank=0, rows=8, length=32):
    dry_run.cache_clear()
    return dry_run(Plan.parse(text), config, rows, length, rank=rank)


def fullest(text, config=CONFIG):
    dry_run.cache_clear()
    return list(fullest_ranks(Plan.parse(text), config, 8, 32))


def sizes():
    return {key[0]: n for key, n in RankShare(Plan(), CONFIG, 8, 32).sizes.items()}


def test_zero_1_holds_its_shards():
    found, right = run("dp=4,zero=1").parts, bytes_held(sizes(), 1, 4, 0)
    assert found["weights"] == right["weights"]
    assert right["optimizer"] <= found["optimizer"] <= right["optimizer"] + 1000  # and the counts of steps


def test_zero_3_sends_what_its_formula_says():
    assert run("dp=4,zero=3,micro=2").sent["dp+cp"][0] == zero_bytes_sent(sizes(), 3, 4, 2)


def test_zero_3_has_the_embedding_whole_at_the_loss():
    assert run("dp=4,zero=3", WORDS).parts["weights"] > 1.25 * WTE


def test_a_stage_between_has_no_logits():
    assert run("pp=4,micro=2", replace(CONFIG, n_layer=4), rank=1).parts["logits"] == 0


def test_there_are_three_logits_at_the_loss():
    """The probabilities, their gradient, and that of the loss."""
    found = run("serial", WORDS)
    assert found.parts["logits"] == 3 * 4 * 8 * 32 * 9000 and found.moment == "backward"


@pytest.mark.parametrize("text, most", [("serial", 3), ("loss=chunked", 2)])
def test_gradients_of_the_embedding(text, most):
    """Those of both uses and their sum: the head's is a view, into which nothing is added. Of few tokens.

    A chunked loss makes a gradient that is no view: the embedding's is added into it.
    """
    assert most * WTE < run(text, WORDS, rows=1, length=8).parts["gradients"] < (most + 0.1) * WTE


def test_refilled_weights_are_freed():
    """At the loss a rank has its shards, and whole only what the head uses: the embedding and the last norm."""
    held = run("dp=4,zero=3,refill=on").parts["weights"]
    assert held == 4 * sum(shard_length(n, 4) for n in sizes().values()) + 4 * (300 * 32 + 2 * 32)


def test_without_a_flush_the_first_of_two_stages_has_three_versions_of_its_weights():
    # one more while two are exchanged
    assert run("pp=2,schedule=pipedream", WORDS).parts["weights"] > 4 * WTE


def test_experts_are_asked_evenly():
    """k tokens C numbers go out and come back, in forward and backward, and half of them stay; counts of 8 bytes."""
    config = replace(CONFIG, experts=Experts(4, 2, "mixtral", every=2, balance=0.0))
    found = run("dp=2,ep=2", config, rows=4).sent["ep"]
    assert found == (4 * 2 * 2 * 32 * 32 * 4 // 2 + 8 * 2, 4 + 1)


def test_as_many_micro_batches_run_as_matter():
    long = dry.dry_run(Plan.parse("dp=2,zero=2,micro=4"), CONFIG, 8, 32)
    (short,) = fullest("dp=2,zero=2,micro=4")
    assert short.held == pytest.approx(long.held, rel=0.01) and len(short.calls) < len(long.calls)


def test_the_owner_of_the_blocks_is_found():
    """Of three ranks the second has both blocks, which are most of this model."""
    (found,) = fullest("dp=3,zero=3,data=owner")
    every = [run("dp=3,zero=3,data=owner", rank=rank).held for rank in range(3)]
    assert found.held == every[1] > max(every[0], every[2])


def test_a_window_is_a_mask_of_floats_in_every_layer():
    """torch's kernel on a CPU turns the mask into the numbers of the queries, and keeps it for backward."""
    held = [run("serial", replace(CONFIG, window=n)).held for n in (8, None)]
    assert held[0] - held[1] == CONFIG.n_layer * 32 * 32 * 4


LOGITS, EXPERTS = test_there_are_three_logits_at_the_loss, test_experts_are_asked_evenly
BOTH, IN_PLACE = (
    (test_gradients_of_the_embedding, "serial", 3),
    (test_gradients_of_the_embedding, "loss=chunked", 2),
)
BUGS = {
    "what is freed stays": (Numberless._freed, "self.now[part] -= size", "pass", IN_PLACE),
    "every sum of gradients is in place":
        (Numberless.__torch_dispatch__, "or args[0]._is_view()", "", BOTH),
    "no sum of gradients is in place": (Numberless.__torch_dispatch__, "asked != ENGINE", "True", IN_PLACE),
    "weights that are gathered are activations":
        (Numberless._part, "asked in GATHERS", "False", test_zero_3_has_the_embedding_whole_at_the_loss),
    "a storage that grows or shrinks is not seen":
        (Numberless.resizing, "id(storage) in self.alive", "False", test_refilled_weights_are_freed),
    "a mask stays a mask of bytes":
        (_attention, "torch.zeros_like(attn_mask, dtype=q.dtype)", "attn_mask",
         test_a_window_is_a_mask_of_floats_in_every_layer),
    "logits are activations": (Numberless._part, "t.size(-1) == self.words", "False", LOGITS),
    "the peak is the last moment": (Numberless.settle, "> self.most", "> 0", LOGITS),
    "the optimizer has no state":
        (dry._make_state, "trainer.optimizer.step()", "pass", test_zero_1_holds_its_shards),
    "a stream is one step long":
        (dry.steps_until_full, "2 + -(-2 * plan.pp // plan.micro)", "1",
         test_without_a_flush_the_first_of_two_stages_has_three_versions_of_its_weights),
    "all tokens go to one expert":
        (dry._evenly, "split_sizes(rows, count)", "[rows] + [0] * (count - 1)", EXPERTS),
    "a token has one expert": (dry._evenly, "round(", "round(0.5 * ", EXPERTS),
    "counts do not come back":
        (PretendedGroup.all_to_all_single, "output.copy_(x)", "output.zero_()", EXPERTS),
    "one micro-batch is enough":
        (dry._shorter, "2 * plan.pp + 1", "1", test_as_many_micro_batches_run_as_matter),
    "replicas are alike":
        (dry.fullest_ranks, "plan.data in UNEVEN", "False", test_the_owner_of_the_blocks_is_found),
}  # fmt: skip


@pytest.mark.mutant
@bugs(BUGS)
def test_mutant_is_killed(bug, check):
    assert is_killed(bug, check)


def test_parts_add_up_and_the_log_stays():
    comm.clear_log()
    comm.log.append(Event("all_reduce", "dp", 1, 1, 0.0, 1.0))
    found = run("dp=2,tp=2", rank=3)
    assert found.place == {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
    assert found.held == sum(found.parts.values())
    assert found.sent == {axis: sums for axis, sums in found.sent.items() if axis in ("tp", "dp+cp", "world")}
    assert [(e.op, e.axis) for e in comm.log] == [("all_reduce", "dp")]
    comm.clear_log()


@pytest.mark.parametrize("text", ["dp=2,zero=3,micro=2", "pp=2,tp=2,micro=2,recompute=on"])
def test_what_is_known_of_operators_changes_nothing(text):
    KNOWN.clear()
    first = run(text)
    known = len(KNOWN)
    assert run(text) == first and len(KNOWN) == known > 0


def test_an_operator_is_known_by_the_shape_stride_and_type_of_all_that_it_gets():
    KNOWN.clear()
    with numberless():
        x = torch.ones(3, 3)
        made = [y.exp() for y in (x, x.double(), x.t())] + [x.argmax(-1) + number for number in (1, 1.0)]
    assert [(t.dtype, t.stride()) for t in made] == [
        (torch.float32, (3, 1)), (torch.float64, (3, 1)), (torch.float32, (1, 3)), (torch.int64, (1,)),
        (torch.float32, (1,)),
    ]  # fmt: skip


def test_every_stage_has_its_fullest_rank():
    assert [one.place["pp"] for one in fullest("pp=2,dp=2,micro=2")] == [0, 1]


def test_nothing_is_left_as_it_must_not_be():
    """Modules move and storages grow as before, also after a plan that cannot run."""
    before = torch.nn.Module.to, torch.UntypedStorage.resize_, torch.distributed.is_initialized()
    run("dp=2,zero=3,refill=on")
    with pytest.raises(ValueError, match="Use at least 16 rows"):
        fullest("dp=16")
    assert before == (torch.nn.Module.to, torch.UntypedStorage.resize_, torch.distributed.is_initialized())


def test_a_rank_is_refused_a_dry_run():
    with one_of(0, 2), pytest.raises(RuntimeError, match="is a rank already"):
        run("dp=2")
