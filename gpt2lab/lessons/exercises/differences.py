"""The first difference between what an answer gave and what is right, in words; the usual slips are named."""

from collections.abc import Iterator, KeysView, Mapping, Set, ValuesView
from dataclasses import dataclass, is_dataclass
from numbers import Number
from types import SimpleNamespace

import numpy as np

NARROW = ("float32", "float16", "bfloat16")
NEARLY = 1e-9  # relative: what is so near to a slip is that slip


CHANGED = "your function changed what it was given; work on copies"

ANY = object()
"""What is right whatever it is: it is noted only to tell mistakes apart."""


@dataclass(frozen=True)
class Between:
    """What is right with all numbers between two."""

    least: float
    most: float


def Most(most: float) -> Between:
    """What is right with all numbers up to one."""
    return Between(-np.inf, most)


def returned(found, what: str = ""):
    """What an answer gave. Raises AssertionError where that is nothing: most often a forgotten return."""
    begin = f"{what}: " if what else ""
    assert found is not None, f"{begin}your function returned None. Is the return missing?"
    return found


UNROLLED = Iterator | KeysView | ValuesView  # gives things one by one, in an order, and is no list


def listed(found):
    """The same in lists and numbers of Python, where it gives things in an order, is an array, or a list of those."""
    if hasattr(found, "tolist"):
        return found.tolist()
    return [listed(one) for one in found] if isinstance(found, UNROLLED | list | tuple | range) else found


def whole(lists: list[list], *_) -> dict[str, bool]:
    """For `rules`: numbers of rows in lists, which index, so that 3.0 will not do. 2.5 differs from what is right."""
    points = [row for rows in lists for row in rows if isinstance(row, float)]
    broken = bool(points) and all(map(float.is_integer, points))
    return {f"numbers of rows are whole, such as 3; {points[:1]} cannot index": broken}


def randoms(seed: int, *shapes: tuple[int, ...]) -> list:
    """Tensors of float64 drawn from a normal distribution, the same ones for the same seed."""
    import torch  # not above: it loads slowly

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def named(*names: str):
    """For `like`: an answer that gives as many things as there are names, in a table under these names."""

    def like(got, words: str) -> dict:
        fits = isinstance(got, list | tuple) and len(got) == len(names)
        assert fits, f"{words}: return {len(names)} things: {', '.join(names)}"
        return dict(zip(names, got, strict=True))

    return like


def close(got, want, what: str, tolerance: float = 1e-10) -> None:
    """Raise AssertionError with both numbers unless `got` is within `tolerance`, relative to `want` if that is not 0.

    Works for numbers, arrays and tensors; a wrong shape is named as such, None as a forgotten return, and so are the
    usual slips: see `slip`. Where float64 is right, a tensor of fewer digits is not.
    """
    returned(got, what)
    kind = _tensor_of(got)
    narrow = _tensor_of(want) == "float64" and kind in NARROW
    single = hasattr(got, "reshape")  # a tensor of one element is a number
    got, want = _array(got, what), _array(want, what)
    got = got.reshape(()) if single and got.size == 1 and not want.ndim else got
    turned = got.ndim > 1 and got.shape == want.shape[::-1] and _same(got.T, want)
    few = f": {_few(got)} in place of {_few(want)}" if 0 < max(got.size, want.size) <= 12 else ""
    assert got.shape == want.shape, f"{what}: expected shape {want.shape}, got {got.shape}" + (
        ", which is transposed" if turned else few
    )
    if not want.size:
        return
    with np.errstate(invalid="ignore"):  # of two infinities, which are equal
        error = np.where(got == want, 0.0, np.abs(got - want))
    scale = float(np.abs(want[np.isfinite(want)]).max(initial=0.0)) or 1.0
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    where = f" at {tuple(map(int, worst))}" if want.shape else ""
    message = f"{what}: expected {want[worst]:.6g}{where}, got {got[worst]:.6g}"
    if error[worst] < 3e-6 * scale:
        message += f", off by {error[worst] / scale:.0e} of it: was it float32 on the way?"
    assert bool((error <= tolerance * scale).all()), message + slip(got, want)
    assert not narrow, f"{what}: the numbers are right, but come as {kind}, with half of float64's digits"


def slip(got, want) -> str:
    """The usual slip by which arrays of equal shape differ, as an end of a sentence; empty where it is none of them.

    Known are: n times, an n-th, the sign, one too many or too few, transposed, shifted, in another order.
    """
    whole = want.ndim == 0 and float(want).is_integer() and abs(float(want)) > 2
    if whole and abs(got - want) == 1:
        return ": one too " + ("many" if got > want else "few")
    if _same(got, want):
        return ""
    if factor := _factor(got, want):
        return f": {factor}"
    if want.ndim > 1 and got.shape == got.T.shape and _same(got.T, want):
        return ": it is transposed"
    for dim in range(want.ndim):
        for by in (1, -1):
            if _same(np.roll(got, by, dim), want):
                return f": all stand one place too far along dimension {dim}"
    if want.ndim and _same(np.sort(got, None), np.sort(want, None)):
        return ": the right numbers, in another order"
    return ""


def _few(values) -> str:
    return " ".join(f"{x:g}" for x in values.flat) or "nothing"


