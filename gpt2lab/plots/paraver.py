"""Traces for Paraver, the viewer of the Barcelona Supercomputing Center: a .prv file of records, .pcf of names, .row.

The format is public (https://tools.bsc.es/paraver, "trace generation"). A rank is a Paraver task with a thread for each
lane, or several where its spans overlap; times are nanoseconds on the one clock of all ranks. A record is a line of
whole numbers: `1:cpu:appl:task:thread:begin:end:state`, `2:cpu:appl:task:thread:time:type:value`, and for a message
`3:` with cpu, appl, task, thread, logical and physical time of its sending and again of its receipt, size and tag.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.colors import to_rgb

from .style import COLORS

STATES = ("Idle", *COLORS)
"""The states of a thread: their numbers are their places."""

TASK = 6_000_000
"""The type of the events that say which task begins (its value) or ends (0)."""


@dataclass(frozen=True)
class Message:
    """`size` bytes that `source` began to send at `sent` and `target` had at `received` (seconds)."""

    source: int
    target: int
    sent: float
    received: float
    size: int
    tag: int = 0


def messages_between(logs) -> list[Message]:
    """The messages between ranks, from the log of calls (`comm.log`) of each; a collective is one to each target.

    The k-th call of a kind on one rank belongs to the k-th on the other: that is the order in which they begin.
    """
    calls = [defaultdict(list) for _ in logs]
    for of_rank, log in zip(calls, logs, strict=True):
        for call in sorted(log, key=lambda call: call.start):
            of_rank[call.pair or (call.op, call.axis)].append(call)
    return [
        Message(rank, target, call.start, calls[target][kind][number].end, size, number)
        for rank, of_rank in enumerate(calls)
        for kind, in_order in of_rank.items()
        for number, call in enumerate(in_order)
        for target, size in call.targets
    ]


def side_by_side(spans) -> list:
    """The spans by their start; those that overlap another one of their lane move to "lane 2", "lane 3", ..."""
    ends, placed = defaultdict(list), []
    for s in sorted(spans, key=lambda s: (s.start, s.end)):
        of_lane = ends[s.rank, s.lane]
        number = next((n for n, end in enumerate(of_lane) if end <= s.start), len(of_lane))
        of_lane[number : number + 1] = [s.end]
        placed.append(replace(s, lane=f"{s.lane} {number + 1}") if number else s)
    return placed


def records(spans, messages=()) -> tuple[list[str], dict[tuple[int, str], int], list[str]]:
    """(lines of the .prv file, number of the cpu of each (rank, lane), names of tasks by the events' values)."""
    spans = side_by_side(spans)
    lanes = sorted({(s.rank, s.lane) for s in spans})
    cpu = {lane: number for number, lane in enumerate(lanes, 1)}
    ranks = sorted({rank for rank, _ in lanes})
    thread = {lane: 1 + sum(other[0] == lane[0] for other in lanes[: cpu[lane] - 1]) for lane in lanes}
    zero = min((s.start for s in spans), default=0.0)
    ns = lambda time: max(0, round((time - zero) * 1e9))
    place = lambda lane: f"{cpu[lane]}:1:{ranks.index(lane[0]) + 1}:{thread[lane]}"
    names = sorted({s.name for s in spans if s.kind != "wait"})
    value = {name: number for number, name in enumerate(names, 1)}
    found = []
    for s in spans:
        at, start, end = place((s.rank, s.lane)), ns(s.start), ns(s.end)
        found.append((start, 1, f"1:{at}:{start}:{end}:{STATES.index(s.kind)}"))
        if s.kind != "wait":
            found.append((start, 2, f"2:{at}:{start}:{TASK}:{value[s.name]}"))
            found.append((end, 0, f"2:{at}:{end}:{TASK}:0"))
    first = {rank: next(lane for lane in lanes if lane[0] == rank) for rank in ranks}
    for m in messages:
        sent, received = ns(m.sent), ns(m.received)
        ends = f"{place(first[m.source])}:{sent}:{sent}:{place(first[m.target])}:{received}:{received}"
        found.append((sent, 3, f"3:{ends}:{m.size}:{m.tag}"))
    last = max(map(ns, [zero, *(s.end for s in spans), *(m.received for m in messages)]))
    threads = ",".join(f"{sum(lane[0] == rank for lane in lanes)}:1" for rank in ranks)
    header = f"#Paraver (01/01/00 at 00:00):{last}_ns:1({len(lanes)}):1:{len(ranks)}({threads})"
    return [header, *(line for *_, line in sorted(found))], cpu, names


def pcf(names: list[str]) -> str:
    """What the numbers of states and events mean, and their colours."""
    lines = ["DEFAULT_OPTIONS", "", "LEVEL               THREAD", "UNITS               NANOSEC", ""]
    lines += ["STATES", *(f"{number}    {state}" for number, state in enumerate(STATES)), ""]
    rgb = lambda color: ",".join(str(round(255 * part)) for part in to_rgb(color))
    colors = (f"{number}    {{{rgb(color)}}}" for number, color in enumerate(("white", *COLORS.values())))
    lines += ["STATES_COLOR", *colors, "", "EVENT_TYPE", f"0    {TASK}    task", "VALUES", "0    end"]
    return "\n".join([*lines, *(f"{number}    {name}" for number, name in enumerate(names, 1)), ""])


def row(lanes) -> str:
    """The names of cpus, node and threads."""
    threads = [f"rank {rank}, {lane}" for rank, lane in lanes]
    cpus = [f"{number}.node" for number in range(1, len(threads) + 1)]
    levels = {"CPU": cpus, "NODE": ["node"], "THREAD": threads}
    listed = ("\n".join([f"LEVEL {level} SIZE {len(names)}", *names]) for level, names in levels.items())
    return "\n\n".join(listed) + "\n"


def save_paraver(spans, path, messages=()) -> Path:
    """Write the .prv file `path` and, beside it, .pcf and .row; returns the path."""
    path = Path(path).with_suffix(".prv")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, cpu, names = records(spans, messages)
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".pcf").write_text(pcf(names))
    path.with_suffix(".row").write_text(row(cpu))
    return path
