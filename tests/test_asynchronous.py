"""Streams without a flush: their orders, their version tables, and the closed forms of the papers."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2lab.schedules import Cost, Op, ScheduleError, make, simulate
from gpt2lab.schedules.asynchronous import (
    FREE,
    SCHEMES,
    Stream,
    check_stream,
    flushed,
    free_running,
    make_stream,
)

SIZES = {"p": st.integers(1, 6), "batches": st.integers(1, 12), "k": st.integers(1, 7)}
QUICK = settings(max_examples=60, deadline=None)


def closed_form(stream: Stream, op: Op) -> int:
    """The version that an operation reads, as the papers have it, from numbers alone.

    A forward on a rank that runs `ahead` forwards ahead of its backwards, of its i-th micro-batch, meets
    max(0, i - ahead) // per_update updates; with n stages `ahead` is n - 1 - s on stage s.
    """
    schedule, scheme = stream.schedule, stream.schedule.name
    if scheme == "2bw" or scheme == "1f1b":
        return max(0, stream.batch(op) - (scheme == "2bw"))
    home = op._replace(stage=0) if scheme == "pipedream_vertical" else op
    ahead = 0 if (scheme, op.kind) == ("ampnet", "B") else schedule.promise[schedule.rank_of(home)] - 1
    return max(0, op.micro // len(schedule.ranks_of(op.stage)) - ahead) // stream.per_update


def versions_held(stream: Stream, rank: int) -> int:
    """The most versions of its weights that a rank holds at a time, in a stream long enough.

    PipeDream: as many as forwards are under way, p - s on stage s, with one micro-batch an update; with k of them
    1 + ceil((p - 1 - s) / k). With vertical sync stage 0's number everywhere.
    """
    scheme = stream.schedule.name
    if scheme in ("pipedream", "pipedream_vertical"):
        ahead = stream.schedule.promise[0 if scheme == "pipedream_vertical" else rank] - 1
        return 1 + -(-ahead // stream.per_update)
    return 2 if scheme == "2bw" else 1


def stream_of(name, p, batches, k, active=None):
    """A stream; 2BW gets the micro-batches that it needs."""
    return make_stream(name, p, batches, max(k, p) if name == "2bw" else k, active)


@pytest.mark.parametrize("name", SCHEMES)
@given(**SIZES)
@QUICK
def test_every_operation_reads_a_version_that_is_there_and_none_is_kept_too_long(name, p, batches, k):
    stream = stream_of(name, p, batches, k)
    assert stream.reads == {op: closed_form(stream, op) for order in stream.schedule.orders for op in order}
    for stage, order in enumerate(stream.schedule.orders):
        assert max(map(len, stream.held(stage))) <= versions_held(stream, stage)
        made, kept = 0, frozenset({0})
        for n, op in enumerate(order):
            assert stream.reads[op] in kept
            assert stream.reads[op] <= made
            made = stream.makes(op) or made
            kept = stream.held(stage)[n]
            wanted = {stream.reads[later] for later in order[n + 1 :] if stream.reads[later] <= made}
            assert kept == wanted | {made}
        assert made == batches


@pytest.mark.parametrize("name", SCHEMES)
@given(p=st.integers(1, 6), k=st.integers(1, 7), active=st.integers(1, 6))
@QUICK
def test_versions_held_are_those_of_the_papers(name, p, k, active):
    active = None if name == "1f1b" else min(active, p)
    stream = stream_of(name, p, 2 * p + 2, k, active)
    for stage in range(p):
        most = max(map(len, stream.held(stage)))
        assert most == versions_held(stream, stage)
        if name in ("1f1b", "ampnet", "2bw"):
            assert most == 1 + (name == "2bw")
        if name == "pipedream" and stream.per_update == 1 and active == p:
            assert most == p - stage


@given(p=st.integers(1, 6), batches=st.integers(1, 15))
@QUICK
def test_versions_read_have_their_closed_forms(p, batches):
    tables = {name: make_stream(name, p, batches).reads for name in FREE if name != "2bw"}
    for s in range(p):
        for t in range(batches):
            f, b = Op("F", s, t), Op("B", s, t)
            late, latest = max(0, t - (p - 1 - s)), max(0, t - (p - 1))
            assert (tables["ampnet"][f], tables["ampnet"][b]) == (late, t)
            assert (tables["pipedream"][f], tables["pipedream"][b]) == (late, late)
            assert tables["pipedream_vertical"][f] == tables["pipedream_vertical"][b] == latest


@given(p=st.integers(1, 6), batches=st.integers(1, 8), extra=st.integers(0, 4))
@QUICK
def test_2bw_reads_the_version_before_at_every_stage(p, batches, extra):
    stream = make_stream("2bw", p, batches, p + extra)
    assert all(v == max(0, stream.batch(op) - 1) for op, v in stream.reads.items())


@given(**SIZES)
@QUICK
def test_with_a_flush_or_one_micro_batch_in_flight_nothing_is_stale(p, batches, k):
    streams = [make_stream("1f1b", p, batches, k)]
    streams += [make_stream(name, p, batches, k, active=1) for name in FREE if name != "2bw"]
    for stream in streams:
        assert all(stream.staleness(op) == 0 for op in stream.reads)
        assert all(stream.tied[op] == stream.batch(op) for op in stream.tied)


@pytest.mark.parametrize("name", [n for n in SCHEMES if n != "2bw"])
@given(**SIZES)
@QUICK
def test_embedding_and_head_read_the_same_version_for_a_micro_batch(name, p, batches, k):
    stream = make_stream(name, p, batches, k)
    assert all(v == stream.reads[Op("F", 0, op.micro)] for op, v in stream.tied.items())


@given(p=st.integers(1, 6), m=st.integers(1, 40), f=st.integers(1, 4), b=st.integers(1, 4))
@QUICK
def test_the_bubble_is_paid_once_and_goes_to_zero(p, m, f, b):
    timeline = simulate(free_running(p, m), Cost(f, backward=b))
    assert timeline.makespan == (m + p - 1) * (f + b)
    assert simulate(flushed(p, 3, m), Cost(f, backward=b)).makespan == 3 * (m + p - 1) * (f + b)


REPLICAS = [stages for p in (1, 2, 3) for stages in product((1, 2, 3), repeat=p)]


@pytest.mark.parametrize("name", ["pipedream", "ampnet"])
def test_replicas_take_turns_and_update_together(name):
    for stages in REPLICAS:
        stream, ranks = make_stream(name, stages, 36), sum(stages)
        assert stream.schedule.promise[0] == -(-ranks // stages[0])  # NOAM
        assert all(version == closed_form(stream, op) for op, version in stream.reads.items())
        for s, count in enumerate(stages):
            for rank in stream.schedule.ranks_of(s):
                place = rank - stream.schedule.placement[s]
                assert [op.micro for op in stream.schedule.orders[rank] if op.kind == "F"] == list(
                    range(place, 36, count)
                )
                made = [v for op in stream.schedule.orders[rank] if (v := stream.makes(op))]
                assert made == list(range(1, 36 // count + 1))
                assert max(map(len, stream.held(rank))) == versions_held(stream, rank)


def test_a_round_that_can_never_end_is_found():
    stream = make_stream("pipedream", (2, 1), 4)
    schedule = stream.schedule
    first = tuple(Op(kind, 0, micro) for kind, micro in (("F", 0), ("B", 0), ("F", 2), ("B", 2)))
    last = tuple(Op(kind, 1, micro) for micro in (0, 2, 1, 3) for kind in "FB")
    orders = (first, schedule.orders[1], last)
    with pytest.raises(ScheduleError, match="Deadlock: rank 0 waits at 0F2 for 0I1, .*"):
        check_stream(replace(stream, schedule=replace(schedule, orders=orders)))


def test_the_registry_knows_their_order():
    assert make("PipeDream", 4, 8).orders == make("1f1b", 4, 8).orders
    assert make("ampnet", 4, 8, active=2).promise == (2, 2, 2, 1)
