"""POSIX semaphores that live in shared memory: ranks sleep on them without spinning, and they order memory.

What one rank wrote before `post` another sees after `take`, on any processor: POSIX (Base Definitions 4.15.2, Memory
Synchronization) promises that for sem_post, sem_trywait and sem_timedwait, of which sem_clockwait (glibc 2.30) is the
form that nobody disturbs who sets the clock. A plain flag would do on x86 only.
"""

import ctypes
import sys
import time

SIZE = 64  # bytes kept for one: sem_t takes 32, and two on one cache line would slow each other down


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
    """Make a semaphore, shared between processes, with nothing to take."""
    _libc.sem_init(address, 1, 0)


def post(address: int) -> None:
    """Add one, and wake a rank that waits for it."""
    _post(address)


def take(address: int) -> bool:
    """Take one if there is one; never waits."""
    return _try(address) == 0


def wait(address: int, seconds: float) -> bool:
    """Sleep until one can be taken, at most `seconds`; False when none came (or a signal did)."""
    end = time.monotonic() + seconds
    moment = _Moment(int(end), int(end % 1 * 1e9))
    return _timed(address, time.CLOCK_MONOTONIC, ctypes.byref(moment)) == 0
