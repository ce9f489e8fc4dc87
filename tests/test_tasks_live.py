"""Tasks that talk: ranks with a scheduler each, messages as tasks, cores lent from process to process."""

import threading
import time

import pytest
import torch
from task_cases import CONFIG, LENGTH, ROWS, SMALL, adamw, batch, model, worst

from gpt2lab import RankFailed
from gpt2lab.machine.links import Link
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks import comm, paced
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.tasks import check, messages
from gpt2lab.tasks.cores import QUANTUM, Cores, Holder
from gpt2lab.tasks.gpt2 import GPT2Tasks
from gpt2lab.tasks.graph import TaskGraph, reads, updates, writes
from gpt2lab.tasks.runtime import run_fork_join, run_sequential
from gpt2lab.tasks.scheduler import Scheduler, run_tasks

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def pool():
    with Ranks(2, echo=False, timeout=20) as ranks:
        yield ranks


def train(rank, world_size, way, sliced=False, steps=2):
    """Losses and weights of this rank after some iterations of GPT-2, its traffic and spans.

    The ranks share the rows of the batch or, `sliced`, the tokens of each row.
    """
    axis = Mesh(dp=world_size)["dp"]

    def give(iteration):
        both = batch(iteration).tokens, batch(iteration).targets
        return [x.tensor_split(world_size, int(sliced))[rank] for x in both]

    options = {"total": batch().total, "optimizer": adamw, "axis": axis, "sliced": sliced}
    tasks = GPT2Tasks(model(), len(give(0)[0]), LENGTH, give, SMALL, **options)
    if way is run_sequential:
        assert check.races(tasks.graph) == [] and check.needless(tasks.graph) == []
    comm.clear_log()
    if way in (run_sequential, run_fork_join):
        spans = [s for _ in range(steps) for s in way(tasks.graph)]
    else:
        spans = run_tasks(tasks.graph, 2, steps, blocking=way == "blocking")
    return tasks.losses, tasks.weights, comm.traffic(), spans


def serial(steps=2):
    give = lambda iteration: (batch(iteration).tokens, batch(iteration).targets)
    tasks = GPT2Tasks(model(), ROWS, LENGTH, give, SMALL, total=batch().total, optimizer=adamw)
    run_tasks(tasks.graph, 2, steps)
    return tasks


@pytest.mark.parametrize("sliced", [False, True], ids=["rows", "tokens"])
def test_ranks_of_tasks_equal_one_process_and_send_the_same_bytes_in_every_way(pool, sliced):
    want, found = serial(), {}
    blocking = () if sliced else ("blocking",)  # every worker would wait for gradients that come last
    for way in (run_sequential, run_fork_join, *blocking, "tasks"):
        found[str(way)] = ranks = pool.run(train, way, sliced)
        for _, weights, traffic, _ in ranks:
            assert worst(weights, want.weights) < 1e-10
            assert traffic["all_reduce", "dp"] == ranks[0][2]["all_reduce", "dp"]
        for losses in zip(want.losses, *(r[0] for r in ranks), strict=True):
            assert abs(losses[0] - sum(losses[1:])) < 1e-10
    one, *others = found.values()
    assert all(torch.equal(one[0][1][n], o[r][1][n]) for o in others for r in (0, 1) for n in one[0][1])
    elements = sum(w.numel() for w in want.weights.values())
    _, size, _ = one[0][2]["all_reduce", "dp"]
    assert size == 2 * elements * 8  # two steps; each rank of two sends half, twice, 8 bytes an element
    # of the 6 tokens of rank 0: k and v, in two steps
    keys = 2 * CONFIG.n_layer * ROWS * 6 * 2 * CONFIG.n_embd * 8
    sent = [r[2].get(("send", "dp")) for r in one]
    assert sent == ([(16, keys, 16)] * 2 if sliced else [None] * 2)  # there, and the gradients back


