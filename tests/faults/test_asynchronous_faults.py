"""A stage of a pipeline without a flush dies or hangs in the middle of a stream: it is named, not those that wait."""

import os
import signal
import time

import pytest
import torch

from gpt2lab import RankFailed, launch
from gpt2lab.model import GPT2Config
from gpt2lab.parallel.pipeline.step import PipelineStep
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.train import Trainer

pytestmark = pytest.mark.live

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8)


def interrupted_stream(rank, world_size, plan, culprit, how):
    """A stream in which a rank comes to harm before the backward of micro-batch 5."""
    plan, right = Plan.parse(plan), PipelineStep.run

    def run(self, op):
        if rank == culprit and (op.kind, op.micro) == ("B", 5):
            how(self)
        right(self, op)

    PipelineStep.run = run
    trainer = Trainer(build(plan, CONFIG, Mesh(**plan.axes)))
    trainer.stream([example_batch(CONFIG, 4, 11, t) for t in range(12)])


def killed(step):
    os.kill(os.getpid(), signal.SIGKILL)


def asleep(step):
    time.sleep(1000)  # laggard


def stopped(step):
    os.kill(os.getpid(), signal.SIGSTOP)


def raises(step):
    raise NotImplementedError("to do")


def not_a_number(step):
    for p in step.model.parameters():
        p.data.fill_(torch.nan)


@pytest.mark.parametrize(
    "culprit, how, ename, words",
    [
        (0, killed, "ProcessDied", "was killed by SIGKILL"),
        (2, killed, "ProcessDied", "was killed by SIGKILL"),
        (2, asleep, "TimeoutError", "time.sleep(1000)  # laggard"),
        (1, stopped, "TimeoutError", "is stopped (SIGSTOP)"),
        (1, raises, "NotImplementedError", "to do"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_stage_that_came_to_harm_is_named(culprit, how, ename, words):
    with pytest.raises(RankFailed) as info:
        launch(interrupted_stream, "pp=3,schedule=pipedream", culprit, how, ranks=3, echo=False, timeout=2)
    assert (info.value.rank, info.value.ename) == (culprit, ename)
    assert words in str(info.value)


def test_a_gradient_that_is_not_finite_stops_the_stage_before_its_update():
    """The first stage: its gradient goes nowhere, so no other can be the first to see it."""
    with pytest.raises(RankFailed, match="the norm of stage 0's gradient is nan. It was not used") as info:
        launch(
            interrupted_stream, "pp=2,schedule=2bw,micro=2", 0, not_a_number, ranks=2, echo=False, timeout=20
        )
    assert (info.value.rank, info.value.ename) == (0, "FloatingPointError")