def _factor(got, want) -> str:
    """Words where one is the other times a whole number, or its negative; else nothing."""
    at = np.unravel_index(np.argmax(np.abs(want)), want.shape)
    if not np.isfinite(want).all() or not want[at] or not got[at]:
        return ""
    times = got[at] / want[at]
    if not _same(got, times * want):
        return ""
    if abs(times + 1) < NEARLY:
        return "the sign is turned"
    for factor, words in ((times, "{} times what is right"), (1 / times, "1/{} of what is right")):
        if 1.5 < factor < 10_000 and abs(factor - round(factor)) < NEARLY * factor:
            return words.format(round(factor))
    return ""


def difference(got, want, what: str, tolerance: float = 1e-10) -> None:
    """Raise AssertionError with the first difference between two values of any kind; style does not matter.

    A list is a tuple, numbers of Python, numpy and torch are one kind, and a dict may have any order.
    """
    if want is ANY:
        return
    if isinstance(want, Between):
        assert is_number(returned(got, what)), f"{what}: expected a number, got {got!r}"
        assert got <= want.most, f"{what}: {want.most:,.10g} are enough, got {got:,.10g}"
        assert got >= want.least, f"{what}: at least {want.least:,.10g} are needed, got {got:,.10g}"
    elif want is None or isinstance(want, str | bool):
        got = bool(got) if isinstance(want, bool) and is_number(got) else got
        assert got == want, f"{what}: expected {want!r}, got {got!r}"
    elif isinstance(want, Mapping):
        returned(got, what)
        assert isinstance(got, Mapping), f"{what}: expected a dict, got {got!r}"
        missing, extra = [k for k in want if k not in got], [k for k in got if k not in want]
        assert not missing, f"{what}: {missing[0]!r} is missing"
        assert not extra, f"{what}: there is no {extra[0]!r}"
        for key in want:
            difference(got[key], want[key], f"{what}: {key}", tolerance)
    elif isinstance(want, Set):
        got = listed(returned(got, what))
        assert isinstance(got, Set | list), f"{what}: expected names, got {got!r}"
        names = {tuple(one) if isinstance(one, list) else one for one in got}
        assert names == want, f"{what}: expected {sorted(want)}, got {sorted(names)}"
        assert len(names) == len(got), f"{what}: some are there twice: {got}"
    elif isinstance(want, list | tuple) and not _numbers(want):
        returned(got, what)
        assert isinstance(got, list | tuple), f"{what}: expected a list of {len(want)}, got {got!r}"
        shown = f": {got!r}" if len(repr(got)) < 80 else ""
        assert len(got) == len(want), f"{what}: expected {len(want)} things, got {len(got)}{shown}"
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            difference(one, other, f"{what}, number {i}" if len(want) > 1 else what, tolerance)
    elif is_dataclass(want) or isinstance(want, SimpleNamespace):
        assert got == want, f"{what}: expected {want!r}, got {got!r}"
    else:
        close(got, want, what, tolerance)


def equal(one, other, tolerance: float = 0.0) -> bool:
    """Whether two values of any kind are the same, by default to the last digit."""
    try:
        difference(one, other, "", tolerance)
    except AssertionError:
        return False
    return True


def plain(value):
    """A value of any kind in words and whole numbers, alike for values that `difference` calls alike.

    Numbers keep seven digits of the largest among them.
    """
    if isinstance(value, Mapping):
        return sorted((str(key), plain(one)) for key, one in value.items())
    if isinstance(value, Set):
        return sorted(map(str, value))
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, list | tuple) and not _numbers(value):
        return [plain(one) for one in value]
    try:
        array = _array(value, "")
    except AssertionError:
        return type(value).__name__
    scale = np.abs(array[np.isfinite(array)]).max(initial=0.0)
    digits = np.nan_to_num(array / (scale or 1.0), nan=9, posinf=8, neginf=-8) * 1e7
    return array.shape, f"{scale:.6e}", digits.round().astype(int).tolist()


def _numbers(values) -> bool:
    """Whether these are numbers only, nested or not, that make an array."""
    try:
        return bool(len(values)) and np.asarray(values).dtype.kind in "iuf"
    except (ValueError, TypeError, RuntimeError):  # the last: tensors that want a gradient
        return False


def is_number(value) -> bool:
    """Whether it is one number of Python, numpy or torch."""
    return isinstance(value, Number | np.generic) or (
        hasattr(value, "reshape") and len(value.reshape(-1)) == 1
    )


def _tensor_of(value) -> str:
    """The type of a tensor's numbers, such as float64; empty for what is no tensor. torch itself loads slowly."""
    return str(value.dtype).removeprefix("torch.") if hasattr(value, "detach") else ""


def _array(value, what: str) -> np.ndarray:
    """The value as an array of float64."""
    if isinstance(value, list | tuple):
        value = [_array(x, what) if _tensor_of(x) else x for x in value]
    if _tensor_of(value):
        return value.detach().double().cpu().numpy()
    try:
        if np.asarray(value).dtype.kind in "US":
            raise ValueError("a text such as '18' is no number")
        return np.asarray(value, dtype=float)
    except (ValueError, TypeError):
        sizes = [len(one) for one in value if isinstance(one, list)] if isinstance(value, list) else []
        assert len(set(sizes)) < 2, f"{what}: the parts should be equally long, and are {sizes} long"
        raise AssertionError(f"{what}: expected numbers, got {value!r}") from None


def _same(one, other) -> bool:
    scale = np.abs(other[np.isfinite(other)]).max(initial=1e-300)
    return bool(np.allclose(one, other, rtol=NEARLY, atol=NEARLY * scale, equal_nan=True))
