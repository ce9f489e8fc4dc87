"""Run parts of the test suite, one after the other, each on two cores; say what they took; fail if one failed.

`python tests/run.py lint tests gloo lessons browser` is `make test`; the environment says which day (TODAY, see
`tiers.py`), one lesson (LESSON=07) or the slow tests too (SLOW=1). Processor seconds of a part are those of all its
processes, ranks and kernels included, which are counted when they end. Its budget is in updates of `nano`, timed before
and after in the same run, so that it means the same on every machine.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiers

ROOT = tiers.ROOT
BIN = ROOT / ".venv/bin"
PYTEST = [str(BIN / "python"), "-m", "pytest"]
# Each with whole files, in the order of conftest.py; of three on two cores one may wait.
WORKERS = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
TOLD, TOO_MUCH = 1.5, 3.0  # times the budget

# Over gloo, which carries every run on several machines: all calls, all faults, of each strategy one plan and each
# kind of pair. Numbers, bytes, memory and times are made and counted above the transport: the same over both.
GLOO = ("test_comm", "test_algorithms", "test_strided", "faults/test_ranks_fail")
GLOO += tuple(f"equivalence/test_{name}" for name in ("equal", "bfloat16", "generation"))
GLOO_SLOW = (
    "test_data",
    "test_zero",
    "test_zero_labs",
    "test_tensor",
    "test_pipeline",
    "test_context",
    "test_halo",
)
GLOO_SLOW += ("test_plan_choices", "test_planner_labs", "test_asynchronous", "test_asynchronous_labs")
GLOO_SLOW += ("test_sharding", "test_sharding_programs", "test_sharding_stages")

SLOW = "SLOW" in os.environ
LESSON = os.environ.get("LESSON", "")
NOT_SLOW = "" if SLOW else " and not slow"


def pytest(*words: str, marks: str, **env: str) -> int:
    """Run pytest; 0 where all passed, or nothing was to be run."""
    call = [*PYTEST, *words, "-m", marks + NOT_SLOW, "--durations", "40", "--durations-min", "5"]
    with tempfile.TemporaryDirectory(prefix="t") as short:  # names of sockets are at most 107 bytes long
        call += ["--basetemp", f"{short}/t"]
        code = subprocess.run(call, cwd=ROOT, env=os.environ | env).returncode
    return 0 if code == 5 else code


def files(names: tuple[str, ...]) -> list[str]:
    """Paths of test files or folders by their names in tests/."""
    return [f"tests/{name}" if (ROOT / f"tests/{name}").is_dir() else f"tests/{name}.py" for name in names]


def lint() -> int:
    """Form, the walls between rooms, names, and whether every notebook is built from its source."""
    calls = ([str(BIN / "ruff"), "check", "."], [str(BIN / "ruff"), "format", "--check", "."])
    build = [str(BIN / "python"), "-m", "gpt2lab.lessons.build", "--check"]
    return max(subprocess.run(call, cwd=ROOT).returncode for call in (*calls, build))


def tests() -> int:
    """Everything that is no notebook and needs no browser: unit tests, live ranks, faults, mutants."""
    if tiers.today() != "all" and not LESSON and (left := tiers.close(tiers.changed())[1]):
        names = (path.removeprefix("tests/").removesuffix(".py") for path in left)
        print("closer files run whole, these what is of today:", *names, flush=True)
    return pytest(*(tiers.tests_of_lesson(LESSON) if LESSON else ["tests"]), *WORKERS, marks="not browser")


def quick() -> int:
    """Before a commit: what starts no ranks and is short, and one live test a strategy."""
    one = pytest("tests/equivalence/test_equal.py", "-k", "each", marks="live")
    short = "not live and not mutant and not browser and not rotates"
    left = [f"--ignore=tests/{folder}" for folder in ("mutants", "browser")]
    return max(pytest("tests", *left, *WORKERS, "-n", "2", marks=short), one)  # none of them waits


def gloo() -> int:
    """The other transport."""
    names = GLOO + (GLOO_SLOW if SLOW else ())
    return pytest(*files(names), *WORKERS, marks="live and not mutant", GPT2LAB_BACKEND="gloo")


def lessons() -> int:
    """Solutions strictly: text must be equal. Then, in the same kernel, what is otherwise for students: no cell fails.

    The slow tests also run the notebooks of students by themselves, from the first cell to the last.
    """
    chosen, left = ([LESSON], []) if LESSON else tiers.lessons()
    print(f"lessons {' '.join(chosen)}", f"(left out: {' '.join(left)})" if left else "", flush=True)
    nbval = ("-p", "no_address_parser", "-p", "nbval", "--nbval-cell-timeout", "120", "--timeout", "600")
    strict = {"GPT2LAB_STATIC": "1", "GPT2LAB_STRICT": "1"}
    with tempfile.TemporaryDirectory() as folder:
        write = [str(BIN / "python"), "tests/run_all.py", folder, *chosen]
        status = subprocess.run(write, cwd=ROOT).returncode
        written = sorted(map(str, Path(folder).glob("*.ipynb")))
        status = status or pytest(*nbval, "--nbval", *WORKERS, *written, marks="not browser", **strict)
    if SLOW:
        own = sorted(str(path) for n in chosen for path in (ROOT / "notebooks").glob(f"{n}_*.ipynb"))
        status = max(
            status, pytest(*nbval, "--nbval-lax", *WORKERS, *own, marks="not browser", GPT2LAB_STATIC="1")
        )
    return status


def browser() -> int:
    """JupyterLab and the pages in a real browser."""
    return pytest("tests/browser", "-rs", marks="browser")


def mutants() -> int:
    """Only the planted bugs."""
    return pytest("tests", *WORKERS, marks="mutant and not browser")


def gpu() -> int:
    """What needs GPUs. More ranks than GPUs share them, where NCCL can."""
    share = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return pytest("tests/test_devices.py", "tests/test_gpu.py", "-rs", marks="gpu", **share)


# Updates of nano that a part may take when nothing rotates. Raise one only with a reason.
PARTS = {
    lint: 200,
    tests: 20_000,
    quick: 1_500,
    gloo: 2_500,
    lessons: 10_000,
    browser: 2_500,
    mutants: 6_000,
    gpu: 5_000,
}

UPDATE = """
import time, torch
from gpt2lab.model import PRESETS
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import example_batch
from gpt2lab.train import Trainer
torch.set_num_threads(1)
trainer = Trainer(build(Plan(), PRESETS["nano"], Mesh(alone=True), torch.float32))
batch, seconds = example_batch(PRESETS["nano"], 2, 128), []
for _ in range(5):
    begin = time.process_time()
    trainer.step(batch)
    seconds.append(time.process_time() - begin)
