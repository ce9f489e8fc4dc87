"""Plans that cannot be are refused in a sentence with ways out, of which none has that fault: one table.

A line is a model, perhaps a batch (rows x tokens; else 7 x 11), a plan, and words of the sentence; `...` is for any.
"""

import re
from dataclasses import replace

import pytest
from equality import MODELS
from test_plan_choices import check_refusal

from gpt2lab.plan import Plan
from gpt2lab.processes.launch import Ranks
from gpt2lab.run import Options
from gpt2lab.verify import verify

pytestmark = pytest.mark.live

FREE = replace(MODELS["experts"].experts, capacity=None)
BY_BATCH, BY_EXPERTS = replace(FREE, group="batch"), replace(FREE, router="expert_choice")
MODELS = MODELS | {
    "one-head": replace(MODELS["small"], n_head=1),
    "three-words": replace(MODELS["small"], vocab_size=3),
    "free": replace(MODELS["odd"], experts=FREE),
    "by-batch": replace(MODELS["odd"], experts=BY_BATCH),
    "by-experts": replace(MODELS["odd"], experts=BY_EXPERTS),
}
TABLE = """
    odd dp=8                                   (8 x 1 = 8). Use at least 8 rows
    odd dp=8                                   7 rows cannot be dealt to dp=8
    odd 7x17 serial                            Sequences of 17 tokens do not fit into 16 positions. Use 1 to 16.
    odd dp=2,zero=-1                           zero=-1 is no stage of ZeRO. Use zero=1, 2 or 3, or 0
    odd dp=2,zero=4                            zero=4 is no stage of ZeRO. Use zero=1, 2 or 3
    odd tp=2,schedule=1b1f                     There is no pipeline schedule '1b1f'. There are naive
    odd pp=2,schedule=zerobubble               no pipeline schedule 'zerobubble'
    odd dp=2,exchange=letters                  there is no exchange called 'letters'. Use one of
    odd dp=2,layout=zigzg                      there is no layout called 'zigzg'. Use one of
    odd dp=2,data=ring                         data=ring is unknown. Use data=naive, bucket, server, servers
    odd dp=2,bucket=0                          bucket=0 KiB
    odd dp=2,tp=2,data=server                  tp=2, pp=1 cut the model. Use data=bucket
    odd dp=2,data=owner                        data=owner is unknown
    odd dp=2,zero=2,data=owner                 data=owner does not go with zero=2
    odd dp=2,zero=1,data=naive                 data=naive does not go with zero=1
    odd dp=2,zero=1,bucket=4                   bucket=4 does not go with zero=1, ... Leave bucket out, or use zero=0
    odd dp=2,zero=3,data=owner,bucket=0        bucket=0 does not go with zero=3
    odd dp=2,refill=on                         refill=on says how ZeRO shards. Use zero=3 with it.
    odd dp=2,zero=2,refill=on                  refill=on does not go with zero=2, which gathers no weights
    odd dp=2,zero=3,data=owner,refill=on       does not go with data=owner
    odd dp=2,zero=3,recompute=on,refill=on     does not go with recompute=on
    odd pp=2,dp=2,zero=3,micro=2,refill=on     does not go with pp=2
    experts dp=2,zero=3,refill=on              refill=on does not go with a mixture of experts, which ... Leave one
    experts dp=2,ep=2,zero=3,refill=on         refill=on does not go with a mixture of experts, which ... Leave one
    odd dp=4,zero=3,shard=3                    dp=4 x cp=1 = 4 ranks make no groups of shard=3... Use shard=2.
    odd dp=4,zero=3,shard=1                    make no groups of shard=1 that share. Use shard=2.
    odd dp=4,zero=3,shard=-2                   make no groups of shard=-2
    odd tp=2,zero=3,shard=2                    dp=1 x cp=1 = 1 ranks make no groups... Leave shard out.
    odd dp=4,shard=2                           shard=2 says how ZeRO shards. Use zero=1, 2 or 3 with it.
    heads6 tp=4                      6 attention heads cannot be split over tp=4 ranks (6 % 4 = 2). Use tp=1, 2, 3 or 6.
    one-head tp=2                              1 attention head cannot be split over tp=2 ranks ... Use tp=1.
    three-words tp=4                      3 tokens of a vocabulary cannot be split over tp=4 ranks. Use tp=3
    odd dp=2,micro=4                           7 rows cannot be dealt to dp=2 replicas in micro=4
    odd sp=on                                  sp=true cuts activations over the tensor-parallel ranks, but tp=1
    odd pp=8                                   5 layers, the embedding and the head leave nothing for rank
    odd pp=2,micro=3,schedule=terapipe,chunks=12          Sequences of 11 tokens make no 12 slices
    odd pp=2,schedule=interleaved,chunks=3000      pp=2 x chunks=3000 = 6,000 stages are too many. Use at most 4,096.
    odd pp=2,schedule=breadth_first,chunks=9999999        19,999,998 stages
    odd pp=9,schedule=interleaved,chunks=999999           8,999,991 stages
    odd pp=2,schedule=terapipe,chunks=3000000             Sequences of 11 tokens make no 3000000 slices
    odd pp=2,micro=3,schedule=terapipe,cp=2               terapipe already splits the tokens
    odd pp=4,tp=2,sp=true,micro=3,schedule=zb_v           sp=true needs a layer on every stage
    odd pp=2,dp=2,micro=2,zero=3,schedule=terapipe        zero=3 runs every block a second time... Use zero=1 or 2
    odd pp=2,dp=2,schedule=pipedream,zero=3    versions of whole weights on every replica, which zero=3
    odd pp=2,schedule=ampnet,recompute=true    would run the forward again with other weights
    odd pp=4,micro=2,schedule=2bw              at least pp=4 micro-batches, and here are 2
    odd pp=2,schedule=pipedream,active=3       active=3 ... pp=2
    odd pp=2,schedule=1f1b,active=2            active=2 is for pipelines without a flush
    odd pp=2,schedule=pipedraem                Did you mean pipedream
    odd pp=2,schedule=pipedream,micro=8        7 rows cannot be dealt
    one-layer cp=2,layout=diagonal             no layout called 'diagonal'. Use one of contiguous
    one-layer cp=2,exchange=post               no exchange called 'post'. Use one of qkv
    one-layer cp=5,exchange=heads              12 attention heads ... cp=5 ...(12 % 5 = 2). Use cp=1, 2, 3, 4, 6, 12
    one-layer cp=2,exchange=halo-kv            windowed attention, and this model attends to all 11 tokens
    window3 4x11 cp=2,exchange=halo-x,layout=zigzag       zigzag layout rank 0 owns tokens 0 to 10 with gaps
    window3 4x12 cp=2,tp=2,sp=true,exchange=halo-x        sp=true has cut ... Use exchange=halo-kv
    odd dp=2,ep=2                              ep=2 has no experts to share out: this model is dense. Use ep=1
    free dp=3,ep=2                             ep=2 does not divide the replicas dp=3 (3 % 2 = 1). Use ep=1, 3.
    free dp=3,ep=3                8 experts cannot be shared out over ep=3 ranks (8 % 3 = 2). Use ep=1, or 9 experts.
    free dp=4,ep=4,node=3  node=3 does not divide the ranks ep=4 among machines (4 % 3 = 1). Use node=1, 2, 4.
    free dp=4,node=2                 node=2 does not divide the ranks ep=1 among machines (1 % 2 = 1). Use node=1.
    free dp=4,ep=2,zero=1,shard=2              shard=2 groups replicas of the whole model, and ep=2 spreads the experts
    free dp=2,ep=2,data=server                 data=server keeps every tensor on all replicas, but ep=2 does not
    free dp=2,ep=2,zero=3,data=owner           data=owner keeps every tensor
    by-batch dp=2,micro=2                      needs the whole batch at once, but micro=2 cuts it
    by-experts cp=2                            Expert choice compares all tokens of a group
    experts cp=2,layout=zigzag                 which layout=zigzag, cp=2 does not keep
"""
LINES = [line.split(None, 1) for line in TABLE.strip().split("\n")]


