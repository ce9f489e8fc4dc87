"""Where a lesson runs: before a reader, or where it is built or compared."""

import os


def static() -> bool:
    """Whether pictures take the place of sliders and no verdict is kept.

    GPT2LAB_STATIC=1 or 0 says so; else it is so under pytest, whose kernels have its version in their environment.
    """
    return os.environ.get("GPT2LAB_STATIC", str(int("PYTEST_VERSION" in os.environ))) == "1"
