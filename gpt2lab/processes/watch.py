"""The parent's loop over a running job: collects results and printed lines, and finds out what went wrong."""

import os
import time
from multiprocessing.connection import wait

from . import deadlock
from .failure import RankFailed, how_it_ended
from .pool import MOST_PRINTED, Pool
from .results import unpack, unpickled

GRACE = 0.15  # seconds after a failure in which another rank may still report that it failed first
LONG_GRACE = 1.0  # the same while all reports so far are of lost peers, which is never the cause
DYING = 60.0  # and while one that has not reported is on its way out: to give back much memory takes long
STARTUP = 120.0  # seconds
LOST = 255  # the exit code of a rank whose forkserver, which knew it, is gone
AWAY = 2.0  # seconds between two looks at the ranks, after which they get their whole time again


class Watch:
    """Follows one job on a pool until every rank has answered or the run has failed."""

    def __init__(self, pool: Pool, timeout: float, show):
        self.pool, self.timeout, self.show = pool, timeout, show
        self.results: dict[int, dict] = {}
        self.raised: dict[int, dict] = {}
        self.suspects: dict[int, dict] = {}
        self.dead: dict[int, float] = {}
        self.trouble: float | None = None
        self.start = time.monotonic()
        self.sign_of_life = {member.rank: self.start for member in pool.members}
        self.held = {member.rank: pool.held_up(member.rank) for member in pool.members}
        self.calls = dict.fromkeys(self.sign_of_life, 0)
        self.looked = self.back = self.start

    def run(self) -> list:
        """Wait for all results; raises RankFailed as soon as it is known which rank caused a failure."""
        while len(self.results) < len(self.pool.members):
            self._listen()
            if self.trouble is not None and self._clear_enough():
                self._blame()
            if self.trouble is None:
                self._check_progress()
        self._drain()
        return [self._unpack(rank) for rank in sorted(self.results)]

    def _unpack(self, rank: int):
        try:
            return unpack(self.results[rank])
        except (Exception, SystemExit) as error:
            text = f"The result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
            raise RankFailed(text, rank, "TypeError") from error

    def _answered(self, rank: int) -> bool:
        return rank in self.results or rank in self.raised or rank in self.dead

    def _listen(self) -> None:
        members = self.pool.members
        pipes = {member.pipe: member for member in members if not self._answered(member.rank)}
        outputs = {member.output: member for member in members if member.rank not in self.dead}
        ends = {member.process.sentinel: member for member in pipes.values()}
        ready = wait([*pipes, *outputs, *ends], 0.05)
        for item in ready:  # printed lines first: they were written before the message
            if item in outputs:
                self._print(outputs[item])
        for item in ready:
            if item in pipes:
                self._receive(pipes[item])
            elif item in ends and not wait([ends[item].pipe], 0):  # dead, and its last message is read
                self._died(ends[item].rank)

    def _print(self, member) -> None:
        lines = member.lines()
        if lines is None:
            self._died(member.rank)
            return
        if member.shown <= MOST_PRINTED:  # what is not shown is no progress
            self._alive(member.rank)
        self.show(member.rank, lines)

    def _receive(self, member) -> None:
        messages = member.messages()
        if messages is None:
            self._died(member.rank)
            return
        for body in messages:
            self._take(member.rank, unpickled(body))

    def _take(self, rank: int, message: dict) -> None:
        self._alive(rank)
        if message["kind"] == "up":
            self.pool.up.add(rank)
        elif message["kind"] == "result":
            self.results[rank] = message
        elif message["kind"] == "suspect":
            self.suspects[rank] = message
            self._troubled()
        else:
            self.raised[rank] = message
            self._troubled()

    def _died(self, rank: int) -> None:
        self.dead.setdefault(rank, time.monotonic())
        self._troubled()

    def _troubled(self) -> None:
        self.trouble = self.trouble or time.monotonic()

    def _causes(self) -> dict[int, float]:
        causes = {rank: report["time"] for rank, report in self.raised.items() if not report["lost_peer"]}
        return causes | {rank: report["time"] for rank, report in self.suspects.items()} | self.dead

    def _clear_enough(self) -> bool:
        waited = time.monotonic() - self.trouble
        silent = [member.rank for member in self.pool.members if not self._answered(member.rank)]
        longest = DYING if any(map(self.pool.is_dying, silent)) else LONG_GRACE
        return not silent or waited > longest or (waited > GRACE and bool(self._causes()))

    def _drain(self) -> None:
        """Show the lines that are still in the pipes, also those without a line end."""
        for member in self.pool.members:
            while wait([member.output], 0):
                lines = member.lines()
                if lines is None:
                    break
                self.show(member.rank, lines)
            self.show(member.rank, member.lines(last=True) or [])

    def _blame(self) -> None:
        self._drain()
        causes = self._causes() or {rank: report["time"] for rank, report in self.raised.items()}
        first = min(causes, key=lambda rank: (causes[rank], rank))
        report = self.suspects.get(first) or self.raised.get(first)
        if report is None:
            self._blame_dead(first)
        last = lambda of: of["text"].split("\n")[-2:]
        same = [r for r, other in self.raised.items() if r in causes and last(other) == last(report)]
        first = min([first, *same])
        report = self.suspects.get(first) or self.raised[first]
        text = f"rank {first} raised {report['ename']}\n{report['text'].rstrip()}"
        raise RankFailed(text, first, report["ename"], self._states(time.monotonic()))

    def _blame_dead(self, rank: int) -> None:
        process, states = self.pool.members[rank].process, self._states(time.monotonic())
        process.join(5 if self.pool.is_dying(rank) else 0.5)  # a busy server tells its exit code late
        everyone = [member.process for member in self.pool.members]  # also those that had answered
        ended = wait([p.sentinel for p in everyone], 0)  # with their server gone, all at once
        if len(ended) == len(everyone) and {p.exitcode for p in everyone} == {LOST}:
            raise RankFailed(
                "The process that all ranks were started from is gone, and the ranks with it: it was killed, often by "
                "the system, out of memory. The next launch starts a new one.",
                None,
                "ProcessDied",
                states,
            )
        entry = self.pool.board.read(rank)
        call = f"{entry.op} #{entry.number} on axis {entry.axis!r}"
        doing = f"in {call}" if entry.since else "outside any communication"
        if not entry.since and entry.op:
            doing += f"; its last call was {call}"
        how = how_it_ended(process.exitcode, rank in self.results)
        raise RankFailed(f"rank {rank} {how} ({doing}).", rank, "ProcessDied", states)

    def _check_progress(self) -> None:
        now = time.monotonic()
        if now - self.looked > AWAY:  # this process was stopped (Ctrl-Z): most likely its ranks were, too
            self.back = now
            for rank in self.sign_of_life:
                self._alive(rank)
        self.looked = now
        if len(self.pool.up) < len(self.pool.members):
            if now - self.start > max(STARTUP, self.timeout):
                missing = sorted({member.rank for member in self.pool.members} - self.pool.up)
                raise RankFailed(
                    f"ranks {missing} did not start within {now - self.start:.0f} s.",
                    missing[0],
                    "TimeoutError",
                )
            for rank in self.sign_of_life:
                self._alive(rank)
            return
        waiting, idle = [], {}
        for rank in set(self.sign_of_life) - set(self.results):
            entry = self.pool.board.read(rank)
            if entry.calls != self.calls[rank]:
                self.calls[rank] = entry.calls
                self._alive(rank)
            if entry.since:
                waiting.append(now - max(entry.since, self.back))
            else:
                held = self.pool.held_up(rank) - self.held[rank]
                idle[rank] = now - self.sign_of_life[rank] - held
        if max(waiting, default=0.0) > deadlock.PATIENCE:
            self._look_for_a_circle(now)
        if max(idle.values(), default=0.0) > self.timeout:
            self._stuck(now, max(idle, key=idle.get))
        elif not idle and min(waiting, default=0.0) > self.timeout:
            self._stuck(now)

    def _alive(self, rank: int) -> None:
        self.sign_of_life[rank] = time.monotonic()
        self.held[rank] = self.pool.held_up(rank)

    def _look_for_a_circle(self, now: float) -> None:
        found = deadlock.find_circle(self.pool.board, sorted(set(self.sign_of_life) - set(self.results)), now)
        if not found:
            return
        states = self._states(now)
        lines = [
            f"The ranks wait in a circle: {deadlock.shown(found)}. Each needs a call that the next has not made:"
        ]
        lines += [
            f"  rank {rank} {states[rank]}" for rank in (*found, *(r for r in states if r not in found))
        ]
        self._drain()
        raise RankFailed("\n".join(lines), min(found), "Deadlock", states)

    def _stuck(self, now: float, culprit: int | None = None) -> None:
        lines = [f"The ranks are stuck: nothing moved for {self.timeout:g} s (timeout={self.timeout:g})."]
        states = self._states(now, self.pool)
        waiting = [rank for rank, state in states.items() if state.startswith("waits")]
        others = [rank for rank in states if rank not in waiting]
        lines += [f"  rank {rank} {states[rank]}" for rank in (*waiting, *others)]
        if culprit is None:
            stopped = [rank for rank, state in states.items() if state.startswith("is stopped")]
            culprit = min(stopped or others or waiting)
        if not self.pool.folder.exists():
            lines.append(
                f"  (Their private folder {self.pool.folder}, in which they meet, has been deleted.)"
            )
            culprit = culprit if waiting else None
        ranks, cores = len(states), os.cpu_count() or 1
        if ranks > cores:
            lines.append(
                f"  ({ranks} ranks share {cores} cores; if they are only slow, use a larger timeout=)"
            )
        self._drain()
        raise RankFailed("\n".join(lines), culprit, "TimeoutError", states)

    def _states(self, now: float, pool=None) -> dict[int, str]:
        return deadlock.states(self.pool.board, self.sign_of_life, self.results, now, pool)
