"""Tensors without numbers: operators give shapes and types, and every byte that a rank would hold is counted.

Memory is followed by storage, from the operator that makes one until nothing refers to it, as an allocator sees it.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

import torch
import torch._meta_registrations  # rules in Python for operators that have none in C++
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CPU, DEVICE = torch.device("cpu"), torch.Tensor.device
PARTS = "weights", "gradients", "optimizer", "activations", "logits", "buffers"
SMALL = 2**20  # whole numbers of so many elements at most are computed, because they decide what is called
GATHERS = "gather_flat", "broadcast"  # calls of `comm` that bring whole weights
ENGINE, WRAPPERS = "_engine_run_backward", ("_fn", "inner")  # autograd in Python's frames, and torch's own
KNOWN, MOST = {}, 100_000  # the shapes of what an operator makes, by what it gets; of so many at most


@contextmanager
def numberless() -> Iterator["Numberless"]:
    """Inside, floats are of torch's device "meta"; only torch's own rules see that, all others are told the CPU."""
    seen = Numberless()
    with ExitStack() as stack:
        for of, name, other in (
            (torch.Tensor, "device", property(lambda t: DEVICE.__get__(t) if seen.asks else CPU)),
            (torch.Tensor, "tolist", lambda t: [one.tolist() for one in t] if t.dim() else t.item()),
            (torch.UntypedStorage, "resize_", seen.resizing(torch.UntypedStorage.resize_)),
            (functional, "scaled_dot_product_attention", _attention),
        ):
            stack.enter_context(patch.object(of, name, other))
        yield stack.enter_context(seen)


class Numberless(TorchDispatchMode):
    """Inside, no float is stored or computed. A float that is asked for is 1, a whole number that needed floats 0.

    `now` are the bytes held by part; `most`, `parts` and `moment` ("forward", "backward" or "update") say what was held
    at the fullest moment since `forget`.
    """

    def __init__(self):
        super().__init__()
        self.asks = False  # torch's rule for an operator runs
        self.alive: dict[int, tuple[str, int]] = {}  # (part, bytes) by storage
        self.now: Counter = Counter()
        self.shapes, self.words = set(), 0
        self.forget()

    def know(self, model) -> None:
        """Learn the shapes by which gradients and logits are told from the rest."""
        self.shapes = {p.shape for p in model.parameters()}
        self.words = len(model.wte.weight) if model.wte is not None else 0

    def forget(self) -> None:
        """Look for the fullest moment from now on."""
        self.most, self.parts, self.moment, self.waits = -1, {}, "", ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 0
        self.settle()
        out = self._known(func, args, kwargs)
        made = [t for t in _tensors(out) if id(t.untyped_storage()) not in self.alive]
        if made:
            moment, asked = _where()
            for t in made:
                self._watch(t, self._part(func, t, moment, asked))
            self.waits = moment
            # Two gradients of one tensor: autograd adds into the first, but not under a mode, nor where it is a view.
            # Here the first is freed after this, so what is held is compared at the next operator.
            if func is not aten.add.Tensor or asked != ENGINE or args[0]._is_view():
                self.settle()
        return out

    def _known(self, func, args, kwargs):
        """As `_run`; where an operator makes new tensors, its rule is asked once for operands of the same shapes."""
        if not _makes_new(func):
            return self._run(func, args, kwargs)
        key = func, _shape(args), _shape(tuple(kwargs.items()))
        if key in KNOWN:
            return _each(_like, KNOWN[key])
        out = self._run(func, args, kwargs)
        if (made := _tensors(out)) and all(t.is_meta for t in made) and len(KNOWN) < MOST:
            KNOWN[key] = _each(_like, out)
        return out

    def _run(self, func, args, kwargs):
        """Small whole numbers are computed; of all else only the shape, by torch's rule for the operator."""
        given = _tensors((args, kwargs))
        meta = [t.is_meta for t in given]
        whole = given or kwargs.get("dtype") in (torch.int64, torch.bool) or func is aten.arange.default
        if whole and not any(meta):
            out = func(*args, **kwargs)
            if not any(t.is_floating_point() or t.numel() > SMALL for t in _tensors(out)):
                return out
        if "device" in kwargs or not given and _has_device(func):
            kwargs = kwargs | {"device": torch.device("meta")}
        if not all(meta):
            args, kwargs = _each(lambda t: t if t.is_meta else _like(t), (args, kwargs))
        self.asks = True
        try:
            return func(*args, **kwargs)
        finally:
            self.asks = False

    def settle(self) -> None:
        """Compare what is held now with the most so far."""
        if self.waits and (total := sum(self.now.values())) > self.most:
            self.most, self.parts, self.moment = total, dict(self.now), self.waits
        self.waits = ""

    def _watch(self, t: torch.Tensor, part: str) -> None:
        storage = t.untyped_storage()
        key = id(storage)  # torch keeps one object a storage
        if key not in self.alive:
            self.alive[key] = "", 0
            self._set(key, part, storage.nbytes())
            weakref.finalize(storage, self._freed, key)

    def _set(self, key: int, part: str, size: int) -> None:
        before, bytes_before = self.alive[key]
        self.alive[key] = part, size
        self.now[before] -= bytes_before
        self.now[part] += size

    def _freed(self, key: int) -> None:
        part, size = self.alive.pop(key)
        self.now[part] -= size

    def call(self, tensors, part: str) -> None:
        """Count the memory of these tensors as this part from now on."""
        for t in tensors:
            storage = t.untyped_storage()
            self._set(id(storage), part, storage.nbytes())

    def resizing(self, resize):
        """A storage's `resize_`, which is no operator, counted."""

        def resized(storage, size):
            resize(storage, size)
            if id(storage) in self.alive:
                self._set(id(storage), self.alive[id(storage)][0], size)
                self.waits, _ = _where()
                self.settle()

        return resized

    def _part(self, func, t, moment: str, asked: str) -> str:
        """What a new storage is for."""
        if asked in GATHERS and t.is_floating_point():
            return "weights"
        if moment == "update":
            return "buffers"
        if t.shape in self.shapes:  # versions of weights are copies
            return "weights" if func is aten.clone.default and moment == "forward" else "gradients"
        if t.dim() > 1 and t.size(-1) == self.words:
            return "logits"
        return "activations" if moment == "forward" or torch.is_grad_enabled() else "buffers"


