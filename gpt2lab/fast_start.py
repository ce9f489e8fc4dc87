"""What must be set before a process starts. No torch here: the command line asks this first."""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb=1"


def ask_for_huge_pages() -> bool:
    """Set the tunable for processes started from here on; False where there is no glibc or it is set already."""
    if sys.platform != "linux" or TUNABLE in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    others = os.environ.get("GLIBC_TUNABLES")
    os.environ["GLIBC_TUNABLES"] = f"{others}:{TUNABLE}" if others else TUNABLE
    return True
