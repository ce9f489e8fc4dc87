"""More bugs that the suite did not see when they were first planted: of a run's options, of dropout, of a checkpoint.

`test_survivor_mutants` has the others; wrong answers to exercises, which a checker let pass, stand in the lessons.
"""

import pytest
import test_algorithms
import test_checkpoint
import test_context
import test_effects
import test_fast
import test_zero_labs
from planting import bugs, is_killed, under

from gpt2lab import RankFailed, verify
from gpt2lab.commands import generate as generate_command
from gpt2lab.commands import verify as verify_command
from gpt2lab.machine import fast, links, memory
from gpt2lab.model import GPT2, Block
from gpt2lab.parallel import chunked_loss
from gpt2lab.parallel.accumulate import Accumulate
from gpt2lab.parallel.chunked_loss import ChunkedLoss
from gpt2lab.parallel.context.exchanges import Split
from gpt2lab.parallel.pipeline.engine import Pipeline
from gpt2lab.run import Options, start
from gpt2lab.storage import checkpoint, writing

pytestmark = pytest.mark.mutant
SHARED = test_checkpoint.test_what_several_ranks_hold_is_written_once_by_whom_has_least_to_write
SITES = test_effects.test_every_dropout_of_the_model_has_a_site_of_its_own


SURVIVED = {
    "dropout drawn in validation":
        (Accumulate.evaluate, "micro_loss(self.model, micro, None)", "micro_loss(self.model, micro, (0, 0))",
         (test_effects.test_an_evaluation_draws_no_dropout, "accumulate", 3)),
    "dropout drawn in a pipeline's validation":
        (Pipeline.evaluate, "forward_only, micros, None)", "forward_only, micros, (0, 0))",
         (test_effects.test_an_evaluation_draws_no_dropout, "pipeline", 3)),
    "weight seed 0":
        (start, "DTYPES[options.dtype], options.seed, device)", "DTYPES[options.dtype], 0, device)",
         test_effects.test_the_seed_is_that_of_weights_and_of_batches),
    "the option of weight decay is dropped":
        (Options.the_recipe, '"weight_decay", ', "",
         (test_effects.test_an_option_changes_the_run, "weight_decay")),
    "the option of clipping is dropped":
        (Options.the_recipe, "clip=self.clip or None,", "",
         (test_effects.test_an_option_changes_the_run, "clip")),
    "the rate never decays":
        (Options.the_recipe, "max(self.steps, self.warmup) if self.cosine else None", "None",
         (test_effects.test_an_option_changes_the_run, "cosine")),
    "--accumulate is ignored":
        (Options.the_plan, "replace(plan, micro=self.accumulate) if self.accumulate > 1 else plan", "plan",
         test_effects.test_accumulate_makes_so_many_micro_batches),
    "two dropouts of a block draw alike": (Block.__init__, "2 * layer + 2", "2 * layer + 1", SITES),
    "the embedding's dropout is a block's":
        (GPT2.__init__, "Dropout(config.dropout, 0)", "Dropout(config.dropout, 1)", SITES),
    "the mean error for the largest":
        (verify.relative_error, "(a.detach() - b.detach()).abs().max()", "(a.detach() - b.detach()).abs().mean()",
         test_effects.test_the_worst_rank_and_the_worst_element_count),
    "the command says 0 where a plan differs":
        (verify_command.run, "return 0 if all(r.ok for r in reports) else 1", "return 0",
         test_effects.test_the_command_fails_where_a_plan_differs),
    "the first that holds a box writes it":
        (writing.who_writes, "min(ranks, key=load.__getitem__)", "ranks[0]", SHARED),
    "what only one rank can write does not count first":
        (writing.who_writes, "sorted(holders, key=lambda h: len(h[0]))", "holders", SHARED),
    "boxes that overlap or lack something are written":
        (writing.who_writes, "check_complete(name, shape, boxes[name])", "pass",
         test_checkpoint.test_boxes_that_do_not_make_up_a_tensor_are_not_written),
    "a save does not wait for the one before":
        (checkpoint.Saver.save, "self.finish()\n", "pass\n",
         test_checkpoint.test_a_save_waits_for_the_one_before),
    "--top-p is dropped":
        (generate_command.run, '"top_p", "seed")', '"seed")',
         (test_effects.test_what_the_generate_command_is_told_reaches_the_sampler, "--top-p", "0.5", "top_p")),
    "a ring without its closing edge":
        (links.Network.ring_time, "zip(ranks, [*ranks[1:], ranks[0]], strict=True)", "zip(ranks, ranks[1:])",
         test_algorithms.test_links_between_pairs),
    "400 times the error accepted":
        (fast._exact_and_faster, "4 * usual", "400 * usual",
         (test_fast.test_onednn_is_on_up_to_four_times_the_usual_error_where_it_is_faster, 4.1e-5, 9.0, False)),
    "a chunked loss that ignores the token 1":
        (chunked_loss, "IGNORED", lambda right: 1,
         (test_fast.test_the_chunked_loss_and_all_gradients_equal_the_whole, 5)),
    "the buffer of a chunked loss keeps its type":
        (ChunkedLoss.__call__, "self.buffer.dtype != x.dtype or ", "",
         test_fast.test_the_chunked_loss_of_another_type_or_length_is_right_too),
    "dead memory lives":
        (memory.Alive.bytes, " if not ref.expired()", "",
         test_zero_labs.test_watched_memory_counts_until_the_last_holder_lets_go),
    "a split keeps its check of positions":
        (Split.__call__, "self._checked = None", "pass",
         test_context.test_a_split_of_another_length_looks_at_the_positions_again),
    "a tolerance of 1e-4":
        (verify, "TOLERANCE", lambda _: 1e-4,
         (test_effects.test_the_tolerance_is_what_is_promised, 9e-11, True)),
    "all-to-all's bus factor is 1":
        (links, "BUS", lambda right: right | {"all_to_all": lambda n: 1.0},
         test_algorithms.test_bus_bandwidth_by_the_definitions_of_nccl_tests),
}  # fmt: skip


@bugs(SURVIVED)
def test_mutant_that_once_survived_is_killed(bug, check):
    assert is_killed(bug, check), "nobody noticed"


def test_mutant_with_moments_in_the_type_of_the_embedding_is_killed(pools, tmp_path):
    like = "torch.zeros_like(piece.tensor"
    bug = checkpoint.load, f"{like})", f"{like}, dtype=parallel.model.wte.weight.dtype)"
    with pytest.raises(RankFailed, match="expected scalar type Float but found BFloat16"):
        pools[2].run(under(bug, test_checkpoint.resumed_in_16_bits), str(tmp_path))
