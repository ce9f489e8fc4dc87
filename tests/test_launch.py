"""Live ranks: what goes in, what comes back, in which order, and how pools keep state."""

import errno
import gc
import linecache
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpt2lab import RankFailed, Ranks, kept, launch, transport
from gpt2lab.processes import launch as launching

pytestmark = pytest.mark.live
forkserver = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="here every rank imports for itself"
)


@pytest.fixture(scope="module")
def pool():
    with Ranks(3, timeout=30, echo=False) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def loud():
    with Ranks(2, timeout=30) as ranks:
        yield ranks


def total(rank, world_size, *args, factor=1):
    x = torch.tensor([float(rank + 1)], dtype=torch.float64)
    dist.all_reduce(x)
    return rank, world_size, args, x.item() * factor


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_results_come_back_in_rank_order_with_arguments_passed_on(ranks):
    expected = ranks * (ranks + 1) / 2 * 10
    results = launch(total, "a", 2, ranks=ranks, factor=10)
    assert results == [(rank, ranks, ("a", 2), expected) for rank in range(ranks)]


def cell(source: str, name="/tmp/ipykernel_77/1234.py"):
    """Run source as a notebook does: in `__main__`, known to linecache only."""
    module = types.ModuleType("__main__")
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), vars(module))
    return module


def test_functions_closures_lambdas_and_classes_of_a_cell_work(pool):
    module = cell(
        textwrap.dedent("""
        class Point:
            def __init__(self, x): self.x = x
            def double(self): return Point(2 * self.x)
        base = 100
        def outer(offset):
            def inner(rank, world_size):
                return Point(base + offset + rank).double().x
            return inner
        from functools import cache, lru_cache
        @cache
        def sum_to(n):
            return n and n + sum_to(n - 1)
        @lru_cache(maxsize=2)
        def sums(rank, world_size):
            @cache
            def twice(x): return 2 * x
            return twice(sum_to(rank + 2)), sum_to.cache_info().misses, twice
        """)
    )
    assert pool.run(module.outer(5)) == [210, 212, 214]
    results, sums = pool.run(module.sums), module.sums
    assert [result[:2] for result in results] == [(6, 3), (12, 4), (20, 5)] and results[0][2](5) == 10
    assert pool.run(lambda rank, _: sums.cache_parameters()["maxsize"]) == [2, 2, 2]
    assert pool.run(lambda rank, world_size: rank * world_size) == [0, 3, 6]


def test_tensors_models_and_large_results_survive_the_way_back(pool):
    big = pool.run(lambda rank, _: torch.full((1_000_000,), rank, dtype=torch.float64))
    assert [x.unique().item() for x in big] == [0, 1, 2]
    layer = pool.run(lambda rank, _: torch.nn.Linear(2, 2))[1]
    assert isinstance(layer, torch.nn.Linear)


def talk(rank, world_size):
    dist.barrier()
    for line in range(3):
        print(f"line {line} of {rank}")
    print("no newline at the end", end="")


def test_lines_come_back_rank_by_rank(capsys):
    launch(talk, ranks=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"[rank {r}] {text}"
        for r in range(3)
        for text in [*(f"line {i} of {r}" for i in range(3)), "no newline at the end"]
    ]


def test_live_lines_keep_their_order_within_a_rank_and_silence_is_silent(capsys):
    launch(talk, ranks=2, echo="live")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[rank 1]")] == [
        *(f"[rank 1] line {i} of 1" for i in range(3)),
        "[rank 1] no newline at the end",
    ]
    launch(talk, ranks=2, echo=False)
    assert capsys.readouterr().out == ""


def test_much_output_does_not_block_a_rank(capsys):
    launch(lambda rank, _: print("x" * 500_000), ranks=2)
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [500_009] * 2


@pytest.mark.parametrize(
    "text", ["x" * 30_000_000, "line\n" * 6_000_000, "\n" * 300_000], ids=["a line", "lines", "empty lines"]
)
def test_endless_output_is_cut_with_a_notice(text, loud, capsys):
    assert loud.run(lambda rank, _, text: rank or print(text), text) == [None, 1]
    shown = capsys.readouterr().out
    assert (
        "[rank 0] ... this rank printed more than 10,000,000 bytes, the end of a line counted as 50; the rest"
        in shown
    )
    assert len(shown) < 40_000_000
    loud.run(lambda rank, _: print("again"))
    assert capsys.readouterr().out == "[rank 0] again\n[rank 1] again\n"


