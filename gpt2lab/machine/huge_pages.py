"""Settings that must be made before a process starts. No torch here: the command line runs this first."""

import os
import platform

TUNABLES = {
    "glibc.malloc.hugetlb": "1",  # huge pages, where the kernel has them
    "glibc.malloc.mmap_max": "0",  # large tensors are on the heap as well,
    "glibc.malloc.trim_threshold": str(1 << 36),  # and memory freed there is used again by the next step
}
TUNABLE = ":".join(f"{name}={value}" for name, value in TUNABLES.items())


def ask_for_huge_pages() -> bool:
    """Set the tunables for processes started from now on.

    Returns False without glibc, or where the environment already has settings for malloc.
    """
    said = os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc." in said:
        return False
    os.environ["GLIBC_TUNABLES"] = f"{said}:{TUNABLE}" if said else TUNABLE
    return True
