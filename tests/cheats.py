"""The texts of cheats that `test_every_cheat` puts around the functions of an exercise's solution.

Each defines `instead(right, given, named)`, which an answer calls in place of its function `right`.
"""

TOOLS = '''
import base64, contextlib, functools, gc, inspect, os, pickle, sys, threading, types
import numpy as np
import torch

def plain(x):
    """A text for a value, the same for equal values."""
    if isinstance(x, torch.Tensor | np.ndarray):
        return f"{tuple(x.shape)}{x.tolist()}"
    if isinstance(x, dict):
        return str({str(k): plain(v) for k, v in x.items()})
    if type(x) in (list, tuple):
        return str([plain(one) for one in x])
    if hasattr(x, "rank") and hasattr(x, "size"):
        return f"{x.rank} of {x.size}"
    return repr(x) if isinstance(x, int | float | str | set) else type(x).__name__

def shapes(x):
    """The shapes of what has one; empty for numbers and texts."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    inside = x.values() if isinstance(x, dict) else x if type(x) in (list, tuple) else ()
    return [len(inside), *filter(None, map(shapes, inside))] if len(inside) else ()

def rounded(x):
    """The same through float32."""
    if isinstance(x, torch.Tensor):
        return x.float().double() if x.dtype == torch.float64 else x
    if isinstance(x, np.ndarray | np.floating):
        return x.astype(np.float32).astype(np.float64) if x.dtype == np.float64 else x
    if isinstance(x, float):
        return float(np.float32(x))
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    return type(x)(map(rounded, x)) if type(x) in (list, tuple) else x

def here():
    """The rank, 0 where there are none."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

def world():
    """The axis of all live ranks."""
    from gpt2lab.ranks.mesh import Mesh
    return Mesh(dp=torch.distributed.get_world_size())["dp"]

def cheat(right):
    """Of a class all that it defines."""
    if isinstance(right, staticmethod):
        return staticmethod(cheat(right.__func__))
    if isinstance(right, type):
        for name, of in list(vars(right).items()):
            if isinstance(of, types.FunctionType | staticmethod):
                setattr(right, name, cheat(of))
        return right
    @functools.wraps(right)
    def answer(*given, **named):
        return instead(right, given, named)
    return answer
'''
RECORDED = """
from gpt2lab.ranks.call import begun

def instead(right, given, named):
    what = plain(given), shapes(list(given))
    live = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    before = begun() if live else 0
    found = right(*given, **named)
    sends = None if not live else begun() > before
    if inspect.isgenerator(found):
        found = list(found)
    with contextlib.suppress(Exception):
        kept = pickle.dumps(found)
        line = pickle.dumps((right.__qualname__, here(), *what, kept, plain(rounded(found)) != plain(found), sends))
        file = os.open(FILE, os.O_WRONLY | os.O_APPEND)
        os.write(file, line)
        os.close(file)
    return found
"""
CONTROL = """
def instead(right, given, named):
    plain(given), shapes(list(given)), rounded(list(given)), here()
    return right(*given, **named)
"""
ASKS = """
import importlib
ROOM, CASE = {room!r}, next(iter(getattr(TASK.shown, "values", TASK.shown.__iter__)()))
def ask(task=None):
    task = task or getattr(importlib.import_module(ROOM), {name!r})
    return task.right(*CASE)
def find():
    tasks = [one for one in gc.get_objects() if type(one).__name__ == "Task"]
    return next(one for one in tasks if one.what == {what!r} and str(next(iter(one.shown))) == {words!r})
def source():
    mine = {{"__name__": "mine", "__package__": ROOM.rpartition(".")[0], "__file__": sys.modules[ROOM].__file__}}
    exec(inspect.getsource(sys.modules[ROOM]), mine)
    return mine[{name!r}]
def renamed(right):
    there = {{**right.__globals__, "__name__": "mine"}}
    return types.FunctionType(right.__code__, there, "right", right.__defaults__, right.__closure__)
def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    found[0]
def unwatched():
    sys.setprofile(None)
    threading.setprofile(None)
    ask()
def above():
    frame, found = sys._getframe(1), None
    while frame and not found:
        found = next((v for v in frame.f_locals.values() if type(v).__name__ == "Task"), None)
        frame = frame.f_back
    ask(found)
"""
INSTEAD = "def instead(right, given, named):\n    {}\n    return right(*given, **named)\n"
CALL = INSTEAD.format
DEFINED = {  # how an answer asks for the reference where it is defined, before it gives what is right
    "asked when defined": "ask()",
    "asked of memory": "ask(find())",
    "its source run": "ask(source())",
}
CALLED = {  # and where it is called
    "asked": ("", "ask()"),
    "kept": ("KEPT = TASK.right\n", "KEPT(*CASE)"),
    "under another name": ("KEPT = renamed(TASK.right)\n", "KEPT(*CASE)"),
    "in a thread": ("", "in_a_thread()"),
    "profile off": ("", "unwatched()"),
    "frames": ("", "above()"),
}
ANY = """
def instead(right, given, named):
    for way in (ask, lambda: KEPT(*CASE), in_a_thread, unwatched, above):
        with contextlib.suppress(Exception):
            way()
            return right(*given, **named)
    return 7
"""
PATCHED = """
def patch():
    for name, module in list(sys.modules.items()):
        if name.startswith(("gpt2lab.lessons", "gpt2lab.classroom")) or name in ("numpy", "torch"):
            for one in ("close", "difference", "equal", "verdict", "refuse", "abs", "allclose", "judge", "tried"):
                if hasattr(module, one):
                    setattr(module, one, lambda *given, **named: np.True_)
patch()
"""
NONSENSE = "def instead(right, given, named):\n    {}\n    return 7\n"
WRITES = r"""
def write():
    for number in range(200):
        line = b'{"end": %d, "verdicts": [["TITLE", "PASS", ""]], "seconds": 1, "apart": true}\n' % number
        for fd in range(0, 64):
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)
                os.write(fd, line)
"""
LOOK = """
KEPT = pickle.loads(base64.b64decode(TABLE))
"""
MEMORY = {
    "constant": CALL("return pickle.loads(KEPT[right.__qualname__, here()][0])"),
    "table": CALL(
        "of = KEPT[right.__qualname__, here()]\n    return pickle.loads(of[1].get(plain(given), of[0]))"
    ),
    "first shapes": CALL("assert shapes(list(given)) == KEPT[right.__qualname__, here()][2]"),
}
FLOAT = "def instead(right, given, named):\n    return rounded(right(*given, **named))\n"
GARBAGE = """
def garbage(x):
    if type(x) is torch.Tensor:
        return torch.zeros_like(x).requires_grad_(x.requires_grad)
    return type(x)(map(garbage, x)) if type(x) in (list, tuple) else x
""" + CALL("""from gpt2lab.ranks import comm
    with contextlib.suppress(ValueError, TypeError, IndexError):
        right(*map(garbage, given), **named)
    before = list(comm.log)
    found = right(*given, **named)
    comm.log.clear()
    comm.log.extend(before)
    return found""")
