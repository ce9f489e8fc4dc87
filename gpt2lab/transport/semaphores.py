"""POSIX semaphores in shared memory: ranks sleep on them without spinning, and they order memory accesses.

What one rank wrote before `post` another sees after `take`, on any processor: POSIX (Base Definitions 4.15.2, Memory
Synchronization) promises it for sem_post, sem_trywait and sem_timedwait. sem_clockwait (glibc 2.30) is sem_timedwait
on a clock that cannot be set. A plain flag would be enough only on x86.
"""

import ctypes
import sys
import time

SIZE = 64  # bytes for one: sem_t needs 32, but two on one cache line would slow each other down


def _library():
    """libc with unnamed semaphores between processes; None where they do not exist (macOS, Windows)."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    names = ("sem_init", "sem_post", "sem_trywait", "sem_clockwait")
    return library if all(hasattr(library, name) for name in names) else None


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = _library()
AVAILABLE = _libc is not None

if AVAILABLE:
    _post, _try, _timed = _libc.sem_post, _libc.sem_trywait, _libc.sem_clockwait
    _post.argtypes = _try.argtypes = (ctypes.c_void_p,)
    _timed.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Moment))
    _libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


def prepare(address: int) -> None:
    """Initialise a semaphore, shared between processes, with the value 0."""
    _libc.sem_init(address, 1, 0)


def post(address: int) -> None:
    """Add one, and wake a rank that waits for it."""
    _post(address)


def take(address: int) -> bool:
    """Subtract one if the value is positive, and return whether it was; never waits."""
    return _try(address) == 0


def wait(address: int, seconds: float) -> bool:
    """Sleep until one can be subtracted, at most `seconds`; False after that time, or after a signal."""
    end = time.monotonic() + seconds
    moment = _Moment(int(end), int(end % 1 * 1e9))
    return _timed(address, time.CLOCK_MONOTONIC, ctypes.byref(moment)) == 0
