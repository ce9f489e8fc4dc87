"""A training run that is asked to end: the newest step is saved, one sentence says so, and nothing is left."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE, Marked, until

import gpt2lab
from gpt2lab.run import STOP, read_log
from gpt2lab.storage import checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
TRAIN = (
    "train --plan dp=2 --steps 100000 --batch 2 --sequence 8 --evaluate 100000 --sample 0 --no-fast --out out"
)
SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
os.chdir({folder!r})
os.setsid()
train = [sys.executable, "-m", "gpt2lab", *{train!r}.split()]
{start}
"""
STARTS = {
    "": "sys.path.insert(0, {home!r}); from gpt2lab.cli import main; sys.exit(main(train[3:]))",
    "nohup": "signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(train[0], train)",
    "timeout": "os.execvp('timeout', ['timeout', '-k', '60', '600', *train])",
    "shell": "os.execvp('sh', ['sh', '-c', ' '.join(train) + '; true'])",
}
HOME = str(Path(__file__).parents[2])


def started(how: str, folder: Path, train: str = TRAIN) -> Marked:
    """A training run that is started so."""
    return Marked(SCRIPT.format(folder=str(folder), train=train, start=how.format(home=HOME)), folder)


def parent_of(pid: int) -> int:
    """The number of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def ranks(running: Marked) -> list[int]:
    """The ranks: whose parent's parent is the main process."""
    others = set(running.others())
    return sorted(
        p for p in others if parent_of(p) in others and parent_of(parent_of(p)) == running.process.pid
    )


def send(running: Marked, name: str, to: str) -> None:
    """Send a signal to the main process, to all of its process group, or to rank 1."""
    number = getattr(signal, name)
    if to == "the group":
        with contextlib.suppress(ProcessLookupError):  # of a second signal: all may be gone by then
            os.killpg(running.process.pid, number)
    else:
        os.kill(ranks(running)[1] if to == "a rank" else running.process.pid, number)


def wait_until(when: str, running: Marked, folder: Path) -> None:
    """Until the run is in a state: its processes start, it has made steps, more steps, or it writes a checkpoint."""
    if when == "it starts":
        until(lambda: running.folders())
    elif when == "steps":
        running.wait_for_line("step 10:")
    elif when == "more steps":
        (run,) = folder.glob("out/*")
        until(lambda: len(read_log(run)) > 100 or running.process.poll() is not None)
    else:  # a second signal may come a moment after the save
        until(lambda: list(folder.glob("out/*/*.partial")) or running.process.poll() is not None)


TOLD = [  # what is sent, to whom, when, how it was started, what is said
    ("SIGTERM", "the main process", "steps", "", "Stopped by SIGTERM: saved step"),
    ("SIGTERM", "the group", "steps", "", "Stopped by SIGTERM: saved step"),
    ("SIGTERM", "a rank", "steps", "", "Stopped by SIGTERM to rank 1: saved step"),
    ("SIGTERM", "the group", "it saves", "", "Stopped by SIGTERM: saved step"),
    ("SIGTERM", "the group", "it starts", "", "Stopped by SIGTERM before the first step"),
    ("SIGTERM SIGTERM", "the group", "steps, it saves", "", "Stopped by SIGTERM: saved step"),
    ("SIGHUP", "the group", "steps", "", "Stopped by SIGHUP: saved step"),
    ("SIGHUP", "the main process", "it starts", "", "Stopped by SIGHUP before the first step"),
    ("SIGHUP", "the main process", "steps", "", "Stopped by SIGHUP: saved step"),
    ("SIGHUP", "a rank", "steps", "", "Stopped by SIGHUP to rank 1: saved step"),
    ("SIGINT", "the main process", "steps", "", "Stopped by SIGINT: saved step"),
    ("SIGINT", "a rank", "steps", "", "Stopped by SIGINT to rank 1: saved step"),
    ("SIGINT", "the group", "steps", "", "Stopped by SIGINT: saved step"),
    ("SIGINT", "the group", "it starts", "", "Stopped by SIGINT before the first step"),
    ("SIGINT SIGINT", "the group", "it saves, it saves", "", "Stopped by SIGINT: saved step"),
    ("SIGHUP SIGTERM", "the group", "steps, more steps", "nohup", "Stopped by SIGTERM: saved step"),
    ("SIGTERM", "the main process", "steps", "timeout", "Stopped by SIGTERM: saved step"),
    ("SIGTERM", "the group", "steps", "shell", "Stopped by SIGTERM: saved step"),
]


