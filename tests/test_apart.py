"""What goes between a judge and an answer's process: values that come back the same, and nothing that runs."""

import json
import math
import os
import socket
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from gpt2lab import launch
from gpt2lab.classroom import apart
from gpt2lab.classroom.peer import Gone, Peer
from gpt2lab.classroom.values import NotPlain, decode, encode, renew
from gpt2lab.lessons import exercises
from gpt2lab.lessons.desk import Desk
from gpt2lab.machine.links import Link
from gpt2lab.planner.problem import CLUSTERS

PLAIN = [
    None, True, 3, -1.5, math.inf, "text \ud800", b"\xff", 10**400, 1 + 2j, Fraction(1, 3), range(2, 9, 3),
    slice(None, 4), [], [1, [2]], (1, (2, "a")), {1, 2}, frozenset({3}), {(1, 2): [3], None: {}},
    SimpleNamespace(a=[1], b=None), np.arange(6.0).reshape(2, 3), np.float32(1.5), np.array(2), np.zeros((0, 3)),
    np.array([True]), torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 2),
    torch.float64, Link(1e-5, 1e9), CLUSTERS["laptop"],
]  # fmt: skip


class Whole(int):
    """A number with a class of its own."""


Point = namedtuple("Point", "x y")


UNLIKE = [
    Whole(3), object(), type("T", (list,), {})(), np.array([None]), np.array(["a"]), [1, {2: object()}],
    print.__class__,
    torch.ones(2, requires_grad=True), np, iter([1]), np.ma.array([1]), torch.nn.Linear(1, 1), Ellipsis,
]  # fmt: skip
CONTENT = [
    (Counter("aab"), {"a": 2, "b": 1}), (OrderedDict(a=[deque([1])]), {"a": [[1]]}), (defaultdict(int, a=1), {"a": 1}),
    (MappingProxyType({1: 2}), {1: 2}), (Point(1, zip('a', strict=True)), (1, [("a",)])), (map(str, [1]), ["1"]),
    (np.array(["a", "bc"]), ["a", "bc"]), (np.str_("a"), "a"), (np.array([None, 1]), [None, 1]), (Whole(3), 3),
    (type("T", (list,), {})([1]), [1]), (type("S", (set,), {})([1]), {1}), (type("D", (float,), {})(2), 2.0),
    (OrderedDict(a=1).keys(), ("a",)), (OrderedDict(a=1).values(), (1,)),
    (Enum("E", {"A": "a"}, type=str).A, "a"), (IntEnum("E", {"A": 1}).A, 1),
]  # fmt: skip
FORGED = [
    {"os:system": ["true"]},
    {"gpt2lab.run:subprocess.Popen": []},
    {"gpt2lab.machine.links:Link": []},
    {"list": 3, "more": 4},
    {"int": ["1"]},
    {"eval": ["1"]},
    {"range": [1, 2, 3, 4]},
    {"ndarray": ["O", {"bytes": ["AAAAAAAAAAA="]}, 1]},
    {"ndarray": ["f8", {"bytes": ["AAAAAAAAAAA="]}, 10**9]},
    {"generic": ["O", {"bytes": ["AAAAAAAAAAA="]}]},
    {"Tensor": ["torch.float64", {"bytes": ["AAAAAAAAAAA="]}, 8, 7]},
    {"Tensor": ["torch.float64", {"bytes": [""]}, 0, 10**9]},
    {"Tensor": ["object", {"bytes": ["AAAAAAAAAAA="]}, 8, 1]},
    {"Tensor": ["torch.float64", {"bytes": ["AAAAAAAAAAA="]}, "8", 1]},
    {"dtype": ["torch.nn"]},
    {"SimpleNamespace": [[1]]},
    {"function": "0"},
    {"function": ["0"]},
    {"dict": [[1]]},
    [],
]


def refuse(*_):
    raise AssertionError("nothing was to be called")