def test_many_lines_are_printed_into_one_stream_and_no_rank_dies(pool):
    """Another stream in its place, after as much as is shown, ended a rank that was printing by SIGSEGV."""

    def prints(rank, _):
        first = sys.stdout
        for _ in range(260_000):
            print("line")
        return sys.stdout is first

    assert pool.run(prints) == [True] * 3


def test_a_line_of_megabytes_is_cut(loud, capsys):
    loud.run(lambda rank, _: rank or print("x" * 2_000_000))
    assert capsys.readouterr().out.endswith("xx ... and 1,000,000 bytes more\n")


class Awkward:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


class Silent(Exception):
    def __str__(self):
        raise ValueError("no words")


def raises(error):
    raise error


def start_a_process():
    import multiprocessing

    multiprocessing.Process(target=print).start()


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (
            lambda rank, _: rank or Awkward(divmod, 1, 0),
            "result of rank 0 cannot be read here: ZeroDivisionError",
        ),
        (
            lambda rank, _: rank or (i for i in range(3)),
            r"\(a generator\) cannot be sent back.*Return numbers, strings, tensors",
        ),
        (lambda rank, _: rank or Awkward(exit, 3), "result of rank 0 cannot be read here: SystemExit: 3"),
        (lambda rank, _: rank or raises(Silent()), r"rank 0 raised Silent\n.*exception str\(\) failed"),
        (lambda rank, _: rank or raises(ValueError("y" * 10**7)), "characters left out"),
        (lambda rank, _: rank or start_a_process(), "A rank cannot start processes of its own: use threads"),
    ],
)
def test_an_awkward_result_or_error_is_told_with_its_rank(fn, words, pool):
    with pytest.raises(RankFailed, match=f"(?s){words}") as failed:
        pool.run(fn)
    assert failed.value.rank == 0 and len(str(failed.value)) < 30_000


def test_a_pool_keeps_its_processes_and_their_state(pool):
    def remember(rank, world_size, value=None):
        if value is not None:
            kept["value"] = value + rank
        return os.getpid(), kept.get("value")

    first = pool.run(remember, 40)
    second = pool.run(remember)
    assert first == second
    assert [value for _, value in second] == [40, 41, 42]
    assert len({pid for pid, _ in second} | {os.getpid()}) == 4
    assert "value" not in kept  # the parent has its own, empty one


def test_a_pool_restarts_its_ranks_after_a_failure(pool):
    before = pool.run(lambda rank, _: os.getpid())

    def fail(rank, world_size):
        raise KeyError(rank)

    with pytest.raises(RankFailed, match="KeyError"):
        pool.run(fail)
    assert not pool.alive
    after = pool.run(lambda rank, _: os.getpid())
    assert not set(before) & set(after)
    assert pool.alive and pool.run(total, factor=2)[0][3] == 12


def test_every_rank_has_one_thread_and_a_ready_group(pool):
    def describe(rank, world_size):
        return torch.get_num_threads(), dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert pool.run(describe) == [(1, rank, 3, transport.default()) for rank in range(3)]


@forkserver
def test_what_the_forkserver_has_imported_is_looked_through_for_garbage_by_no_rank(pool):
    assert all(count > 100_000 for count in pool.run(lambda rank, world: gc.get_freeze_count()))


def python(script: str, **how) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


EDITED = r"""
import sys
from pathlib import Path
import gpt2lab.plots.style, gpt2lab.verify
from gpt2lab import launch
from gpt2lab.schedules import formulas

def seen(rank, world_size):
    here = [f"gpt2lab.{name}" in sys.modules for name in ("verify", "plots.style")]
    from gpt2lab.schedules import formulas
    return getattr(formulas, "ADDED", None), *here

for change in ("", "ADDED = 1", "ADDED = 2"):
    with open(formulas.__file__, "a") as file:
        file.write(change + "\n" * bool(change))
    print(launch(seen, ranks=2))
Path(formulas.__file__).unlink()
print(launch(lambda rank, _: "gpt2lab.schedules" in sys.modules, ranks=1))
"""


