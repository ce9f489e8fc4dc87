"""A throw-away JupyterLab and a real Chromium for the tests of this folder."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2lab.classroom.copies import bring

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # keep all cells in the page
    "docmanager-extension/plugin": {"autosave": False},
}


@pytest.fixture(scope="session")
def chromium():
    """A running Chromium; without one the tests are skipped and say how to get it."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a JupyterLab started as `make lab` does, on its copy of the lessons, with its own settings."""
    home = tmp_path_factory.mktemp("lab")
    copy = home / "checkout"
    bring(ROOT / "notebooks", copy / "work")
    for name, value in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    folders = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
    env = os.environ | {f"JUPYTER_{key}_DIR": str(home / folder) for key, folder in folders.items()}
    env |= {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    env |= {"IPYTHONDIR": str(home / "ipython"), "GPT2LAB_STATIC": "0"}
    log = home / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            command(copy), env=env, cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield address(server, log)
    finally:
        stop(server)


def command(root: Path) -> list[str]:
    """The last command of `make lab`, on another folder and any free port."""
    printed = subprocess.run(
        ["make", "-n", "lab"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    line = re.search(r"^(?:\w+=\S+\s+)+\S*jupyter lab .*", printed.replace("\\\n", " "), re.M)[0]
    words = line.replace(f'"{ROOT}"', str(root)).replace('"', "").split()
    places = [w.split(":")[0] for w in words if re.match(r"JUPYTER\w*_PATH=", w)]
    more = ["--port=0", "--no-browser", "--allow-root"]
    kept = [w for w in words[len(places) + 1 :] if not w.startswith("--port") and w not in more]
    start = ["env", *places, sys.executable, "-m", "jupyter"]
    return [*start, *kept, *more, "--LabApp.expose_app_in_browser=True"]


def address(server, log: Path) -> str:
    """Wait for the address that the server prints."""
    for _ in range(240):
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", log.read_text()):
            return found[0]
        assert server.poll() is None, log.read_text()[-3000:]
        time.sleep(0.25)
    raise TimeoutError(log.read_text()[-3000:])


def stop(server) -> None:
    """End the server and its kernels."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(4)
            return
