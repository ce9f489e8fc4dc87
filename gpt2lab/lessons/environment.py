"""Where a lesson runs: before a reader, or where it is built or compared; and what a blank exercise raises there."""

import os

YOUR_TURN = "your turn"
"""What the NotImplementedError says that stands in an exercise until somebody has answered it."""


def static() -> bool:
    """Whether pictures take the place of sliders and no verdict is kept.

    GPT2LAB_STATIC=1 or 0 says so; else it is so under pytest, whose kernels have its version in their environment.
    """
    return os.environ.get("GPT2LAB_STATIC", str(int("PYTEST_VERSION" in os.environ))) == "1"


def unanswered(error: BaseException) -> bool:
    """Whether an exercise that is still blank raised this, here or on a rank (whose `ename` names its type)."""
    kind = getattr(error, "ename", "") or type(error).__name__
    return kind == "NotImplementedError" and YOUR_TURN in str(error)
