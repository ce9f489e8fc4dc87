"""What a student may hand in to harm others, and answers that try to leave their sandbox: powerless, or marked."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest
import submissions
from submissions import alive

from gpt2lab import cli
from gpt2lab.classroom import grade as grading
from gpt2lab.classroom import reading, report, sandbox
from gpt2lab.classroom.submission import Answer, Unreadable, read_answers, touches

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[1]
LIMITS = sandbox.Limits(seconds=5.0, gib=1.0)
ODD = {  # student -> (what stands before the answer, the answer's body, words of the verdict)
    "star": ("", "    from math import *\n    return x / 2", "import * only allowed at module level"),
    "global": ("", "    x = 1\n    global x\n    return 2", "parameter and global"),
    "twice": ("", "    return x / 2\n\n\ndef other(a, a):\n    pass", "duplicate argument 'a'"),
    "nonlocal": ("", "    nonlocal y\n    return 2", "no binding for nonlocal"),
    "deep": ("", f"    return {'(' * 5000}x{')' * 5000}", "your cell is not Python"),
    "long sum": ("", f"    return x / 2 + {'+'.join(['0'] * 50_000)}", "your cell is not Python"),
    "null": ("", "    return x / 2\0", "null bytes"),
    "surrogate": ("", '    raise ValueError("\\ud800 \\x1b[31m")', r"ValueError: \ud800 \x1b[31m"),
    "large": ("", f'    return "{"x" * 2**21}"', "the limit is 1,048,576"),
    "assignments": ("\n".join(f"v{i} = {i}" for i in range(20_000)), "    return x / 2 + v0", ""),
    "helpers": (
        "\n".join(f"def h{i}(x):\n    return h{i + 1}(x)\n" for i in range(600)) + "def h600(x):\n    return x / 2\n",
        "    return h0(x)",
        "",
    ),
    "forges": ("", '    import os\n    for fd in range(3, 4096):\n        try:\n            os.write(fd, b"\\xff\\n")\n'
               "        except OSError:\n            pass\n    return x", "wrote to its judge"),
}  # fmt: skip
FILES = {
    "fifo": "This is a link or no plain file",
    "folder.ipynb/inner": "The file is not a notebook",
    r"not \udcff text": "The file is not a notebook",
    "+" * 240: "The file is not a notebook",
    "=HYPERLINK(1)": "The file is not a notebook",
    r"line\x1b[2J\nPASS": "The file is not a notebook",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The made-up lesson; in `class` a good student, odd files and two odd answers, in `alike` all odd answers."""
    folder = tmp_path_factory.mktemp("odd")
    of, place = submissions.lesson(folder), folder / "class"
    place.mkdir()
    (folder / "alike").mkdir()
    plain = json.loads(json.dumps(of.notebook(student=False)))
    (half,) = (c for c in plain["cells"] if "def half" in c["source"])
    solved = half["source"]
    (place / "good.ipynb").write_text(json.dumps(plain))
    for name, (before, body, _) in ODD.items():
        half["source"] = solved.replace("    return x / 2", body)
        extra = {"cell_type": "code", "metadata": {}, "source": before}
        odd = json.dumps(plain | {"cells": [*plain["cells"], extra]})
        for of_all in ("alike", "class")[: 1 + (name in ("surrogate", "forges"))]:
            (folder / of_all / f"{name}.ipynb").write_text(odd)
    os.mkfifo(place / "fifo.ipynb")
    (place / "folder.ipynb").mkdir()
    for name in ("folder.ipynb/inner", "not \udcff text", "+" * 240, "=HYPERLINK(1)", "line\x1b[2J\nPASS"):
        (place / f"{name}.ipynb").write_text("{}")
    return folder


def words(home, *more):
    """`gpt2lab grade` as a teacher would call it."""
    where = [str(home / "class"), "--out", str(home / "grades.csv"), "--notebooks", str(home / "notebooks")]
    return ["grade", "07", *where, "--seconds", "5", "--memory", "1", *more]


