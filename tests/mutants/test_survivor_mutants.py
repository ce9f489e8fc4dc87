"""Bugs that the suite did not see when they were first planted, each with the test that sees it now."""

import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import test_checkpoint
import test_effects
from planting import is_killed

from gpt2lab import run, verify
from gpt2lab.machine import links
from gpt2lab.model import PRESETS, Dropout, Noise
from gpt2lab.parallel import finish, tensor
from gpt2lab.parallel.zero.flat import Flat
from gpt2lab.planner import failures, fit
from gpt2lab.schedules import Timeline
from gpt2lab.storage import checkpoint
from gpt2lab.storage.sharded import Entry
from gpt2lab.train import Trainer, make_optimizer

pytestmark = pytest.mark.mutant
ELEMENTS = test_effects.test_dropout_is_the_reference_element_by_element
NORM = test_effects.test_the_norm_counts_every_element_of_a_large_tensor
EVALUATION = test_effects.test_an_evaluation_is_the_mean_over_its_batches_under_autocast_too
RATES = test_effects.test_each_step_takes_its_own_rate_and_gives_it_to_the_optimizer
WORST = test_effects.test_the_worst_rank_and_the_worst_element_count
IN_32 = test_effects.test_gradients_of_16_bits_add_up_in_32_under_32_bit_masters
COPY = test_effects.test_a_copy_for_the_background_has_memory_of_its_own


def key(change):
    return lambda: test_effects.test_the_dropout_of_a_step_depends_on_seed_and_step(change)


def in_a_folder(test):
    """A test that wants a folder, with one."""

    def call():
        with tempfile.TemporaryDirectory() as folder:
            test(Path(folder))

    return call


def nano(test, *args):
    """A test with the smallest preset smaller still, as its fixture makes it."""

    def call():
        with patch.dict(PRESETS, nano=test_effects.TINY):
            test(*args, None)

    return call


def validation():
    """Which batches validation reads; the test itself plants this."""
    with pytest.MonkeyPatch.context() as patches, patch.dict(PRESETS, nano=test_effects.TINY):
        test_effects.test_validation_is_on_five_batches_of_the_other_split(None, patches)


def option(name):
    return nano(test_effects.test_an_option_changes_the_run, name)


def bubble():
    """Two ranks that are busy for 4 and 8 of 10."""
    two = SimpleNamespace(rows=[[], []], makespan=10, busy=lambda rank: (4, 8)[rank])
    assert Timeline.bubble.fget(two) == Fraction(8, 20)


def freedom():
    """The spread by numpy's own least squares: four samples leave two degrees of freedom."""
    samples = np.array([[1, 1e6, 2e-3], [2, 1e6, 2.1e-3], [1, 4e6, 5e-3], [3, 9e6, 13e-3]])
    x = samples[:, :2] / samples[:, 2:]
    (squares,) = np.linalg.lstsq(x, np.ones(4), rcond=None)[1]
    assert fit.fit(samples).spread == pytest.approx((squares / 2) ** 0.5)


def hierarchical():
    """Two nodes of two: a message each way inside, and two between, with latency alone."""
    one, ten = links.Link(1.0, 1e12), links.Link(10.0, 1e12)
    assert links.hierarchical_time(4, 2, 0.0, one, ten) == 2 * 1 + 2 * 10


