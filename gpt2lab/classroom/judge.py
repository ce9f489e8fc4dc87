"""The process in which the answers of one student are tried: `python -m gpt2lab.classroom.judge FD SECONDS GIB`.

It reads a job in JSON from its standard input and writes one line of JSON for each step into a pipe that only it knows:
{"begin": i} before an answer is tried, {"end": i, "verdicts": [[name, status, words], ...], "seconds": s, "apart": b}
after it, {"done": true} after the last; `apart` says whether the answer could not reach its own verdict.
Nothing that answers print is kept. This process runs none of their code (`apart`).
"""

import json
import os
import resource
import signal
import sys
import time

from ..processes.orphans import adopt, closed_to_others, die_with_parent


def limit(gib: float) -> None:
    """Refuse this process and all that it starts more memory, files over 1 GiB, and core files."""
    for what, most in (("DATA", int(gib * 2**30)), ("FSIZE", 2**30), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (most, most))


def main(pipe: int, seconds: float, gib: float) -> None:
    """Try every answer of the job."""
    os.set_inheritable(pipe, False)
    die_with_parent(signal.SIGKILL)
    job = json.load(sys.stdin)
    tell = lambda **step: os.write(pipe, json.dumps(step).encode() + b"\n")
    limit(gib)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    from . import carried

    carried.carry(job.pop("checkers"))
    from ..lessons import exercises
    from ..lessons.desk import Desk
    from . import apart

    closed_to_others()
    adopt()
    exercises.LIMIT = seconds
    desk = Desk(job["lesson"], job["setup"])
    for i, (before, answer, checks) in job["answers"]:
        tell(begin=i)
        start = time.perf_counter()
        verdicts, out_of_reach = apart.judged(desk, before, answer, checks, pipe)
        seconds = round(time.perf_counter() - start, 2)
        tell(end=i, verdicts=verdicts, seconds=seconds, apart=out_of_reach)
    tell(done=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    os._exit(0)  # whatever threads an answer has left behind