def test_no_odd_answer_touches_another_ones_verdict(home):
    files = {name: home / "alike" / f"{name}.ipynb" for name in ODD}
    found = submissions.together(files, submissions.lesson(home), LIMITS)
    for name, (*_, due) in ODD.items():
        half, third = found[name]["exercises"]
        assert due in half["words"] and (half["status"] == "PASS") == (not due), (name, half)
        assert third["status"] == "PASS", (name, third)


def test_no_odd_notebook_touches_another_students_result(home, capsys):
    assert cli.main(words(home)) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
    found = {r["student"]: r for r in report.known_results(home / "grades.csv", "07_halves")}
    assert set(found) == {"good", "surrogate", "forges", *FILES}
    for name, due in FILES.items():
        assert due in found[name]["error"], name
    assert [e["status"] for e in found["good"]["exercises"]] == ["PASS", "PASS"]
    table = (home / "grades.csv").read_text()
    assert "\n'=HYPERLINK(1),0,2" in table and "\x1b" not in table
    assert len(table.splitlines()) == len(found) + 1
    assert len(list((home / "grades").iterdir())) == len(found)


def test_a_notebook_that_takes_too_long_or_too_much_to_read_is_a_sentence(tmp_path, monkeypatch):
    of = submissions.lesson(tmp_path)
    (tmp_path / "ann.ipynb").write_text("[" + "{}," * 2**22 + "{}]")
    for name, most in (("SECONDS", 1), ("GIB", 0.1)):
        limited = f"from gpt2lab.classroom import reading; reading.{name} = {most}; reading.main()"
        monkeypatch.setattr(reading, "PROGRAM", ["-c", limited])
        found = grading.graded(tmp_path / "ann.ipynb", of, LIMITS)
        assert "cannot be read within" in found["error"] or "is not a notebook" in found["error"]
        assert {e["status"] for e in found["exercises"]} == {"NONE"}