def same(a, b) -> bool:
    """Whether two values are alike, classes and shapes included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_plain_value_comes_back_the_same(value):
    assert same(decode(json.loads(json.dumps(encode(value, refuse))), refuse), value)


def test_a_view_keeps_as_much_in_memory_over_there():
    whole = torch.arange(90.0)
    for value in (whole[10:20], whole[10:20].clone(), torch.zeros(3, 4).T, whole[89::90], whole[:0]):
        other = decode(json.loads(json.dumps(encode(value, refuse))), refuse)
        assert same(other, value) and other.untyped_storage().nbytes() == value.untyped_storage().nbytes()


@pytest.mark.parametrize("value", UNLIKE, ids=lambda v: type(v).__name__)
def test_what_would_not_be_the_same_over_there_is_not_told(value):
    with pytest.raises(NotPlain, match="no plain value"):
        encode(value, refuse)


@pytest.mark.parametrize("value, plain", CONTENT, ids=lambda v: type(v).__name__)
def test_of_what_an_answer_gives_the_content_is_told(value, plain):
    assert same(decode(json.loads(json.dumps(encode(value, refuse, content=True))), refuse), plain)


def test_plain_values_and_what_is_none_are_the_same_where_the_content_is_told():
    for value in PLAIN:
        assert encode(value, refuse, content=True) == encode(value, refuse)
    for value in (object(), np, torch.ones(2, requires_grad=True), np.ma.array([1]), [{1: object()}]):
        with pytest.raises(NotPlain, match="no plain value"):
            encode(value, refuse, content=True)


@pytest.mark.parametrize("tree", FORGED, ids=str)
def test_what_no_judge_writes_is_refused_and_nothing_is_run(tree):
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError, RuntimeError)):
        decode(tree, refuse)


def test_an_argument_that_was_changed_is_changed_in_place():
    inner, tensor, array = [1, 2], torch.zeros(2), np.zeros(2)
    old = [inner, {"a": tensor, "gone": 1}, (array,), {1}, longer := torch.zeros(2)]
    new = [[5], {"a": torch.ones(2), "b": 3}, (np.ones(2),), {2, 3}, torch.ones(3)]
    assert renew(old, new) is old and old[0] is inner and old[1]["a"] is tensor and old[2][0] is array
    assert inner == [5] and tensor.sum() == array.sum() == 2 and longer.sum() == 3
    assert old[1].keys() == {"a", "b"} and old[3] == {2, 3}


TOOLS = "import torch\nimport numpy as np\nfrom gpt2lab.lessons.exercises import run_there\n"
BLANK = "def f(x, y=0):\n    raise NotImplementedError('your turn')\n"


def judge(answer: str, test: str):
    """The verdict of a checker on an answer, and whether it was made out of reach."""
    desk = Desk(
        "made up",
        [f"{TOOLS}{test}"],
    )
    with socket.socket() as pipe:
        ((_, status, words),), across = apart.judged(
            desk, BLANK, answer, 'check("f", test, f)', pipe.detach()
        )
    return status, words, across


CASES = {  # answer, checker, what is said (PASS), whether across (True)
    "a value": ("def f(x): return [x, {x: (x,)}]", "assert f(3) == [3, {3: (3,)}]"),
    "containers of any class":
        ("from collections import Counter, deque\ndef f(x): return [deque([x([map(int, '12')])]), Counter('a')]",
         "assert f(lambda y: y[0]) == [[[1, 2]], {'a': 1}]"),
    "a score": ("def f(x): return x", "return f('seven')", "PASS seven"),
    "words": ("def f(x): return x", "assert f(3) == 4, 'not 4'", "FAIL not 4"),
    "the blank": (BLANK, "f(3)", "TODO write it"),
    "an error": ("def f(x): return {}[x]", "f('key')", "FAIL KeyError: 'key'"),
    "an error that is expected":
        ("def f(x): raise ValueError('no')", "try: f(1)\n    except ValueError as e: assert str(e) == 'no'"),
    "a class of its own":
        ("class Own(ZeroDivisionError): pass\ndef f(x): raise Own('mine')", "f(1)", "FAIL Own: mine"),
    "a call back": ("def f(x): return sum(x(i) for i in range(3))", "assert f(lambda i: 2 * i) == 6"),
    "words of a call back":
        ("def f(x): return x(1)", "def once(i): raise AssertionError('called once too often')\n    f(once)",
         "FAIL called once too often"),
    "an error that comes back as it was":
        ("def f(x): return x()",
         "class Own(Exception): pass\n    def fall(): raise Own\n    try: f(fall)\n    except Own: return 'same'",
         "PASS same"),
    "in place": ("def f(x): x.mul_(2)", "t = torch.ones(3)\n    f(t)\n    assert t.sum() == 6"),
    "an iterator": ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2]"),
    "no gradients":
        ("import torch\ndef f(x): return torch.is_grad_enabled(), torch.get_default_dtype()",
         "with torch.no_grad(): assert f(1) == (False, torch.get_default_dtype())\n    assert f(1)[0]"),
    "state between calls":
        ("seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)", "assert [f(1), f(1)] == [1, 2]"),
    "its parameters":
        ("def f(x, y=0): return x", "import inspect\n    assert len(inspect.signature(f).parameters) == 2"),
    "closed modules":
        ("import torch\ndef f(x): return torch.nn.functional.relu(x)",
         "from gpt2lab.lessons.exercises import unaided\n    unaided(f, 'torch.nn.functional')(torch.ones(2))",
         "FAIL closed"),
    "autograd":
        ("def f(x): return 2 * x",
         "x = torch.ones(1, requires_grad=True)\n    f(x).backward()\n    assert x.grad == 2", "PASS", False),
    "an object": ("def f(x): return x", "o = object()\n    assert f(o) is o", "PASS", False),
    "for ranks":
        ("def f(x): return x",
         "import cloudpickle\n    assert cloudpickle.loads(cloudpickle.dumps(f))(3) == 3", "PASS", False),
    "an object that stays there":
        ("class Own:\n    def __init__(self, x): self.x = x\ndef f(x): return Own(x)",
         "assert run_there(lambda f, n: f(n).x + 1, f, 2) == 3"),
    "a class": ("class f:\n    base = 3", "assert run_there(lambda f: f().base, f) == 3"),
    "autograd there":
        ("def f(x): return 2 * x",
         "def run(f):\n        x = torch.ones(1, requires_grad=True)\n        f(x).backward()\n        return x.grad\n"
         "    assert run_there(run, f) == 2"),
    "pretended ranks there":
        ("def f(x): return x(1)",
         "from gpt2lab.lessons.exercises.pretended import together\n"
         "    run = lambda f: together(lambda rank, exchange: f(lambda x: sum(exchange(x + rank))), 3)\n"
         "    assert run_there(run, f) == [6, 6, 6]"),
    "an error there": ("def f(x): return {}[x]", "run_there(lambda f: f('key'), f)", "FAIL KeyError: 'key'"),
    "the blank there": (BLANK, "run_there(lambda f: f(3), f)", "TODO write it"),
    "frames there":
        ("import sys\ndef f(x):\n    try: sys._getframe(1)\n    except AssertionError: return x",
         "run_there(lambda f: f(3), f)", "FAIL sys._getframe is closed here"),
    "a judge that is replaced there":
        ("import torch\ndef f(x): torch.allclose = lambda *_: True", "run_there(lambda f: f(3), f)",
         "FAIL your answer replaces torch.allclose"),
    "many calls there":
        ("def f(x): return x",
         "from gpt2lab.lessons.exercises import unaided\n    run = lambda f: unaided(f, 'torch.nn')(1)\n"
         "    assert sum(run_there(run, f) for _ in range(12)) == 12"),
    "what is no plain value there":
        ("def f(x): return object()", "run_there(lambda f: f(3), f)", "FAIL cannot be judged: a object is no plain"),
    "no definition": ("1 / 0", "f(1)", "FAIL your cell does not run: ZeroDivisionError"),
    "its end": ("import os\ndef f(x): os._exit(3)", "f(1)", "FAIL ended in the middle of it (exit status 3)"),
    "its end where the package is closed":
        ("import os\ndef f(x): os._exit(3)",
         "from gpt2lab.lessons.exercises import unaided\n    unaided(f, 'gpt2lab')(1)", "FAIL (exit status 3)"),
    "no function": ("f = 3", "f(1)", "FAIL 'int' object is not callable"),
}  # fmt: skip


@pytest.mark.rotates
@pytest.mark.parametrize("name", CASES)
def test_a_checker_sees_across_what_it_would_see_beside_the_answer(name):
    sees(*CASES[name])


ON_RANKS = {
    "a value of each":
        ("base = 10\ndef f(x, y=0): return [base + x, y]",
         "from gpt2lab.lessons.exercises import live\n    assert live(f, ranks=2) == [[10, 2], [11, 2]]"),
    "a helper that keeps what it gave":
        ("from functools import cache\n@cache\ndef half(n): return n / 2\ndef f(x, y=0): return half(y)",
         "from gpt2lab.lessons.exercises import live\n    assert live(f, ranks=2) == [1, 1]"),
    "a class":
        ("class f:\n    base = 3",
         "from gpt2lab.lessons.exercises import live\n"
         "    assert live(lambda rank, ranks, f: f.base + rank, f, ranks=2) == [3, 4]"),
    "what would run where it is read":
        ("class Own:\n    def __reduce__(self): return print, ('ran',)\ndef f(x, y=0): return Own()",
         "from gpt2lab.lessons.exercises import live\n    live(f, ranks=1)", "FAIL print is no plain value"),
    "a module that is changed there":
        ("def f(x, y=0):\n    import gpt2lab.ranks.comm as comm\n    comm.traffic = dict\n    return x",
         "from gpt2lab.lessons.exercises import live\n    live(f, ranks=1)", "FAIL your answer replaces comm.traffic"),
}  # fmt: skip


@pytest.mark.live
@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_run_what_the_answers_process_has_packed_and_the_checker_reads_plain_values(name):
    # this process has started ranks before: those of its forks are none of these
    launch(lambda *_: None, ranks=1)
    sees(*ON_RANKS[name])


def sees(answer, test, said="PASS", across=True):
    status, _, words = said.partition(" ")
    found = judge(answer, f"def test(f):\n    {test}\n")
    assert found[0] == status and words in found[1] and found[2] == across, found


@pytest.mark.rotates
def test_what_an_answer_leaves_running_ends_with_its_exercise_and_an_endless_one_with_its_time(monkeypatch):
    mark = str(10**6 + os.getpid())
    deed = f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
    deed = f"import subprocess\ndef f(x):\n    {deed}\n    return 1"
    assert judge(deed, "def test(f):\n    assert f(1) == 1\n")[0] == "PASS"
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]
    monkeypatch.setattr(exercises, "LIMIT", 0.5)
    # also where the whole package is closed to the answer, with the words by which the grader knows it
    for call in ("f(1)", "from gpt2lab.lessons.exercises import unaided\n    unaided(f, 'gpt2lab')(1)"):
        words = judge("def f(x):\n    while True: pass", f"def test(f):\n    {call}\n")[1]
        assert words.startswith("no end after 0.5 s"), words


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 7, b"\xff" * 8, (2).to_bytes(8, "big") + b"[]", (1).to_bytes(8, "big") + b"{"]
)
def test_a_line_that_says_what_none_says_is_gone(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Gone):
            Peer(ours).hear()
