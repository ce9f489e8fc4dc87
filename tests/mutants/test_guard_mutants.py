"""Guards in the code of the ranks themselves: each is taken out of a copy of the package, and its test must fail."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpt2lab"
FAIL, GONE, HERE = (
    f"tests/faults/{name}.py" for name in ("test_ranks_fail", "test_parent_gone", "test_surroundings")
)
OUTSIDE = next((n for _, n in socket.if_nameindex() if n.startswith(("eth", "en", "wl"))), "")
LOOPBACK = "test_only_loopback_is_listened_on"

GUARDS = {  # what is wrong then: file, what stands there, what is put there, the test that must fail, its words
    "ranks hear Ctrl-C": (
        "processes/rank_process.py",
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(number, signal.default_int_handler)",
        (FAIL, "ctrl_c_in_a_terminal"),
        "left with exit code 1 before it returned",
    ),
    "a rank listens to the whole network": (  # nothing is taken out here: it is the test's eyes that are tested
        "processes/rank_process.py",
        "    torch.set_num_threads(1)\n",
        "    torch.set_num_threads(1)\n    globals()['_open'] = socket.create_server(('', 0))\n",
        (GONE, LOOPBACK),
        "'00000000'",
    ),
    "gloo chooses the network": (
        "processes/rank_process.py",
        'if name in ("lo", "lo0")), "lo")',
        f'if name == "{OUTSIDE}"), "lo")',
        (GONE, LOOPBACK),
        "Extra items in the left set",
    ),
    "others can read the private folder": (
        "processes/pool.py",
        "        self.members: list[Member] = []\n        self.jobs",
        "        self.folder.chmod(0o755)\n        self.members = []\n        self.jobs",
        (GONE, LOOPBACK),
        "(16877 & 511) == 448",  # a folder of 0o755, and 0o700
    ),
    "no report before the group is destroyed": (
        "processes/rank_process.py",
        "        if error is not None:\n",
        "        if False:\n",
        (FAIL, "is_named_with_its_source_line and 1.5"),
        "'PeerLost') == (",  # a neighbour of the rank that raised is named, whichever raised first
    ),
    "a full disk is not explained": (
        "processes/pool.py",
        "if error.errno not in (errno.ENOSPC, errno.EDQUOT):",
        "if True:",
        (HERE, "full_disk"),
        "No space left on device",
    ),
}


def changed(folder: Path, name: str, right: str, wrong: str) -> Path:
    """The package with one text replaced, as links to the real files but for the changed one."""
    copy = folder / "gpt2lab"
    (copy / Path(name).parent).mkdir(parents=True)
    for source in (PACKAGE, (PACKAGE / name).parent):
        for path in source.iterdir():
            target = copy / path.relative_to(PACKAGE)
            if not target.exists() and path != PACKAGE / name:
                target.symlink_to(path)
    text = (PACKAGE / name).read_text()
    assert text.count(right) == 1, f"{name} has changed: the guard is not there any more"
    (copy / name).write_text(text.replace(right, wrong))
    return folder


def outcome(folder: Path, file: str, words: str) -> subprocess.CompletedProcess:
    """Run a test on the package in `folder`; from there, because a forkserver looks where it was started first."""
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TODAY": "all"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-x",
        "-k",
        words,
        ROOT / file,
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("guard", GUARDS)
def test_without_the_guard_its_test_fails(guard, tmp_path):
    """In words that only this change brings about, and no copy of the package as such."""
    if guard == "gloo chooses the network" and not OUTSIDE:
        pytest.skip("this machine has no network to choose but loopback")
    name, right, wrong, test, words = GUARDS[guard]
    done = outcome(changed(tmp_path, name, right, wrong), *test)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    assert words in done.stdout, done.stdout


LINE = "    torch.set_num_threads(1)\n"
HARMLESS = "processes/rank_process.py", LINE, f"{LINE}    status_board.the_copy_ran = True\n"


def test_the_copy_is_what_runs_in_the_ranks_too(tmp_path):
    copy = changed(tmp_path, *HARMLESS)
    script = copy / "script.py"
    script.write_text(
        "from gpt2lab import launch\n"
        "from gpt2lab.processes import status_board\n"
        "print(launch(lambda rank, world_size: hasattr(status_board, 'the_copy_ran'), ranks=1))\n"
    )
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, script], cwd=copy, env=env, capture_output=True, text=True)
    assert done.stdout == "[True]\n", done.stdout + done.stderr