print(min(seconds))
"""


def update_seconds() -> float:
    """Processor seconds of one serial update of nano here and now."""
    done = subprocess.run([str(BIN / "python"), "-c", UPDATE], cwd=ROOT, capture_output=True, text=True)
    return float(done.stdout or "nan")


def adopt() -> None:
    """On Linux, become the parent of processes whose own parent has ended, so that their seconds are counted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def processor_seconds() -> float:
    """Those of all processes that have ended so far."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    spent = os.times()
    return spent.children_user + spent.children_system


def main(names: list[str]) -> int:
    """Run the parts of these names."""
    by_name = {part.__name__: part for part in PARTS}
    if unknown := [name for name in names if name not in by_name]:
        print(f"There is no part {unknown[0]!r}. Use {', '.join(by_name)}.")
        return 2
    os.environ["TODAY"] = os.environ.get("TODAY") or ("all" if LESSON else tiers.day_of_commit())
    if os.environ["TODAY"] not in {"all", *map(str, range(tiers.DAYS))}:
        print(f"TODAY={os.environ['TODAY']} is no day. Use 0 to {tiers.DAYS - 1}, or all.")
        return 2
    today = os.environ["TODAY"]
    day = "everything" if today == "all" else f"day {today} of 0 to {tiers.DAYS - 1}"
    print(f"TODAY={today}: {day}{f', of lesson {LESSON}' * bool(LESSON)}", flush=True)
    for name, value in {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONHASHSEED": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of hundreds of processes compiles the package
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    )
    adopt()
    update, lines, total = update_seconds(), [], (time.monotonic(), processor_seconds())
    for name in names:
        print(f"== {name}", flush=True)
        begin = time.monotonic(), processor_seconds()
        failed = by_name[name]() != 0
        lines.append((name, time.monotonic() - begin[0], processor_seconds() - begin[1], failed))
    update = min(update, update_seconds())
    status = 0
    print(
        f"\n  {'':9} {'seconds':>8} {'processor':>10} {'updates':>9} {'budget':>8}   (nano: {update:.4f} s an update)"
    )
    for name, seconds, spent, failed in lines:
        used, budget = spent / update, PARTS[by_name[name]]
        over = "" if SLOW or not used > TOLD * budget else f"over its budget {used / budget:.1f} times  "
        failed |= bool(over) and used > TOO_MUCH * budget
        status |= failed
        verdict = "FAILED" if failed else "ok"
        print(f"  {name:9} {seconds:8.0f} {spent:10.0f} {used:9,.0f} {budget:8,}   {over}{verdict}")
    print(f"  {'total':9} {time.monotonic() - total[0]:8.0f} {processor_seconds() - total[1]:10.0f}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
