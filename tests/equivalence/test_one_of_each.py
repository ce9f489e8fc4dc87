"""One plan of each strategy, small: what `make test-quick` runs on live ranks; with both of torch's default types."""

import pytest
import torch

from gpt2lab.compositions import Composition
from gpt2lab.experts.mixture import ROUTERS
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.verify import Report, compare, verify, worst

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


ROUTED = [Composition("dp=2,ep=2", router=router) for router in ROUTERS]
STREAMS = [Composition("pp=2,dp=2,micro=2,schedule=2bw"), Composition("pp=2,schedule=pipedream")]


@pytest.mark.parametrize("one", [*(Composition(p) for p in PLANS), *ROUTED, *STREAMS], ids=str)
def test_each_strategy_is_in_64_bits_where_torch_s_default_is_32(pools, one):
    plan = Plan.parse(one.plan)
    config = TINY if one.plan in PLANS else one.config
    found = pools[plan.world].run(compare, plan, config, 7, 11, default=torch.float32)
    report = Report(plan, worst(found))
    assert report.ok, report
