"""What is written for Paraver, read back by a parser that knows the format and none of our code."""

import tempfile
from collections import Counter

import pytest
from task_cases import made
from test_tasks_live import train

from gpt2lab.lessons.labs.tasks import write_traces
from gpt2lab.plots.paraver import STATES, TASK, Message, messages_between, save_paraver
from gpt2lab.ranks import comm
from gpt2lab.ranks.trace import Span
from gpt2lab.tasks.scheduler import run_tasks

SPANS = [
    Span("h.0 0:4", "forward", 10.0, 10.5, 0, "worker 0"),
    Span("h.0 4:8", "forward", 10.1, 10.4, 0, "worker 1"),
    Span("sum", "comm", 10.5, 10.9, 0, "worker 0"),
    Span("h.0 0:4", "backward", 10.2, 11.0, 2, "worker 0"),
]
MESSAGES = [Message(0, 2, 10.5, 10.9, 4096, 7)]


def parsed(path):
    """(header fields, states, events, messages) with everything checked that the format demands."""
    header, *lines = path.read_text().splitlines()
    assert header.startswith("#Paraver (")
    length, nodes, applications, tasks = header.split("):", 1)[1].split(":", 3)
    records = [[int(field) for field in line.split(":")] for line in lines]
    kinds = {kind: [r[1:] for r in records if r[0] == kind] for kind in (1, 2, 3)}
    assert [r[5] for r in records] == sorted(r[5] for r in records), "records are sorted by time"
    assert {len(r) for r in kinds[1]} <= {7} and {len(r) for r in kinds[3]} <= {14}
    assert all(len(r) >= 7 and len(r) % 2 for r in kinds[2]), "events are pairs after five fields"
    cpus = int(nodes.split("(")[1].rstrip(")"))
    threads = [int(part.split(":")[0]) for part in tasks.split("(")[1].rstrip(")").split(",")]
    assert applications == "1" and int(tasks.split("(")[0]) == len(threads) and sum(threads) == cpus
    for cpu, application, task, thread, *_ in (r for found in kinds.values() for r in found):
        assert application == 1 and 1 <= cpu <= cpus and 1 <= thread <= threads[task - 1]
    return int(length.removesuffix("_ns")), kinds[1], kinds[2], kinds[3]


def names_of(path, section):
    """{number: name} of a section of the .pcf file."""
    lines = path.with_suffix(".pcf").read_text().split("\n\n")
    part = next(p for p in lines if p.startswith(section)).splitlines()
    part = part[part.index("VALUES") :] if "VALUES" in part else part
    return {int(line.split(None, 1)[0]): line.split(None, 1)[1] for line in part[1:]}


def test_states_events_and_messages_come_back(tmp_path):
    path = save_paraver(SPANS, tmp_path / "run.prv", MESSAGES)
    length, states, events, messages = parsed(path)
    assert length == 1_000_000_000
    named = names_of(path, "STATES\n")
    assert list(named.values()) == list(STATES)
    found = [(task, thread, start, end, named[state]) for _, _, task, thread, start, end, state in states]
    assert found == [
        (1, 1, 0, 500_000_000, "forward"),
        (1, 2, 100_000_000, 400_000_000, "forward"),
        (2, 1, 200_000_000, 1_000_000_000, "backward"),
        (1, 1, 500_000_000, 900_000_000, "comm"),
    ]
    tasks = names_of(path, "EVENT_TYPE")
    begun = [(task, time, tasks[value]) for _, _, task, _, time, kind, value in events if value]
    assert begun[0] == (1, 0, "h.0 0:4") and len(begun) == 4 and {e[5] for e in events} == {TASK}
    at_half = [value for *_, time, _, value in events if time == 500_000_000]
    assert at_half[0] == 0 and tasks[at_half[1]] == "sum", "one task ends before the next begins"
    assert messages == [[1, 1, 1, 1, 500_000_000, 500_000_000, 3, 1, 2, 1, 900_000_000, 900_000_000, 4096, 7]]


def traced(rank, world_size):
    """Spans, logged calls and counted traffic of this rank, which trains GPT-2 on a slice of every sequence."""
    _, _, traffic, spans = train(rank, world_size, "tasks", sliced=True)
    return spans, list(comm.log), traffic


def test_the_trace_is_as_long_as_its_last_message(tmp_path):
    late = save_paraver(SPANS, tmp_path / "late.prv", [Message(0, 2, 10.5, 12.0, 4096, 7)])
    assert late.read_text().startswith("#Paraver (01/01/00 at 00:00):2000000000_ns:")


def test_messages_of_a_run_on_ranks_are_those_that_were_counted(pools, tmp_path):
    spans, logs, traffic = zip(*pools[3].run(traced), strict=True)
    sent = messages_between(logs)
    path = save_paraver([s for of_rank in spans for s in of_rank], tmp_path / "ranks", sent)
    _, states, events, found = parsed(path)
    assert len(states) == sum(map(len, spans)) and len(events) % 2 == 0
    assert_no_overlap(states)
    assert len(found) == sum(calls for table in traffic for calls, size, _ in table.values() if size)
    for rank, table in enumerate(traffic):
        assert sum(r[-2] for r in found if r[2] == rank + 1) == sum(size for _, size, _ in table.values())
    for record in found:
        source, target, begun, received = record[2], record[8], record[4], record[10]
        assert source != target and begun <= received, "no message comes before it was sent"
    messages_of = Counter((r[2], r[8]) for r in found)
    blocks = 4 * 2 * 2  # of rows, in layers, in steps; the ranks' ring adds sums of gradients
    assert messages_of[1, 3] == messages_of[2, 1] == messages_of[3, 2] == blocks
    assert messages_of[1, 2] == messages_of[2, 3] == messages_of[3, 1] > blocks


def test_a_lesson_writes_its_traces_into_a_new_folder_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spans = run_tasks(made().graph, 1)
    folders = [write_traces([spans], [[]]) for _ in range(2)]
    assert folders[0] != folders[1] and {f.suffix for f in folders[1].iterdir()} == {
        ".json",
        ".prv",
        ".pcf",
        ".row",
    }


def test_rows_are_named(tmp_path):
    levels = save_paraver(SPANS, tmp_path / "run").with_suffix(".row").read_text().strip().split("\n\n")
    for level in levels:
        head, *names = level.splitlines()
        assert head.split()[0] == "LEVEL" and int(head.split()[-1]) == len(names)
    assert levels[2].splitlines()[1:] == ["rank 0, worker 0", "rank 0, worker 1", "rank 2, worker 0"]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_is_written_whole(tmp_path, workers):
    tasks = made()
    spans = run_tasks(tasks.graph, workers)
    _, states, events, _ = parsed(save_paraver(spans, tmp_path / "gpt2.prv"))
    waits = sum(s.kind == "wait" for s in spans)
    assert len(states) - waits == len(tasks.graph.tasks) and len(events) == 2 * (len(states) - waits)
    assert_no_overlap(states)


def assert_no_overlap(states):
    ends = {}
    for cpu, *_, start, end, _ in states:
        assert start >= ends.get(cpu, 0), "states of one thread do not overlap"
        ends[cpu] = end
