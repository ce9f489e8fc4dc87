"""Live ranks from a script or a cell: `launch(fn)` calls `fn(rank, world_size)` on four real processes."""

import contextlib
import inspect
import linecache
import pickle
import time
import weakref
from itertools import chain, zip_longest
from numbers import Integral, Real

from .. import transport
from ..machine import gpus
from .failure import RankFailed
from .rank_process import kept

__all__ = ["RankFailed", "Ranks", "kept", "launch"]
BACKENDS = (transport.NAME, "gloo", "nccl")
WIDTH = 110  # characters of all columns, as a notebook shows them
LONGEST = 1_000_000  # seconds: more than eleven days


def launch(
    fn, *args, ranks: int = 4, timeout: float = 30.0, echo="grouped", backend: str | None = None, **kwargs
) -> list:
    """Call `fn(rank, world_size, *args, **kwargs)` on new ranks and return the list of their results.

    The ranks share a process group that is ready for use. Functions, lambdas and classes of a notebook cell work: they
    are sent by value. What ranks print is shown rank by rank at the end (`echo="grouped"`), a column for each where
    it is narrow (`echo="columns"`), at once (`echo="live"`) or not at all (`echo=False`). A rank that raises, dies, or
    makes no progress (no line printed, no communication) for `timeout` seconds ends the run with RankFailed, and no
    process is left behind.

    `backend` is what carries the bytes: "shm" (memory that the ranks share, the default where the system has it),
    "gloo" (sockets, everywhere) or "nccl" (a GPU for each rank; gloo carries what is on the CPU).
    """
    __tracebackhide__ = True
    with Ranks(ranks, timeout=timeout, echo=echo, backend=backend) as pool:
        return pool.run(fn, *args, **kwargs)


class Ranks:
    """Ranks that stay alive between calls: `with Ranks(4) as ranks: ranks.run(fn)`.

    After a failure the next `run` starts new ranks. The dictionary `kept` of this module exists on each rank as long
    as the rank lives, and carries state from one run to the next.
    """

    def __init__(self, ranks: int = 4, timeout: float = 30.0, echo="grouped", backend: str | None = None):
        if not isinstance(ranks, Integral) or ranks < 1:
            raise ValueError(f"ranks={ranks!r}: the number of ranks must be a whole number, 1 or more.")
        if not isinstance(timeout, Real) or not 0 < timeout <= LONGEST:
            raise ValueError(
                f"timeout={timeout!r}: the seconds without progress must be more than 0 and at most {LONGEST:,}."
            )
        if echo not in ("grouped", "columns", "live", False):
            raise ValueError(f"echo={echo!r}: use 'grouped', 'columns', 'live' or False.")
        backend = backend or transport.default()
        if backend not in BACKENDS or (backend == transport.NAME and not transport.AVAILABLE):
            raise ValueError(f"backend={backend!r}: use one of {', '.join(BACKENDS)} that this system has.")
        if backend == "nccl" and (lacking := gpus.gpus_needed(ranks)):
            raise ValueError(f"backend='nccl' needs {lacking}. Use 'shm' or 'gloo'.")
        self.size, self.timeout, self.echo, self.backend = int(ranks), float(timeout), echo, backend
        self._pool = None

    def run(self, fn, *args, **kwargs) -> list:
        """Call `fn(rank, world_size, *args, **kwargs)` on every rank; returns the results in rank order."""
        __tracebackhide__ = True
        from .watch import Watch

        job = _pack(fn, args, kwargs)
        lines = {rank: [] for rank in range(self.size)}

        def show(rank: int, new: list[str]) -> None:
            if self.echo == "live":
                for line in new:
                    print(f"[rank {rank}] {line}", flush=True)
            else:
                lines[rank] += new

        try:
            pool = self._living_pool()
            pool.send(job)
            results = Watch(pool, self.timeout, show).run()
            pool.finish_job()
            return results
        except BaseException:
            self.close()
            raise
        finally:
            if self.echo in ("grouped", "columns"):
                _print(lines, self.echo == "columns")

    def _living_pool(self):
        from .pool import Pool

        if self._pool is not None and not self.alive:
            self.close()
        if self._pool is None:
            try:
                self._pool = Pool(self.size, self.backend, self.timeout)
            # the process server was killed a moment ago and still counts as alive
            except ConnectionRefusedError:
                time.sleep(1.0)
                self._pool = Pool(self.size, self.backend, self.timeout)
            self._finalizer = weakref.finalize(self, self._pool.kill)
        return self._pool

    @property
    def alive(self) -> bool:
        """Whether the ranks have started and all of them live."""
        return self._pool is not None and self._pool.alive()

    def close(self) -> None:
        """End the ranks; a later `run` starts new ones."""
        if self._pool is not None:
            self._finalizer()
            self._pool = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _print(lines: dict[int, list[str]], columns: bool) -> None:
    """Show what each rank has printed; in columns, if they are narrow and hold nothing that moves the cursor."""
    said = [[f"rank {rank}", *map(str.expandtabs, of)] for rank, of in lines.items() if of]
    widths = [max(map(len, column)) for column in said]
    if columns and sum(widths) + 3 * len(widths) <= WIDTH and all(map(str.isprintable, chain(*said))):
        for row in zip_longest(*said, fillvalue=""):
            print("   ".join(map(str.ljust, row, widths)).rstrip())
    else:
        for rank, of in lines.items():
            for line in of:
                print(f"[rank {rank}] {line}")


def _pack(fn, args: tuple, kwargs: dict) -> bytes:
    """The job as bytes: the function and its arguments by value, and the source of notebook cells for tracebacks."""
    from .by_value import packed

    if not callable(fn):
        raise TypeError(f"launch needs a function fn(rank, world_size, ...), but got a {type(fn).__name__}.")
    with contextlib.suppress(ValueError):  # some callables have no signature
        signature = inspect.signature(fn)
        try:
            signature.bind(0, 1, *args, **kwargs)
        except TypeError as error:
            name = getattr(fn, "__name__", "the function")
            raise TypeError(
                f"Ranks call {name}(rank, world_size, ...) with what follows it in launch, and {name}{signature} "
                f"cannot be called so: {error}."
            ) from None
    try:
        payload = packed((fn, args, kwargs))
    except (TypeError, pickle.PicklingError, RuntimeError) as error:
        raise TypeError(
            f"{fn!r} cannot be sent to the ranks: {error}. Create such objects inside the function."
        ) from error
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return pickle.dumps((cells, payload))