@forkserver
def test_ranks_begin_with_what_their_parent_has_imported_but_run_the_files_as_they_are_now(tmp_path):
    package = Path(launching.__file__).parents[1]
    shutil.copytree(package, tmp_path / "gpt2lab", ignore=shutil.ignore_patterns("__pycache__"))
    found = python(EDITED, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    want = [(None, True, False), (1, False, False), (2, False, False)]
    assert found.splitlines() == [*(str([one] * 2) for one in want), "[False]"]


CHECKERS = r"""
import importlib, pkgutil, sys
import gpt2lab.plots.style
from gpt2lab import launch
from gpt2lab.lessons import exercises

names = [exercises.__name__ + "." + module.name for module in pkgutil.iter_modules(exercises.__path__)]
checkers = [importlib.import_module(name) for name in names]

def imported_here(rank, world_size, checkers):
    from gpt2lab.processes.preload import FILES
    own = [name for name in sys.modules if name[:7] == "gpt2lab" and sys.modules[name].__file__ not in FILES]
    return len(checkers), own, "matplotlib" in sys.modules

print(launch(imported_here, checkers, ranks=2))
"""


@forkserver
def test_a_rank_that_tries_an_answer_imports_nothing_more_and_nothing_that_draws():
    checkers = len(list(Path(launching.__file__).parents[1].glob("lessons/exercises/[!_]*.py")))
    assert python(CHECKERS) == f"{[(checkers, [], False)] * 2}\n"


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), BlockingIOError(errno.EAGAIN, "temporarily")])
def test_a_system_that_allows_no_more_processes_is_told(error, monkeypatch):
    """As under `ulimit -u 3`, which does not bind root: the process server does not start, or dies of its next fork."""

    def refused(_):
        raise error

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "_Popen", staticmethod(refused))
    with pytest.raises(
        OSError, match="^no more processes or threads are allowed. Allow them: ulimit -u 4096.$"
    ):
        launch(lambda rank, world_size: rank, ranks=2)


@forkserver
def test_a_rank_that_cannot_start_leaves_no_descriptor(monkeypatch):
    def refused(_):
        raise OSError("no")

    launch(total, ranks=1)
    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "_Popen", staticmethod(refused))
    here = lambda: len(os.listdir("/dev/fd"))
    before = here()
    with pytest.raises(OSError, match="no") as kept:  # and with it all that its traceback refers to
        launch(total, ranks=2)
    assert here() == before and kept


def test_wrong_arguments_are_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(
        "gpt2lab.processes.pool.Pool.__init__", lambda *_: pytest.fail("a process was started")
    )
    for bad, words in [
        (lambda: launch(total, ranks=0), "ranks=0.*1 or more"),
        (lambda: launch(total, ranks=2.5), "whole number"),
        (lambda: launch(total, timeout="3"), "timeout='3'.*more than 0"),
        (lambda: launch(total, timeout=float("inf")), "at most 1,000,000"),
        (lambda: launch(lambda: 1), r"Ranks call <lambda>\(rank, world_size, ...\)"),
        (lambda: launch(total, timeout=0), "more than 0"),
        (lambda: launch(total, echo="loud"), "'grouped', 'columns', 'live' or False"),
        (lambda: launch("total"), "needs a function"),
        (lambda: launch(total, threading.Lock()), "cannot be sent to the ranks"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            bad()


UNGUARDED = """
from gpt2lab import launch
print("start")
offset = 7
print(launch(lambda rank, world_size: rank + offset, ranks=2))
"""


def test_a_script_without_a_main_guard_works_and_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("start\n[7, 8]\n", "")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory when told to")
def test_ranks_start_with_memory_that_is_kept_and_the_caller_s_environment_is_as_before():
    script = "import os; from gpt2lab import launch; from gpt2lab.machine import fast; "
    script += "print(launch(lambda rank, world_size: fast.huge_pages().on, ranks=2), 'GLIBC_TUNABLES' in os.environ)"
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    assert python(script, env=env) == "[True, True] False\n"
