"""What an answer finds in its sandbox: every file that it can open, and no frame of the one who judges it."""

import os
import site
import sys
from pathlib import Path
from textwrap import indent

import pytest
from test_hostile import BESIDE_IT, judged, tried

from gpt2lab.classroom.sandbox import Limits
from gpt2lab.classroom.submission import touches

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[1]
INTERPRETER = [sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), *site.getsitepackages()]
INTERPRETER += [path for path in sys.path if path.endswith("-packages")]
SYSTEM = [f"/{name}" for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "sys/devices/system/cpu")]
SYSTEM += ["/etc/alternatives", "/etc/fonts"]
ALLOWED = {*SYSTEM, *INTERPRETER, *map(os.path.realpath, INTERPRETER), str(ROOT / "gpt2lab"), "/proc"}
SINGLE = {f"/etc/{name}" for name in ("ld.so.cache", "localtime", "passwd", "hosts")}
SINGLE |= {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")} | {"/tmp/.said"}
OPENS = """
    allowed, found = {allowed!r}, []
    inside = lambda path: any(path == one or path.startswith(one + "/") for one in allowed)
    for place, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if not inside(os.path.join(place, name))]
        for path in (os.path.join(place, name) for name in files):
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            except OSError:
                continue
            if not inside(path) and not path.startswith("/tmp/fontlist"):
                found.append(path)
    for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
        for name in ("environ", "mem", "maps", "fd/0", "fd/1", "root/usr", "cwd/usr"):
            try:
                os.close(os.open(f"/proc/{{pid}}/{{name}}", os.O_RDONLY | os.O_NONBLOCK))
                found.append(f"/proc/{{pid}}/{{name}}")
            except OSError:
                pass
    if found:
        raise ValueError(sorted(found))
"""
HONEST = """
    import tempfile
    with open("own.txt", "w") as own, tempfile.TemporaryFile("w") as other:
        own.write("mine"), other.write("mine")
    run("cat", "own.txt")
"""


@pytest.mark.sandboxed
def test_an_answer_opens_the_interpreter_torch_and_the_package_and_no_other_file(tmp_path):
    secret = [tmp_path, ROOT / ".git", ROOT / "notebooks", ROOT / "tests"]
    assert not [p for p in secret for one in ALLOWED if p.is_relative_to(one)]
    found = tried([OPENS.format(allowed=sorted(ALLOWED | SINGLE)), HONEST], tmp_path)
    assert [found[i][0][0][1] for i in range(2)] == ["PASS", "PASS"], found


WALK = """
import gc, inspect, signal, sys, threading, traceback, types

def walk(frame):
    while frame:
        if "secret" in frame.f_locals:
            return frame.f_locals["secret"]
        frame = frame.f_back

def looked():
    for thing in gc.get_objects():
        found = walk(thing) if isinstance(thing, types.FrameType) else None
        if found or type(thing) is dict and isinstance(found := thing.get("secret"), int):
            return found
"""
LOOKS = {  # ways to the variable `secret` of the function that calls the answer
    "sys._getframe": "return walk(sys._getframe())",
    "a traceback": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    return walk(error.__traceback__.tb_frame)",
    "inspect.stack": "return walk(inspect.stack()[0].frame)",
    "inspect.currentframe": "return walk(inspect.currentframe())",
    "traceback.walk_stack": "return max(walk(f) or 0 for f, _ in traceback.walk_stack(None))",
    "the texts of a traceback": "extract, walk_all = traceback.StackSummary.extract, traceback.walk_stack\n"
    "stack = extract(walk_all(None), capture_locals=True)\n"
    "return max(int((f.locals or {}).get('secret', '0')) for f in stack)",
    "gc.get_objects": "return looked()",
    "gc.get_referrers": "return max(walk(f) or 0 for f in gc.get_referrers(deed) if isinstance(f, types.FrameType))",
    "all threads": "return max(walk(f) or 0 for f in sys._current_frames().values())",
    "another thread": "got = []\ndo = lambda: got.extend(walk(f) or 0 for f in sys._current_frames().values())\n"
    "t = threading.Thread(target=do)\nt.start()\nt.join()\nreturn max(got)",
    "a generator": "def ask():\n    yield own.gi_frame.f_back\nown = ask()\nreturn walk(next(own))",
    "a coroutine": "async def ask():\n    return own.cr_frame.f_back\nown = ask()\n"
    "try:\n    own.send(None)\nexcept StopIteration as end:\n    return walk(end.value)",
    "a profile": "got = []\nsys.setprofile(lambda f, *_: got.append(f))\nlen([])\n"
    "sys.setprofile(None)\nreturn walk(got[0])",
    "a trace": "got = []\nsys.settrace(lambda f, *_: got.append(f))\nwalk(None)\n"
    "sys.settrace(None)\nreturn walk(got[0])",
    "code of a library": "file, names = sys.prefix + '/x.py', {}\n"
    "exec(compile('import sys\\nfound = sys._getframe(1)', file, 'exec'), names)\nreturn walk(names['found'])",
    "a changed file": "def ask():\n    return sys._getframe(1)\n"
    "ask.__code__ = ask.__code__.replace(co_filename=sys.prefix + '/x.py')\nreturn walk(ask())",
    "a signal": "got = []\nsignal.signal(signal.SIGUSR1, lambda _, f: got.append(f))\nos.kill(os.getpid(), 10)\n"
    "return walk(got[0])",
}
QUIETLY = "def quietly():\n{}\ntry:\n    return quietly()\nexcept AssertionError:\n    return 1\n"
BESIDE = {"a signal"}  # what finds it where the checker runs beside the answer; a teacher is told


@pytest.mark.sandboxed
@pytest.mark.parametrize("across", [True, False])
def test_no_answer_reads_what_its_checker_knows(across, tmp_path):
    known = f"""
{WALK}
def judge_it(answer):
    secret = int.from_bytes(os.urandom(6), "big")
    {BESIDE_IT * (not across)}
    assert answer(4) == secret, "not what was asked"
"""
    text = "def deed(x):\n{}\n"
    whole = lambda look: text.format(indent(QUIETLY.format(indent(look, "    ")), "    "))
    found = judged(known, text.format("    pass"), map(whole, LOOKS.values()), tmp_path)
    assert {found[i][2] for i in range(len(LOOKS))} == {across}
    assert {name for i, name in enumerate(LOOKS) if found[i][0][0][1] == "PASS"} == (
        set() if across else BESIDE
    )
    for i, name in enumerate(LOOKS):
        closed = not across and name not in BESIDE
        assert not closed or "does not look into its checker" in found[i][0][0][2], (name, found[i])
    assert all(touches(f"import signal, os\n{whole(LOOKS[name])}") for name in BESIDE)


@pytest.mark.sandboxed
def test_the_ranks_of_all_answers_come_from_one_closed_server_which_starts_again_when_it_was_ended(tmp_path):
    checker = """
from gpt2lab.lessons import exercises
def judge_it(answer):
    return str(exercises.live(answer, ranks=1)[0])
"""
    ask = "def deed(rank, world_size):\n    import os\n    server = os.getppid()\n    {}return server\n"
    deeds = ["", "", "open(f'/proc/{server}/mem').close(); ", "os.kill(server, 9); ", ""]
    found = judged(checker, ask.format(""), map(ask.format, deeds), tmp_path)
    (one, same, reads, _, again) = [found[i][0][0][1:] for i in range(5)]
    assert one == same and reads[0] == "FAIL" and "Permission denied" in reads[1], found
    assert one[0] == again[0] == "PASS" and one[1] != again[1], found


@pytest.mark.sandboxed
def test_the_ranks_that_a_closed_server_has_started_reach_each_other(tmp_path):
    checker = """
from gpt2lab.lessons import exercises
def judge_it(answer):
    return str(exercises.live(answer, ranks=2))
"""
    deed = "def deed(rank, world_size):\n    return rank\n"
    found = judged(checker, deed, [deed], tmp_path, Limits())
    assert found[0][0][0][1:] == ["PASS", "[0, 1]"], found
