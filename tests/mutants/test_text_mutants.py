"""Small bugs: one text of a function is replaced by another in this process, and a test that is named must fail."""

import json
from functools import partial

import pytest
import test_algorithms
import test_checkpoint
import test_corpus
import test_effects
import test_generate
import test_numbers
import test_refused_calls
import test_scale
import test_timing
import test_verify
from planting import bugs, is_killed

from gpt2lab import verify
from gpt2lab.corpus.batches import Batch, Batches
from gpt2lab.generate import KVCache, Sampling, _uniform, generate
from gpt2lab.machine import links
from gpt2lab.machine.timing import Times, together, trials
from gpt2lab.parallel import boxes
from gpt2lab.planner import failures, metrics
from gpt2lab.storage import reading

pytestmark = pytest.mark.mutant


SAMPLER = test_effects.test_probabilities_are_those_of_an_independent_sampler
DRAWS = test_effects.test_every_row_position_and_seed_draws_a_number_of_its_own
TARGETS = test_corpus.test_targets_are_the_next_tokens
SHARES = partial(test_corpus.test_ranks_see_the_same_global_batch, ranks=3)
ODD = test_numbers.test_odd_numbers_are_answered_with_a_value_or_a_sentence
AMDAHL, GUSTAFSON, KARP, SEQUENTIAL, OVERLAPPED = (
    (ODD, f"gpt2lab.planner.metrics.{name}")
    for name in ("amdahl", "gustafson", "karp_flatt", "sequential", "overlapped")
)
RATES = test_algorithms.test_bus_bandwidth_by_the_definitions_of_nccl_tests
YOUNG = test_scale.test_young_s_interval_loses_least_and_simulated_lives_agree_while_failures_are_rare
LOST = test_scale.test_a_failure_loses_what_was_not_saved_and_one_in_a_save_loses_the_save
QUARTILES = test_timing.test_one_slow_trial_moves_neither_median_nor_quartiles
TOGETHER = test_timing.test_ranks_are_timed_from_the_last_arrival_to_the_last_end
BOXES = test_checkpoint.test_boxes_that_do_not_make_up_a_tensor_are_not_written
SEALED = {"step": 3, "plan": "serial", "optimizer": "adamw"}
SEALED["sha256"] = {"config.json": "1", "rank0.safetensors": "2"}


def sealed() -> None:
    """A state is read as it was written, and no changed character of it is."""
    text = reading.text(SEALED)
    assert reading.parse(text.encode()) == SEALED
    for wrong in (
        text.replace("3", "7", 1),
        text.replace('"serial"', '"dp=2"'),
        text[:-30] + "0" + text[-29:],
    ):
        with pytest.raises(ValueError, match="sha256"):
            reading.parse(wrong.encode())
    for lacking in ("step", "config.json", "rank0.safetensors", "seal"):
        cut = {k: v for k, v in SEALED.items() if k != lacking}
        cut["sha256"] = {k: v for k, v in SEALED["sha256"].items() if k != lacking}
        sentence = reading.text(cut) if lacking != "seal" else json.dumps(cut | {"more": 1})
        with pytest.raises(ValueError, match="missing|no digest|sha256 is at its end"):
            reading.parse(sentence.encode())


