"""A deterministic clock for jobs on devices and messages on shared links; exact with integers and Fractions.

A device runs its jobs one at a time, in the order of the list. A job starts when its device is free and all that it
needs has arrived. A message leaves when its job ends, waits the latency of its link, and then its bytes flow. Whatever
is shared (a device's port in each direction, the cores of a node) is divided equally.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.arguments import checked
from ..schedules.schedule import Schedule
from .problem import Cluster


@checked(device=0, seconds=0)
@dataclass(frozen=True)
class Job:
    """Work of so many seconds on a device; `needs` are (number of an earlier or later job, bytes of its result)."""

    name: str
    device: int
    seconds: float
    needs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sending:
    """A message with the result of a job: it left the device `source` at `start` and was complete at `end`."""

    job: int
    source: int
    target: int
    bytes: float
    start: float
    end: float


@checked(device=0)
@dataclass(frozen=True)
class Simulated:
    """When each job ran, as (start, end) by its number, and all messages."""

    jobs: tuple[Job, ...]
    spans: tuple[tuple[float, float], ...]
    messages: tuple[Sending, ...]

    @property
    def makespan(self):
        """The time at which the last job ends."""
        return max((end for _, end in self.spans), default=0)

    def busy(self, device: int):
        """The time in which a device runs a job."""
        return sum(e - s for job, (s, e) in zip(self.jobs, self.spans, strict=True) if job.device == device)


@checked()
def simulate_jobs(jobs: Sequence[Job], cluster: Cluster) -> Simulated:
    """Run all jobs on the cluster.

    Raises ValueError where a job can never start, because the orders of the devices wait for each other in a circle.
    """
    clock = _Clock(jobs, cluster)
    clock.run()
    stuck = [job.name for job, span in zip(jobs, clock.spans, strict=True) if len(span) < 2]
    if stuck:
        raise ValueError(
            f"{len(stuck)} of {len(jobs)} jobs never start, {stuck[0]} first: they wait for each other. "
            "Change the order of the jobs on their devices."
        )
    return Simulated(tuple(jobs), tuple(map(tuple, clock.spans)), tuple(clock.messages))


@dataclass(eq=False)
class _Flow:
    """What passes now: `left` of its work, at most `speed` per second, through `shared` {thing: its capacity}."""

    left: object
    speed: object
    shared: dict
    then: object  # what to call at its end


class _Clock:
    def __init__(self, jobs: Sequence[Job], cluster: Cluster):
        self.jobs, self.cluster, self.now, self.flows = jobs, cluster, 0, []
        self.users: Counter = Counter()
        self.spans = [[] for _ in jobs]
        self.messages: list[Sending] = []
        self.queues, self.busy = defaultdict(deque), set()
        self.missing = [len({need for need, _ in job.needs}) for job in jobs]
        self.readers = defaultdict(lambda: defaultdict(dict))  # job -> device -> {reader: bytes}
        for number, job in enumerate(jobs):
            self.queues[job.device].append(number)
            for need, size in job.needs:
                self.readers[need][job.device][number] = size

    def run(self) -> None:
        for device in list(self.queues):
            self._start(device)
        while self.flows:
            speeds = [self._speed(flow) for flow in self.flows]
            lasts = [flow.left / speed for flow, speed in zip(self.flows, speeds, strict=True)]
            step = min(lasts)
            self.now += step
            ended = [flow for flow, last in zip(self.flows, lasts, strict=True) if last == step]
            for flow, speed in zip(self.flows, speeds, strict=True):
                flow.left = max(flow.left - step * speed, 0)  # rounding must not make it negative
            self.flows = [flow for flow in self.flows if flow not in ended]
            for flow in ended:
                self.users.subtract(flow.shared.keys())
            for flow in ended:
                flow.then()

    def _speed(self, flow):
        return min([flow.speed, *(capacity / self.users[what] for what, capacity in flow.shared.items())])

    def _flow(self, work, speed, shared, then) -> None:
        """Begin something that takes time, or do at once what follows where it takes none."""
        if not work or speed == float("inf"):
            then()
            return
        self.users.update(dict.fromkeys(shared, 1))
        self.flows.append(_Flow(work, speed, shared, then))

    def _start(self, device: int) -> None:
        """Start the next job of a device if it can run."""
        queue = self.queues[device]
        if device in self.busy or not queue or self.missing[queue[0]]:
            return
        number = queue.popleft()
        self.busy.add(device)
        self.spans[number].append(self.now)
        cores = self.cluster.cores
        shared = {("cores", self.cluster.node(device)): cores} if cores else {}
        self._flow(self.jobs[number].seconds, 1, shared, lambda: self._finish(number))

    def _finish(self, number: int) -> None:
        source = self.jobs[number].device
        self.spans[number].append(self.now)
        self.busy.discard(source)
        for target, readers in self.readers[number].items():
            if target == source:
                self._arrive(readers)
            else:
                self._send(number, source, target, readers)
        self._start(source)

    def _send(self, number, source, target, readers) -> None:
        begin, size = self.now, max(readers.values())
        link = self.cluster.network.link(source, target)
        shared = {("out", source): link.bandwidth, ("in", target): link.bandwidth}

        def arrived():
            self.messages.append(Sending(number, source, target, size, begin, self.now))
            self._arrive(readers)

        self._flow(link.latency, 1, {}, lambda: self._flow(size, link.bandwidth, shared, arrived))

    def _arrive(self, readers) -> None:
        for number in readers:
            self.missing[number] -= 1
        for device in {self.jobs[number].device for number in readers}:
            self._start(device)


@checked(forward=0, backward=0, size=0)
def pipeline_jobs(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], size: float = 0
) -> list[Job]:
    """The jobs of a pipeline schedule of whole backwards: times by position, messages of `size` bytes between ranks.

    Raises ValueError for a schedule whose backward is split in two.
    """
    if schedule.splits:
        raise ValueError(
            f"{schedule.name or 'This schedule'} splits its backward. Use gpipe, 1f1b or interleaved."
        )
    if min(len(forward), len(backward)) < schedule.depth:
        given = f"not {len(forward)} and {len(backward)}"
        raise ValueError(
            f"{schedule.depth} stages take a time each, forward and backward, {given}. Give one each."
        )
    order = [(rank, op) for rank, ops in enumerate(schedule.orders) for op in ops]
    number = {op._replace(kind="I") if op.kind == "B" else op: i for i, (_, op) in enumerate(order)}
    times = lambda op: {"F": forward, "B": backward}[op.kind][schedule.position(op.stage)]
    needs = lambda op: tuple((number[need], size) for need in schedule.needs(op))
    return [Job(str(op), rank, times(op), needs(op)) for rank, op in order]
