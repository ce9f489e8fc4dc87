"""What must be set before a process starts. No torch here: the command line asks this first."""

import os
import platform

TUNABLES = {
    "glibc.malloc.hugetlb": "1",  # huge pages, where the kernel has them
    "glibc.malloc.mmap_max": "0",  # large tensors lie on the heap as well,
    "glibc.malloc.trim_threshold": str(1 << 36),  # and what is freed there serves the next step
}
TUNABLE = ":".join(f"{name}={value}" for name, value in TUNABLES.items())


def ask_for_huge_pages() -> bool:
    """Set the tunables for processes started from here on.

    False where there is no glibc, or where somebody has told malloc already what to do.
    """
    said = os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or "glibc.malloc." in said:
        return False
    os.environ["GLIBC_TUNABLES"] = f"{said}:{TUNABLE}" if said else TUNABLE
    return True