SURVIVED = {
    "dropout key without the seed": (
        Trainer._key,
        "(self.recipe.seed, self.steps)",
        "(0, self.steps)",
        key({"seed": 1}),
    ),
    "dropout key without the step": (
        Trainer._key,
        "(self.recipe.seed, self.steps)",
        "(self.recipe.seed, 0)",
        key({"steps": 1}),
    ),
    "evaluate returns the last loss": (
        Trainer.evaluate,
        "sum(losses) / len(losses)",
        "losses[-1]",
        EVALUATION,
    ),
    "evaluate outside autocast": (Trainer.evaluate, "with self._autocast():", "if True:", EVALUATION),
    "the norm loses the last element": (finish._square, "x[end:]", "x[end:-1]", NORM),
    "rate one step ahead": (
        Trainer._update,
        "self.recipe.rate(self.steps)",
        "self.recipe.rate(self.steps + 1)",
        RATES,
    ),
    "the group's rate is the constant": (
        Trainer._update,
        'group["lr"] = rate',
        'group["lr"] = self.recipe.lr',
        RATES,
    ),
    "validation on the training split": (
        run._loop,
        'options.seed, "val")',
        'options.seed, "train")',
        validation,
    ),
    "validation of one batch, five times": (
        run._loop,
        "val.at(i) for i in range(5)",
        "val.at(0) for i in range(5)",
        validation,
    ),
    "batch seed 0": (
        run._loop,
        'options.seed, "train")',
        '0, "train")',
        nano(test_effects.test_the_seed_is_that_of_weights_and_of_batches),
    ),
    "the matrices do not decay": (
        make_optimizer,
        '"weight_decay": recipe.weight_decay',
        '"weight_decay": 0.0',
        option("weight_decay"),
    ),
    "no clipping": (finish.clip, "norm + 1e-6 > limit", "False", option("clip")),
    "the first entry of a step counts": (
        run.read_log,
        'entries[entry["step"]] = entry',
        'entries.setdefault(entry["step"], entry)',
        in_a_folder(test_effects.test_the_later_entry_of_a_step_counts),
    ),
    "dropout without / (1 - p)": (Dropout.forward, " / (1 - self.p)", "", ELEMENTS),
    "all channels share a mask": (
        Noise.keep,
        "h + channels.long() * 0x85EBCA6B",
        "h + 0 * channels.long()",
        ELEMENTS,
    ),
    "an element of exactly p goes": (Noise.keep, ">= p", "> p", ELEMENTS),
    "only rank 0 counts": (verify.worst, "max(claims, key=lambda claim: claim.size)", "claims[0]", WORST),
    "exact claims given the tolerance": (
        verify.Report._holds,
        "0 if claim.name in EXACT else self.tolerance",
        "self.tolerance",
        lambda: test_effects.test_where_there_is_no_arithmetic_not_a_bit_may_differ(verify.EXACT[0]),
    ),
    "background copy without clone": (Entry.copy, "b.tensor.clone()", "b.tensor", COPY),
    "the best prefers NaN": (
        checkpoint.best,
        " and math.isfinite(losses[p])",
        "",
        in_a_folder(
            lambda folder: test_checkpoint.test_the_best_is_never_one_whose_loss_is_no_number(
                float("nan"), folder
            )
        ),
    ),
    "SGD resumes at step 0": (
        checkpoint.load,
        'trainer.steps = state["step"]',
        "trainer.steps = 0",
        in_a_folder(test_effects.test_a_resumed_sgd_goes_on_at_its_step_and_an_export_keeps_its_numbers),
    ),
    "export always float64": (
        checkpoint.export,
        "dtype=None",
        "dtype=__import__('torch').float64",
        in_a_folder(test_effects.test_a_resumed_sgd_goes_on_at_its_step_and_an_export_keeps_its_numbers),
    ),
    "gradients added in 16 bits": (
        Flat.add,
        "shard = shard.to(self.shard.dtype)",
        "self.grad = None if self.grad is None else self.grad.to(shard.dtype)",
        IN_32,
    ),
    "vocabulary loss without 32-bit sums": (
        tensor.VocabLoss.__call__,
        "summable(logits)",
        "logits",
        test_effects.test_the_loss_over_a_cut_vocabulary_sums_in_32_bits,
    ),
    "bubble of the idlest rank": (
        Timeline.bubble,
        "sum(map(self.busy, range(len(self.rows))))",
        "len(self.rows) * min(map(self.busy, range(len(self.rows))))",
        bubble,
    ),
    "hierarchical one message more": (
        links.hierarchical_time,
        "size, node - 1)",
        "size, node)",
        hierarchical,
    ),
    "fit with n - 1 freedom": (
        fit.fit,
        "len(x) - 2",
        "len(x) - 1",
        freedom,
    ),
    "time lost without restart": (
        failures.share_lost,
        "interval / 2 + restart",
        "interval / 2",
        lambda: lost(),
    ),
}


def lost():
    assert failures.share_lost(10.0, 1.0, 100.0, 5.0) == pytest.approx(0.1 + 0.1)


@pytest.mark.parametrize("name", SURVIVED)
def test_mutant_that_once_survived_is_killed(name):
    *bug, check = SURVIVED[name]
    assert is_killed(bug, check), f"nobody noticed: {name}"