def times_differ():
    times = Times((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (times.low, times.median, times.high) == (2.0, 3.0, 4.0)


def apart():
    """Spans that have no time in common do not take from the time of those that have."""
    one, other = test_timing.spans((0, 0, 2), (0, 8, 9)), test_timing.spans((0, 1, 2), (0, 5, 6))
    assert metrics.intersection(one, other) == 1


def each_claim_counts():
    """One that differs is enough."""
    claims = [verify.Claim("loss", 0.0), verify.Claim("norm", 1.0)]
    assert not verify.Report(test_effects.Plan(), claims).ok


MUTANTS = {
    "one random number for all positions":
        (Sampling.draw, "_uniform(self.seed, row, position)", "_uniform(self.seed, row)", DRAWS),
    "one for all rows":
        (Sampling.draw, "_uniform(self.seed, row, position)", "_uniform(self.seed, 0, position)", DRAWS),
    "the seed does not count":
        (Sampling.draw, "_uniform(self.seed, row, position)", "_uniform(row, position)", DRAWS),
    "nucleus before the temperature":
        (Sampling.probabilities, "p = logits.softmax(-1)", "p = (logits * self.temperature).softmax(-1)",
         SAMPLER),
    "nucleus one token too many":
        (Sampling.probabilities, "before = ranked.cumsum(-1) - ranked",
         "before = ranked.cumsum(-1) - ranked - ranked.roll(1, -1)", SAMPLER),
    "nucleus not scaled to one":
        (Sampling.probabilities, "return p / p.sum(-1, keepdim=True)", "return p", SAMPLER),
    "top_k one too many":
        (Sampling.probabilities, "logits.topk(self.top_k, -1)", "logits.topk(self.top_k + 1, -1)", SAMPLER),
    "temperature multiplies":
        (Sampling.probabilities, ") / self.temperature", ") * self.temperature", SAMPLER),
    "half of the random numbers":
        (_uniform, "2.0**-53", "2.0**-54", test_generate.test_tokens_come_as_often_as_their_probability_says),
    "the cache says half of its bytes":
        (KVCache.bytes, "kept.numel() *", "kept.numel() // 2 *",
         test_generate.test_the_cache_holds_what_its_formula_says_and_refuses_more),
    "the cache takes one position too many":
        (KVCache.extend, "if end > self.slots:", "if end > self.slots + 1:",
         test_generate.test_the_cache_holds_what_its_formula_says_and_refuses_more),
    "the last key is not looked at":
        (KVCache.extend, "kept[0, :, :end]", "kept[0, :, : end - 1]",
         partial(test_generate.test_logits_with_and_without_the_cache_are_equal_row_by_row, window=None)),
    "an empty list of prompts is continued":
        (generate, "choose, rows, ended = Sampling(**sampling)",
         "if not prompts: return []\n    choose, rows, ended = Sampling(**sampling)",
         (test_refused_calls.test_what_cannot_be_is_refused, lambda: generate(test_refused_calls.MODEL, [], 2),
          "Give at least")),
    "targets are the tokens":
        (Batches.at, "block[:, 1:].contiguous()", "block[:, :-1].contiguous()", TARGETS),
    "samples begin anew each step": (Batches.at, "+ step * self.rows", "+ 0 * step", TARGETS),
    "total of the rows that were asked for":
        (Batches.at, "self.rows * self.length)", "len(mine) * self.length)",
         test_corpus.test_only_the_asked_rows_are_read),
    "validation begins in the training text":
        (Batches.__init__, "else (border, len(source) - border)", "else (border - 20, len(source) - border)",
         test_corpus.test_train_and_validation_do_not_overlap),
    "training reads one word of validation":
        (Batches.__init__, "(0, border) if", "(0, border + 60) if",
         test_corpus.test_train_and_validation_do_not_overlap),
    "a window too many fits":
        (Batches.__init__, "self.count < length + 1", "self.count < length",
         test_corpus.test_asking_for_more_tokens_than_there_are),
    "ranks get the same rows": (Batch.rows, "[axis_rank]", "[0]", SHARES),
    "samples stay whole when rows are cut": (Batch.rows, '"targets", "samples")', '"targets")', SHARES),
    "columns keep their old positions":
        (Batch.columns, "positions=self.positions[index]", "positions=self.positions[: len(index)]",
         test_corpus.test_micro_batches_and_columns),
    "columns keep their old targets":
        (Batch.columns, '"targets": self.targets[:, index]', '"targets": self.targets[:, : len(index)]',
         test_corpus.test_micro_batches_and_columns),
    "efficiency is the speed-up":
        (metrics.efficiency, "speedup / workers", "speedup",
         test_timing.test_the_published_speedups_follow_from_the_published_minutes),
    "Amdahl splits all": (metrics.amdahl, "(1 - serial_fraction) / workers", "1 / workers", AMDAHL),
    "Gustafson of the serial time":
        (metrics.gustafson, "(1 - serial_fraction) * workers", "workers",
         GUSTAFSON),
    "Karp-Flatt forgets the workers": (metrics.karp_flatt, "/ (1 - 1 / workers)", "", KARP),
    "overlap hides both ends": (metrics.overlapped, " + comm", "", OVERLAPPED),
    "overlap takes the faster": (metrics.overlapped, "max(compute, comm)", "min(compute, comm)", OVERLAPPED),
    "no overlap at all": (metrics.sequential, "(compute + comm)", "max(compute, comm) - 1", SEQUENTIAL),
    "touching spans count twice":
        (metrics.busy, "s.start <= stretches", "s.start < stretches",
         test_timing.test_nested_and_touching_spans_count_once),
    "a nested span ends the outer one":
        (metrics.busy, "max(s.end, stretches[-1][1])", "s.end",
         test_timing.test_nested_and_touching_spans_count_once),
    "parallelism from the first end":
        (metrics.average_parallelism, "min(start for", "min(end for",
         test_timing.test_parallelism_is_busy_time_over_makespan),
    "intersection counts gaps": (metrics.intersection, "max(0.0, ", "(", apart),
    "Young without the factor two": (failures.best_interval, "2 * save", "save", YOUNG),
    "time lost without half the interval": (failures.share_lost, "interval / 2 + restart", "restart", YOUNG),
    "time lost without saves": (failures.share_lost, "save / interval + ", "", YOUNG),
    "a failure in a save loses nothing": (failures.life, "coming[-1] < saved", "coming[-1] < worked", LOST),
    "a restart takes no time": (failures.life, "now = hit + restart", "now = hit", LOST),
    "the upper quartile is the median": (Times.high, "[2]", "[1]", times_differ),
    "the lower quartile is the median": (Times.low, "[0]", "[1]", times_differ),
    "the mean, not the median": (Times.median, "statistics.median", "statistics.fmean", QUARTILES),
    "warm-up counts":
        (trials, "if trial >= warmup:", "if True:", test_timing.test_warm_up_is_run_and_not_kept),
    "from the first arrival": (together, "max(start", "min(start", TOGETHER),
    "twice the bytes in a second": (links.bandwidths, "size / seconds", "2 * size / seconds", RATES),
    "a plan that differs is equal":
        (verify.Report._holds, "claim.error <=", "0 * claim.error <=",
         test_verify.test_the_table_names_the_tensor_and_the_rank),
    "NaN holds":
        (verify.Report._holds, "claim.error <= (0 if claim.name in EXACT else self.tolerance)",
         "not claim.error > (0 if claim.name in EXACT else self.tolerance)",
         (test_effects.test_the_tolerance_is_what_is_promised, float("nan"), False)),
    "one claim is enough": (verify.Report.ok, "all(", "any(", each_claim_counts),
    "the seal is not compared":
        (reading.parse, "as_written = text(state).encode() == data", "as_written = True", sealed),
    "tensors need no digest":
        (reading.parse, "or not any(name.endswith(TENSORS) for name in files)", "", sealed),
    "config.json needs no digest": (reading.parse, "or CONFIG not in files", "", sealed),
    "boxes outside a tensor are read": (boxes.check_complete, "if not inside:", "if False:", BOXES),
    "boxes below zero are read": (boxes.check_complete, "min(begin, default=0) >= 0", "True", BOXES),
    "a tensor with a gap is read": (boxes.check_complete, "if held != wanted:", "if False:", BOXES),
    "boxes that overlap are read": (boxes.check_complete, "if _common(", "if None and _common(", BOXES),
    "only neighbours are compared":
        (boxes.check_complete, "found[i + 1 :]", "found[i + 1 : i + 2]", BOXES),
    "the search for overlaps ends too early": (boxes.check_complete, ">= end[:1]", ">= end[1:]", BOXES),
    "no entry is needed": (reading.parse, "if type(state.get(name)) is not kind:", "if False:", sealed),
}  # fmt: skip


@bugs(MUTANTS)
def test_mutant_is_killed(bug, check):
    assert is_killed(bug, check), "nobody noticed"