def matches(words: str) -> str:
    """A pattern for words in which `...` stands for any."""
    return ".*".join(map(re.escape, words.split("...")))


@pytest.mark.parametrize("model, rest", LINES, ids=lambda text: text.split()[0])
def test_a_plan_that_cannot_be_is_refused(model, rest):
    batch, rest = re.match(r"(?:(\d+x\d+) )?(.*)", rest).groups()
    rows, length = map(int, (batch or "7x11").split("x"))
    text, words = rest.split(None, 1)
    plan = Plan.parse(text)
    with pytest.raises(ValueError, match=matches(words)) as refused:
        plan.check(MODELS[model], rows, length)
    check_refusal(plan, MODELS[model], rows, length, str(refused.value))


def test_the_plans_beside_those_of_the_table_are_taken():
    """And whoever starts ranks asks before."""
    Plan.parse("pp=2,dp=2,micro=2,zero=3,schedule=terapipe,chunks=1").check(MODELS["odd"], 7, 11)
    with pytest.raises(ValueError, match="7 rows cannot be dealt to dp=8"):
        verify("dp=8", MODELS["tiny"])
    with pytest.raises(ValueError, match="dp=2 needs a pool of 2, and this one has 3 ranks"):
        verify("dp=2", ranks=Ranks(3))


MUON = {
    "dp=2,zero=1": "zero=1 cuts weights flat...off by 0.53. Use zero=3,data=owner",
    "dp=2,tp=2,zero=3": "zero=3 cuts weights flat",
    "dp=2,zero=3,refill=on": "zero=3 cuts weights flat",
    "pp=2,schedule=pipedream": "optimizer=muon does not go with schedule=pipedream",
}


@pytest.mark.parametrize("plan", MUON)
def test_what_would_be_another_update_than_muon_s_is_refused(plan):
    with pytest.raises(ValueError, match=matches(MUON[plan])):
        verify(plan, depth="muon")
    with pytest.raises(ValueError, match=matches(MUON[plan])):
        Options(plan=plan, optimizer="muon").check()
    Options(plan=plan).check()


SPELLED = """
    dp=two           dp=two is not a whole number. Use for example dp=2.
    dp=0             dp=0 is no number of parts. Use dp=1 or more.
    ep=0             ep=0 is no number of parts
    node=0           node=0 is no number of parts
    recmpute=on      it knows no 'recmpute'. Did you mean recompute=
    recompute=maybe  recompute=maybe is neither on nor off.
    dp               dp= is not a whole number
    dp=²             dp=² is not a whole number. Use for example dp=2.
    dp=２            dp=２ is not a whole number. Use for example dp=2.
    micro=1_0        micro=1_0 is not a whole number. Use for example micro=2.
    dp=٢             dp=٢ is not a whole number.
    dp=--2           dp=--2 is not a whole number.
    dp=2,tp=2,dp=3   A plan says dp once, and 'dp=2,tp=2,dp=3' says it twice.
"""


@pytest.mark.parametrize("text, words", [line.split(None, 1) for line in SPELLED.strip().split("\n")])
def test_what_is_no_plan_is_refused(text, words):
    with pytest.raises(ValueError, match=matches(words)):
        Plan.parse(text)
