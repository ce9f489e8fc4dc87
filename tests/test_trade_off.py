"""The trade-off map: what is computed for a strategy is what live ranks counted; the decision path; the capstone."""

import pytest

from gpt2lab.lessons.labs import trade_off as lab
from gpt2lab.model import GPT2Config

SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=4, n_embd=16)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_computed_is_what_live_ranks_counted(pools, ranks):
    counted = lab.count(lab.STRATEGIES, ranks, SMALL, 8, 16, pools[ranks])
    for strategy, point in counted.items():
        computed = lab.compute(strategy, ranks, SMALL, 8, 16)
        assert (point.sent, point.messages) == (computed.sent, computed.messages), strategy
        assert point.flops == pytest.approx(computed.flops, rel=1e-12), strategy
        assert point.held == pytest.approx(computed.held, rel=0.25), strategy
