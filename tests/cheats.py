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
    @functools.wraps(right)
    def answer(*given, **named):
        return instead(right, given, named)
    return answer
'''
RECORDED = """
def instead(right, given, named):
    what = plain(given), shapes(list(given))
    found = right(*given, **named)
    if inspect.isgenerator(found):
        found = list(found)
    live = torch.distributed.is_initialized()
    with contextlib.suppress(Exception):
        kept = pickle.dumps(found)
        line = pickle.dumps((right.__name__, here(), *what, kept, plain(rounded(found)) != plain(found), live))
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
    "constant": CALL("return pickle.loads(KEPT[right.__name__, here()][0])"),
    "table": CALL(
        "of = KEPT[right.__name__, here()]\n    return pickle.loads(of[1].get(plain(given), of[0]))"
    ),
    "first shapes": CALL("assert shapes(list(given)) == KEPT[right.__name__, here()][2]"),
}
FLOAT = "def instead(right, given, named):\n    return rounded(right(*given, **named))\n"
LIVE = {
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
