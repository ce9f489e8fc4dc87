"""A plugin of pytest that writes the name of the first test that fails."""

import os
from pathlib import Path


def pytest_runtest_logreport(report):
    """Write it once."""
    file = Path(os.environ["POWER_FIRST"])
    if report.failed and not file.exists():
        file.write_text(report.nodeid)
