"""One plan of each strategy, small: what `make test-quick` runs on live ranks."""

import pytest

from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.verify import verify

TINY = GPT2Config(vocab_size=37, n_positions=16, n_layer=3, n_head=2, n_embd=8, window=3)
PLANS = (
    "dp=2,micro=2",
    "dp=2,data=servers",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,sp=on",
    "cp=2,exchange=ring,layout=zigzag",
    "cp=2,exchange=heads",
    "cp=2,exchange=halo-kv",
    "pp=2,micro=3",
    "pp=2,micro=3,schedule=zb_h1,recompute=on",
)


@pytest.mark.parametrize("plan", PLANS)
def test_each_strategy_equals_the_serial_run(pools, plan):
    report = verify(plan, TINY, ranks=pools[Plan.parse(plan).world])
    assert report.ok, report