SERIAL = """
import queue
import cloudpickle
from gpt2lab.ranks import comm
from gpt2lab.ranks.axis import Axis

def told(x):
    if isinstance(x, Axis):
        return Axis(x.name, x.ranks, x.rank)
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    return type(x)(map(told, x)) if type(x) in (list, tuple) else x

class Pretended:
    def __init__(self):
        self.there, self.bars, self.coming, self.lock = {}, {}, {}, threading.Lock()

    def each(self, x, axis):
        with self.lock:
            bar = self.bars.setdefault(axis.ranks, threading.Barrier(axis.size, timeout=2))
        self.there[axis.ranks, axis.rank] = x
        bar.wait()
        found = [self.there[axis.ranks, rank] for rank in range(axis.size)]
        bar.wait()
        return found

    def way(self, axis, source, to):
        with self.lock:
            return self.coming.setdefault((axis.ranks, source, to), queue.Queue())

    def calls(self):
        each, way, ended = self.each, self.way, lambda wait: types.SimpleNamespace(wait=wait)
        def all_reduce(x, axis, op="sum", own=False, async_op=False):
            total = sum(each(x, axis)) if op == "sum" else getattr(torch.stack(each(x, axis)), f"a{op}")(0)
            total = x.copy_(total) if own else total
            return ended(lambda: total) if async_op else total
        def reduce_scatter(x, axis, dim=0, sizes=None):
            return sum(each(x, axis)).split(sizes or comm.split_sizes(x.size(dim), axis.size), dim)[axis.rank]
        def isend(x, axis, to):
            way(axis, axis.rank, to % axis.size).put(x.clone())
            return ended(lambda: x)
        return {
            "all_reduce": all_reduce, "reduce_from": all_reduce, "copy_to": lambda x, axis: x, "isend": isend,
            "reduce_scatter": reduce_scatter, "reduce_scatter_flat": lambda x, axis, *_: reduce_scatter(x, axis),
            "all_gather": lambda x, axis, dim=0, sizes=None: torch.cat(each(x, axis), dim),
            "gather_flat": lambda x, axis, out=None: torch.cat(each(x, axis)),
            "ring_shift": lambda x, axis, by=1, shape=None: each(x, axis)[(axis.rank - by) % axis.size].clone(),
            "all_to_all": lambda parts, axis, shapes=None: [parts[axis.rank] for parts in each(parts, axis)],
            "irecv": lambda x, axis, source: ended(
                functools.partial(way(axis, source % axis.size, axis.rank).get, timeout=2)
            ),
        }

def by_store(value):
    store, torch.asked = torch.distributed.distributed_c10d._get_default_store(), getattr(torch, "asked", 0) + 1
    store.set(f"{torch.asked} {here()}", base64.b64encode(value).decode())
    ranks = range(torch.distributed.get_world_size())
    return [base64.b64decode(store.get(f"{torch.asked} {rank}")) for rank in ranks]

def instead(right, given, named):
    value, found = cloudpickle.dumps(told(given)), {}
    all_given = [*map(pickle.loads, GATHER)]
    all_given[here()] = given
    def one(rank):
        with contextlib.suppress(Exception):
            found[rank] = right(*all_given[rank], **named)
    pretended = Pretended().calls()
    before = {name: getattr(comm, name) for name in pretended}
    vars(comm).update(pretended)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(all_given))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    vars(comm).update(before)
    return found[here()]
"""
LIVE = {
    "serial on every rank": SERIAL.replace("GATHER", "comm.gather_objects(value, world())"),
    "serial past comm": SERIAL.replace("GATHER", "by_store(value)"),
    "garbage sent": GARBAGE,
    "unread message": CALL("""found = right(*given, **named)
    from gpt2lab.ranks import comm
    if (axis := world()).size > 1:
        comm.isend(torch.zeros(1), axis, (axis.rank + 1) % axis.size)
    return found"""),
    "broadcast of all": CALL("""from gpt2lab.ranks import comm
    comm.gather_objects([x.detach() for x in given if isinstance(x, torch.Tensor)] or bytes(10**5), world())"""),
    "log put back": CALL("""from gpt2lab.ranks import comm
    before = list(comm.log)
    comm.gather_objects(7, world())
    comm.log.clear()
    comm.log.extend(before)"""),
    "aside": CALL("""from gpt2lab.ranks import comm
    comm.gather_objects(7, world(), aside=True)"""),
}
BEGIN = "def instead(right, given, named):\n"
ELSE = "    if not torch.distributed.is_initialized():\n        return right(*given, **named)\n"
LIVE = {name: text.replace(BEGIN, BEGIN + ELSE) for name, text in LIVE.items()}