@pytest.mark.parametrize(("names", "to", "when", "start", "said"), TOLD)
def test_a_run_that_is_asked_to_end_saves_its_newest_step(names, to, when, start, said, tmp_path):
    if start == "timeout" and not shutil.which("timeout"):
        pytest.skip("there is no timeout command here")
    train = TRAIN + " --save 1" * ("saves" in when)
    with started(STARTS[start], tmp_path, train) as running:
        for name, moment in zip(names.split(), when.split(", "), strict=True):
            wait_until(moment, running, tmp_path)
            send(running, name, to)
        text = running.process.stdout.read()  # its end: every process that could write to it is gone
        status = running.process.wait(PATIENCE)
        until(lambda: not running.others() and not running.folders())
    assert said in text and "Traceback" not in text and "memory" not in text and "Warning" not in text, text
    (run,) = tmp_path.glob("out/*")
    newest = checkpoint.read_state(checkpoint.all_in(run)[-1])["step"]
    assert status == {"": 0, "nohup": 0, "timeout": 0, "shell": -signal.SIGTERM}[start]
    assert not (run / STOP).exists() and not list(run.glob("*.partial"))
    if "before" in said:
        assert newest == 0
    else:
        assert int(re.search(r"saved step (\d+)", text)[1]) == newest == len(read_log(run))
        assert f"Continue with: gpt2lab train --resume {Path('out', run.name)}" in text


def test_a_pipeline_without_a_flush_ends_in_the_middle_of_a_stream(tmp_path):
    """Slurm kills 30 s after it asks: longer than two batches take, shorter than all until the next evaluation."""
    often = "--evaluate 200 --save 200"
    train = TRAIN.replace("dp=2", "pp=2,schedule=pipedream").replace("--evaluate 100000", often)
    with started(STARTS[""], tmp_path, train) as running:
        running.wait_for_line("step 200:")
        send(running, "SIGTERM", "the group")
        text = running.process.stdout.read()
        assert running.process.wait(PATIENCE) == 0
    (run,) = tmp_path.glob("out/*")
    saved = int(re.search(r"saved step (\d+)", text)[1])
    assert 200 < saved < 400 and len(read_log(run)) == saved, text
    assert checkpoint.read_state(checkpoint.all_in(run)[-1])["step"] == saved


def test_an_emptied_folder_of_temporary_files_costs_a_run_nothing(tmp_path):
    with started(STARTS[""], tmp_path) as running:
        running.wait_for_line("step 10:")
        for folder in running.folders():
            shutil.rmtree(folder)
        send(running, "SIGTERM", "the main process")
        text = running.process.stdout.read()
        assert running.process.wait(PATIENCE) == 0
    assert "Stopped by SIGTERM: saved step" in text and "Traceback" not in text, text


@pytest.mark.parametrize("moment", [0.1, 0.4, 0.8])
def test_ctrl_c_while_a_command_is_imported_shows_no_traceback(moment, tmp_path):
    with started("os.execv(train[0], train)", tmp_path) as running:
        until(lambda: "gpt2lab" in Path(f"/proc/{running.process.pid}/cmdline").read_text())
        time.sleep(moment)
        send(running, "SIGINT", "the main process")
        said = running.process.stdout.read()
        assert f'File "{Path(gpt2lab.__file__).parent}' not in said, said  # Python's own start is not ours


def test_ctrl_c_while_the_first_import_runs_shows_no_traceback_either(tmp_path):
    """`signal` itself is not imported yet: nothing but a handler of the import can end the command quietly."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'signal':\n"
        "            raise KeyboardInterrupt\n"
        "sys.modules.pop('signal', None)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "gpt2lab", "--help"],
        env=dict(os.environ, PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (130, "")