def test_four_ranks_with_uneven_rows_or_uneven_slices():
    want = serial().weights
    with Ranks(4, echo=False) as ranks:
        for sliced in (False, True):
            found = ranks.run(train, "tasks", sliced)
            assert all(worst(weights, want) < 1e-10 for _, weights, *_ in found)
    token = 2 * CONFIG.n_layer * ROWS * 2 * CONFIG.n_embd * 8  # slices of 3, 3, 3, 2 tokens
    sent = [size // token for size in (r[2]["send", "dp"][1] for r in found)]
    assert sent == [3 * 3, 2 * 3 + 3, 3 + 6, 9]  # keys to all later ranks, gradients to all earlier ones


def ping_pong(rank, world_size, turns):
    """A number goes to and fro, one up at each station; beside it the workers compute."""
    axis, other = Mesh(dp=2)["dp"], 1 - rank
    graph = TaskGraph({"x": torch.zeros(3), "y": torch.zeros(3)})
    for _ in range(turns):
        steps = [
            lambda: messages.send(graph, "send", axis, other, "x"),
            lambda: messages.receive(graph, "receive", axis, other, "x"),
        ]
        for step in steps[:: 1 - 2 * rank]:
            step()
            graph.add("one up", lambda x: x.add_(1), updates("x"))
        graph.add("beside", lambda y: y.add_(1), updates("y"))
    run_tasks(graph, 2, 3)
    return graph.tensors["x"].tolist(), graph.tensors["y"][0].item()


def test_messages_and_tasks_order_each_other_over_iterations(pool):
    (x0, y0), (x1, y1) = pool.run(ping_pong, 4)
    assert x0 == x1 == [24.0] * 3 and y0 == y1 == 12


def overlapped(rank, world_size, blocking):
    """Spans by name of one worker, which has work to do while a message takes 0.3 s."""
    axis = Mesh(dp=2)["dp"]
    graph = TaskGraph({"x": torch.zeros(3), "y": torch.zeros(3)})
    if rank == 0:
        messages.send(graph, "message", axis, 1, "x", (0, 1))
    else:
        messages.receive(graph, "message", axis, 0, "x", (1, 2))
    graph.add("work", lambda y: y.add_(1), updates("y"))
    comm.barrier(axis)
    with paced.use(Link(latency=0.3, bandwidth=1e9)):
        return {(s.name, s.lane): s for s in run_tasks(graph, 1, blocking=blocking)}


def test_a_worker_computes_while_its_messages_travel(pool):
    for spans in pool.run(overlapped, False):
        assert spans["work", "worker 0"].end < spans["message", "messages"].end
    for spans in pool.run(overlapped, True):
        assert spans["work", "worker 0"].start > spans["message", "worker 0"].end


def both_receive(rank, world_size):
    axis = Mesh(dp=2)["dp"]
    graph = TaskGraph({"x": torch.zeros(3)})
    messages.receive(graph, "ask", axis, 1 - rank, "x")
    messages.send(graph, "answer", axis, 1 - rank, "x")
    run_tasks(graph, 2)


def test_tasks_that_wait_for_each_other_are_named():
    with Ranks(2, echo=False, timeout=200) as ranks, pytest.raises(RankFailed) as failed:
        ranks.run(both_receive)
    text = str(failed.value)
    assert "0 -> 1 -> 0" in text and text.count("of task 'ask'") == 2, text


def patient(rank, world_size, before):
    axis = Mesh(dp=2)["dp"]
    graph = TaskGraph({"x": torch.zeros(3), "y": torch.zeros(3)})
    for n in range(before):
        messages.receive(graph, f"comes {n}", axis, 1 - rank, "y")
    messages.receive(graph, "never comes", axis, 1 - rank, "x")
    graph.add("after", print, reads("x"))
    comm.barrier(axis)
    if rank == 0:
        run_tasks(graph, 2, patience=1)
    else:
        for _ in range(before):
            comm.send(torch.ones(3), axis, 0)
        time.sleep(6)


@pytest.mark.parametrize("before", [0, 2])
def test_a_message_that_stays_away_is_named_with_its_task_and_who_waits_for_it(before):
    with Ranks(2, echo=False, timeout=20) as ranks, pytest.raises(RankFailed) as failed:
        ranks.run(patient, before)
    words = "rank 0 has no task to run: task 'never comes' (writes x[0:3]) waits for "
    words += f"recv #{before + 1} on axis 'dp' with rank 1"
    assert failed.value.rank == 0
    assert words in str(failed.value)
    assert "'after' waits for 1" in str(failed.value)


def raises(rank, world_size):
    axis = Mesh(dp=2)["dp"]
    graph = TaskGraph({"x": torch.zeros(3)})
    if rank == 1:
        graph.add("breaks", lambda x: x.view(7), writes("x"))
    messages.all_reduce(graph, "sum", axis, updates("x"))
    run_tasks(graph, 2)


def test_a_task_that_raises_on_one_rank_ends_the_others(pool):
    with pytest.raises(RankFailed, match=r"task 'breaks' \(writes x\[0:3\]\) on worker \d raised") as failed:
        pool.run(raises)
    assert failed.value.rank == 1


def uneven(rank, world_size, path, loads):
    """Tasks of 20 ms, more on rank 0; how many workers of this rank worked at once, and the spans."""
    axis, inside, most = Mesh(dp=2)["dp"], [], []

    def work(x):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    graph = TaskGraph({"x": torch.zeros(max(loads))})
    for number in range(loads[rank]):
        graph.add(f"work {number}", work, writes("x", (number, number + 1)))
    messages.all_reduce(graph, "sum", axis, updates("x"))
    comm.barrier(axis)
    return Scheduler(graph, 2, cores=Cores(path)).run(), max(most)


def test_a_rank_that_waits_lends_its_core(pool, tmp_path):
    path = tmp_path / "cores"
    keep = Cores(path, 2)
    (many, most), (few, _) = pool.run(uneven, path, (20, 4))
    work = [s for s in [*many, *few] if s.kind == "other"]
    ends = sorted([(s.start, 1) for s in work] + [(s.end, -1) for s in work])
    at_once = [sum(change for _, change in ends[: i + 1]) for i in range(len(ends))]
    assert most == 2 and max(at_once) == 2, "two cores, and in the end both are lent to rank 0"
    assert sorted((keep.take(), keep.take())) == [0, 1], "all cores are back"


def test_nobody_takes_a_core_that_is_not_free(tmp_path):
    one = Cores(tmp_path / "cores", 1)
    other, got = Cores(tmp_path / "cores"), []
    core = one.take()
    thread = threading.Thread(target=lambda: got.append(other.take()))
    thread.start()
    time.sleep(0.1)
    assert got == []
    one.give(core)
    thread.join(5)
    assert got == [0]
    with pytest.raises(ValueError, match="300 cores: share between 1 and 255"):
        Cores(tmp_path / "none", 300)


def test_after_a_quantum_a_worker_offers_its_core_before_it_goes_on(tmp_path, monkeypatch):
    shared, given = Cores(tmp_path / "cores", 1), []
    give = shared.give
    monkeypatch.setattr(shared, "give", lambda core: (given.append(core), give(core)))
    worker = Holder(shared)
    worker.hold()
    worker.hold()
    assert not given
    worker._since -= 2 * QUANTUM
    worker.hold()
    assert given == [0]