def mutated(data: bytes, chance) -> bytes:
    """A notebook with damage: in its bytes, its JSON, or its cells."""
    kind = chance.randrange(4)
    if kind == 0:
        data = bytearray(data)
        for _ in range(chance.randint(1, 20)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    if kind == 1:
        a, b = sorted(chance.randrange(len(data)) for _ in range(2))
        return data[:a] + data[b:] if chance.random() < 0.5 else data[:b] + data[a:]
    odd = [
        None,
        7,
        -1.5,
        "",
        [],
        {},
        [[]],
        {"a": 1},
        True,
        "\ud800",
        "x" * 1000,
        10**400,
        ["def half(x):", 3],
    ]
    notebook = json.loads(data)
    at, key = notebook, None
    while isinstance(at, dict | list) and at and (key is None or chance.random() < 0.8):
        into, key = at, chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = at[key]
    if kind == 3 and isinstance(at, str) and at:
        cut = chance.randrange(len(at))
        junk = chance.choice(
            ["\0", "(" * 300, "\nnonlocal q\n", "\ndef f(a, a): pass\n", "\\", "\r", "'''", "\n\t"]
        )
        into[key] = at[:cut] + junk + at[cut:]
    else:
        into[key] = chance.choice(odd)
    return json.dumps(notebook).encode("utf-8", "surrogatepass")


def test_mutated_notebooks_are_read_or_refused_in_a_sentence(tmp_path):
    of, chance = submissions.lesson(tmp_path), random.Random(3)
    data = json.dumps(json.loads(json.dumps(of.notebook(student=False)))).encode()
    seen = {"read": 0, "refused": 0}
    for _ in range(500):
        try:
            parts, _ = read_answers(mutated(data, chance), of)
            assert [part.titles for part in parts] == [("half",), ("third",)]
            assert all((part.text is None) == bool(part.words) for part in parts)
            seen["read"] += 1
        except Unreadable as error:
            assert str(error).endswith(".")
            seen["refused"] += 1
    assert min(seen.values()) > 50, seen


NO_RESULT = "is no result of a grading"
KNOWN = ("[]", "{", *(f'{{"lesson": "07_halves", "results": [{one}]}}' for one in ("3", '{"student": 1}')))
OUT = {  # --out: (files that are there, the words)
    "grades": ({}, "must be a table"),
    "g.json": ({}, "must be a table"),
    "missing/g.csv": ({}, "is not there"),
    "foreign.csv": ({"foreign.csv": "name,mark\nann,1\n"}, NO_RESULT),
    "pages.csv": ({"pages/ann.txt": ""}, "is there already"),
    **{f"own{i}.csv": ({f"own{i}.json": text}, NO_RESULT) for i, text in enumerate(KNOWN)},
}


@pytest.mark.parametrize("out", OUT)
def test_an_out_that_would_lose_something_is_refused_before_the_first_student(
    home, tmp_path, out, capsys, monkeypatch
):
    monkeypatch.setattr(grading, "graded", lambda *_: pytest.fail("a student was graded"))
    files, due = OUT[out]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cli.main(words(home, "--again", "--out", str(tmp_path / out))) == 2
    assert due in capsys.readouterr().err
    left = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == files


def test_results_of_another_lesson_are_not_overwritten(tmp_path):
    one = {"student": "a", "file": "a", "key": "k", "error": "", "notes": [], "exercises": []}
    report.write_results([one], "04_data", tmp_path / "g.csv", "")
    with pytest.raises(ValueError, match="holds the results of 04_data, not of 07_halves"):
        report.known_results(tmp_path / "g.csv", "07_halves")


POWERLESS = {  # what must raise OSError (or end in a failed command) in the sandbox
    "remount": 'run("mount", "-o", "remount,bind,rw", "/")',
    "remount usr": 'run("mount", "-o", "remount,rw", "/usr")',
    "umount": 'run("umount", "-l", "/proc")',
    "bind": 'run("mount", "--bind", "/tmp", "/usr")',
    "new namespace": 'run("unshare", "-Urm", "true")',
    "chroot": 'os.chroot("/tmp")',
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "device": 'os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0))',
    "write the root": 'open("/own", "w")',
    "write the package": 'open({package!r} + "/__init__.py", "a")',
    "write python": 'open(sys.prefix + "/own", "w")',
    "write proc": 'open("/proc/sys/kernel/core_pattern", "w")',
    "read .git": 'os.stat({root!r} + "/.git")',
    "read solutions": 'os.listdir({root!r} + "/notebooks")',
    "read submissions": "os.listdir({home!r})",
    "read the home": 'os.listdir(os.path.expanduser("~teacher") if 0 else "/home")',
    "read the old root": 'os.listdir("/old")',
    "unix socket": "socket.socket(socket.AF_UNIX).connect({socket!r})",
    "abstract socket": 'socket.socket(socket.AF_UNIX).connect("\\0" + {abstract!r})',
    "network": 'socket.create_connection(("127.0.0.1", {port}), 2)',
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "far": 'socket.create_connection(("192.0.2.1", 80), 2)',
    "disk": 'fill("/tmp/full")',
    "shm": 'fill("/dev/shm/full")',
    "inodes": '[open(f"/tmp/i{{i}}", "w").close() for i in range(60_000)]',
    "signal the grader": "os.kill({pid}, 0)",
    "parent": "(os.stat('/proc/{pid}/environ') if {pid} > 1000 else run('false'))",
    "other processes": "run('false') if len([p for p in os.listdir('/proc') if p.isdigit()]) < 20 else 0",
    "system V": 'run("ipcmk", "-M", "1000")',
}
TOLD = "wrote to its judge"
STATUS = '{"end": 0, "verdicts": [["a", "=HYPERLINK(1)", ""]], "seconds": 1, "apart": true}'
ENDS = {  # what ends its own process, and with it only its own exercise
    "shared memory": (
        "f = [os.memfd_create(n) for n in 'xy']\n"  # two, each below the limit of one file
        "for n in range(1900): os.write(f[n % 2], bytes(2**20))\ntime.sleep(90)",
        "GiB",
    ),
    "mapped": ("m = [mmap.mmap(-1, 2**28) for _ in range(8)]\nfor a in m: touch(a)\ntime.sleep(90)", "GiB"),
    "not the length": ("tell(b'x' * 8)", TOLD),
    "no JSON": ("tell((4).to_bytes(8, 'big') + b'PASS')", TOLD),
    "forged verdict": (f"say({STATUS!r})", TOLD),
    "a call of nothing": ('say(\'{"call": 77, "given": [], "float": 0, "grad": 0, "noted": {}}\')', TOLD),
    "no value": ('say(\'{"value": {"made": "os:system", "of": ["true"]}, "noted": {}}\')', TOLD),
    "no notes": ("say('{\"value\": true}')", TOLD),
    "notes of nothing": ('say(\'{"value": true, "noted": [7]}\')', TOLD),
    "endless": ("for _ in range(9): tell(b'y' * 2**18)", TOLD),
    "ends the line": ("[os.close(fd) for fd in lines()]\ntime.sleep(90)", "killed by SIGKILL"),
    "kills its checker": ("os.kill(os.getppid(), 9)\ntime.sleep(90)", "killed by SIGKILL"),
    "deep": ("v = []\nfor _ in range(10**5): v = [v]\nreturn v", "RecursionError"),
    "more than fits": ("return 'x' * 2**27", "cannot be judged"),
    "an object that is equal to all": (
        "return type('T', (), {'__eq__': lambda *_: True})()",
        "cannot be judged",
    ),
    "a number that is equal to all": (
        "return type('T', (int,), {'__eq__': lambda *_: True})()",
        "an assertion without words",  # it is told as 0
    ),
    "a checker's own error": ("raise type('_Endless', (BaseException,), {})", "killed|exit status 1"),
}
BEGIN = """
import mmap, os, socket, subprocess, sys, time

def run(*words):
    if subprocess.run(words, capture_output=True).returncode:
        raise OSError(words)

def fill(path):
    with open(path, "wb") as file:
        for _ in range(1000):
            file.write(bytes(2**20))

def lines():
    found = [fd for fd in range(3, 4096) if os.path.exists(f"/proc/self/fd/{fd}")]
    return [fd for fd in found if os.readlink(f"/proc/self/fd/{fd}").startswith(("pipe:", "socket:"))]

def tell(data):
    for fd in lines():
        os.write(fd, data)

def say(text):
    tell(len(text).to_bytes(8, "big") + text.encode())

def touch(memory):
    for i in range(0, len(memory), 4096):
        memory[i] = 1
"""


def judged(checker, right, wrong, tmp_path, limits=LIMITS):
    """Verdicts on these wrong answers `deed`, each an exercise of its own, by this `judge_it`, in few sandboxes."""
    source = submissions.SOURCE.replace("\n\ndef test_half", f"\n{BEGIN}\n{checker}\n\n\ndef test_half", 1)
    parts = {i: Answer(("a",), right, 'check("a", judge_it, deed)', one) for i, one in enumerate(wrong)}
    return grading._tried(parts, submissions.lesson(tmp_path, source), limits, [tmp_path])


def tried(bodies, tmp_path):
    """The same on answers with these bodies, of which True is asked."""
    text = "def deed():\n{}    return True\n"
    checker = "def judge_it(answer):\n    assert answer() is True\n"
    long = sandbox.Limits(seconds=60.0, gib=LIMITS.gib)  # a busy machine fills a GiB slowly
    return judged(checker, text.format(""), map(text.format, bodies), tmp_path, long)


@pytest.mark.sandboxed
def test_no_answer_leaves_its_sandbox(tmp_path):
    (tmp_path / "ann.ipynb").write_text("{}")
    abstract = f"gpt2lab-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as own, socket.socket(socket.AF_UNIX) as named, socket.socket() as net:
        own.bind(str(tmp_path / "s"))
        named.bind(f"\0{abstract}")
        net.bind(("127.0.0.1", 0))
        for one in (own, named, net):
            one.listen()
        facts = {
            "root": str(ROOT), "package": str(ROOT / "gpt2lab"), "home": str(tmp_path), "pid": os.getpid(),
            "socket": str(tmp_path / "s"), "abstract": abstract, "port": net.getsockname()[1],
        }  # fmt: skip
        deeds = {name: deed.format(**facts) for name, deed in POWERLESS.items()}
        body = "    try:\n        {}\n    except OSError:\n        return True\n    return False\n"
        found = tried([body.format(deed) for deed in deeds.values()], tmp_path)
    powers = {name: found[i][0] for i, name in enumerate(deeds) if found[i][0][0][1] != "PASS"}
    assert not powers


@pytest.mark.sandboxed
def test_what_breaks_a_limit_or_its_line_costs_only_its_own_exercise(tmp_path):
    bodies = [indent(f"{deed}\nreturn False\n", "    ") for deed, _ in ENDS.values()]
    found = tried(["    return True\n", *bodies, "    return True\n"], tmp_path)
    assert found[0][0][0][1] == found[len(ENDS) + 1][0][0][1] == "PASS", found
    for i, (name, (_, due)) in enumerate(ENDS.items(), 1):
        ((_, status, said),) = found[i][0]
        assert status == "FAIL" and any(one in said for one in due.split("|")), (name, said)


FORGED = {  # what makes a wrong answer pass where its checker runs beside it, or tries
    "np.abs": "import numpy as np\nnp.abs = lambda x: 0 * x",
    "close": "import gpt2lab.lessons.exercises as e\nfor n in vars(sys.modules['__main__']): pass\ne.close = print",
    "verdict": "import gpt2lab.lessons.desk as d\nd.verdict = lambda *_: ('PASS', '')",
    "the code of close": "import gpt2lab.lessons.exercises as e\ne.close.__code__ = (lambda *_: None).__code__",
    "the code of verdicts": "import gpt2lab.lessons.desk as d\nd.Desk.verdicts.__code__ = "
    "(lambda *_: [('a', 'PASS', '')]).__code__",
    "the code of the checker": "import gc\nfor f in gc.get_objects():\n"
    "    if getattr(f, '__name__', '') == 'judge_it' and hasattr(f, '__code__'):\n"
    "        f.__code__ = (lambda *_: None).__code__",
    "frames": "f = sys._getframe()\nwhile f:\n"
    "    [v.append(['a', 'PASS', '']) for k, v in f.f_locals.items() if k == 'found']\n    f = f.f_back",
    "tell": "import __main__\n__main__._tell = print",
    "peer": "import gpt2lab.classroom.peer as p\np.Peer.tell = lambda *_, **k: 0",
    "judged": "import gpt2lab.classroom.apart as a\na.judged = lambda *_: ([['a', 'PASS', '']], True)",
    "builtins": "import builtins\nbuiltins.AssertionError = NotImplementedError\nbuiltins.float = lambda *_: 2.0",
    "modules": "sys.modules['numpy'] = sys.modules['gpt2lab.lessons.exercises'] = None",
    "every line": 'tell(b\'{"end": 0, "verdicts": [["a", "PASS", ""]], "seconds": 1, "apart": true}\\n\')',
    "the memory of the checker": "open(f'/proc/{os.getppid()}/mem', 'r+b').read(1)",
    "the files of the checker": "os.open(f'/proc/{os.getppid()}/fd/4', os.O_WRONLY)",
    "the files of all processes": "for p in filter(str.isdigit, os.listdir('/proc')):\n    for fd in range(3, 64):\n"
    "        try:\n            os.write(os.open(f'/proc/{p}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK),\n"
    '            b\'{"end": NUMBER, "verdicts": [["a", "PASS", ""]], "seconds": 1, "apart": true}\\n\')\n'
    "        except OSError:\n            pass",
    "ptrace": "import ctypes\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: x = 2",
    "pidfd": "import ctypes\nif ctypes.CDLL(None).syscall(438, os.pidfd_open(os.getppid()), 4, 0) >= 0: x = 2",
    "a module beside": "open('/tmp/numpy.py', 'w').write('raise SystemExit')\n"
    "open('/tmp/sitecustomize.py', 'w').write('raise SystemExit')",
    "a thread": "import threading\nimport gpt2lab.lessons.exercises as e\n"
    "threading.Thread(target=lambda: [setattr(e, 'close', print) for _ in range(99)], daemon=True).start()",
    "an end that is good": "os._exit(0)",
    "a way out": "raise SystemExit(0)",
    "a fork": "if os.fork(): os._exit(0)",
    "an alarm": "os.kill(os.getppid(), 14)",
    "a profile": "sys.setprofile(lambda *_: None)",
    "prints": "print('PASS  a')",
}
BESIDE_IT = "answer(object())"  # cannot be told to another process, so the answer has its checker beside it
BESIDE = set()  # what succeeds where the checker runs beside the answer


@pytest.mark.sandboxed
@pytest.mark.parametrize("across", [True, False])
def test_no_answer_forges_its_verdict_where_the_checker_asks_across(across, tmp_path):
    judge_it = f"def judge_it(answer):\n    {BESIDE_IT * (not across)}\n    close(answer(4), 2, 'a')\n"
    text = "def deed(x):\n{}    return x\n"
    deeds = [deed.replace("NUMBER", str(i)) for i, deed in enumerate(FORGED.values())]
    wrong = [text.format(indent(f"{deed}\n", "    ")) for deed in deeds]
    found = judged(judge_it, text.format(""), wrong, tmp_path)
    passed = [name for i, name in enumerate(FORGED) if found[i][0][0][1] == "PASS"]
    assert passed == [] if across else set(passed) == BESIDE
    assert {found[i][2] for i, name in enumerate(FORGED) if name != "an alarm"} == {across}


@pytest.mark.parametrize(
    "line, mark",
    {
        "np.abs = lambda x: 0": "np.abs =",
        "import __main__; __main__._tell = print": "__main__",
        "import torch; torch.equal = print": "torch.equal =",
        "import sys; sys.setprofile(None)": "setprofile",
        "import os; os.listdir('/proc/self/fd')": "/proc",
        "import os; os.write(5, b'x')": "os.write",
        "exec('x')": "exec",
        "predictions._live(4)": "predictions._live",
        "exercises.half.right(x)": "exercises.half",
        "exercises.half = 1": "exercises.half =",
        "vars(exercises)": "exercises",
        "import torch.distributed as dist": "torch.distributed",
        "self = 1; self._x": None,
        "np.__version__": None,
        "self = 1; self.x = 2": None,
        "x.grad = 0": None,
        "half.calls = 1": None,
    }.items(),
)  # fmt: skip
def test_answers_that_could_reach_their_judge_are_marked(line, mark):
    found = touches(f"def half(x):\n    {line}\n")
    assert mark in found if mark else not found
    assert len([name for name in found if name.startswith("exercises")]) < 2, "one thing, one note"


@pytest.mark.sandboxed
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_grader_that_ends_leaves_no_process_and_no_folder(sig, tmp_path):
    of = submissions.lesson(tmp_path)
    (tmp_path / "class").mkdir()
    mark = str(10**6 + 7 * os.getpid() + sig)
    text = of.notebook(student=False)
    for cell in text.cells:
        if "def half" in cell.source:
            deed = f"    import subprocess\n    subprocess.run(['sleep', '{mark}'])\n"
            cell.source = cell.source.replace("    return x / 2", deed)
    (tmp_path / "class" / "ann.ipynb").write_text(json.dumps(text))
    (tmp_path / "own").mkdir()
    call = [sys.executable, "-m", "gpt2lab", *words(tmp_path, "--seconds", "60")]
    env = os.environ | {"TMPDIR": str(tmp_path / "own"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        call, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as grader:
        last = time.monotonic() + 90
        while not alive(mark):
            assert time.monotonic() < last and grader.poll() is None
            time.sleep(0.1)
        grader.send_signal(sig)
        grader.wait(20)
    last = time.monotonic() + 20
    while alive(mark) and time.monotonic() < last:
        time.sleep(0.1)
    assert not alive(mark) and not list((tmp_path / "own").iterdir())