def _attention(q, k, v, attn_mask=None, is_causal=False):
    """torch's kernel on a CPU, which it does not take for meta tensors."""
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, is_causal=is_causal, attn_mask=attn_mask)[0]


@cache
def _has_device(func) -> bool:
    """Whether an operator can be told where to make its tensors."""
    return any(argument.name == "device" for argument in func._schema.arguments)


@cache
def _makes_new(func) -> bool:
    """Whether what an operator gives are no views of what it gets, nor that itself."""
    return all(made.alias_info is None for made in func._schema.returns)


def _each(new, value):
    """An operator's arguments or result, with each tensor replaced by `new(tensor)`."""
    if isinstance(value, (tuple, list)):
        return type(value)([_each(new, one) for one in value])
    if isinstance(value, dict):
        return {key: _each(new, one) for key, one in value.items()}
    return new(value) if isinstance(value, torch.Tensor) else value


def _tensors(value) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or result."""
    found = []
    _each(found.append, value)
    return found


def _shape(value) -> tuple:
    """What an operator's rule looks at: shape, stride and type of a tensor, a number and its type."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    return type(value), None if isinstance(value, torch.Generator) else value


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _where() -> tuple[str, str]:
    """The moment of a step, and the function that asked for an operator: a call of `comm`, or who is nearest."""
    frame, asked = sys._getframe(2), ""
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if not asked and name not in WRAPPERS or name in GATHERS and ".ranks." in module:
            asked = name
        if name == ENGINE:
            return "backward", asked
        if name in ("run", "stream") and ".parallel." in module:
            return "forward", asked
        if module.endswith(".train"):
            break
        frame = frame.f_back
    return "update", asked
