"""`make` says in one sentence what is missing, and the parts of the test run report and fail as they should."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import run

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with nothing but what make reads, and a folder of commands that stand in for the real ones."""
    read = "Makefile requirements.txt requirements-dev.txt pyproject.toml tests/run.py tests/tiers.py .ci/run"
    for name in read.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stand_in(tmp_path / "bin" / "uv", "exit 1")
    return tmp_path


def stand_in(path: Path, script: str, by: str = "/bin/bash"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{by}\n{script}\n")
    path.chmod(0o755)


def call(checkout, *command, **env):
    """Run it there, as from a shell: the `make` that runs these tests passes nothing on, its day neither."""
    told = "MAKE", "TODAY", "LESSON"
    mine = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    env = mine | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"} | env
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)


MISSING = {  # what the Python that is there answers, and the sentence about it
    None: "There is no some-python: install Python 3.11 or newer",
    '[[ "$*" == *version_info* ]] && exit 1; echo Python 3.9.2': "Python 3.9.2 is too old: gpt2lab needs",
    '[[ "$*" == *ensurepip* ]] && exit 1; exit 0': "cannot make virtual environments: install its venv module",
}


@pytest.mark.parametrize("script, sentence", MISSING.items())
@pytest.mark.parametrize("target", ["lab", "test"])
def test_a_missing_piece_gets_one_clear_sentence(checkout, script, sentence, target):
    if script:
        stand_in(checkout / "bin" / "some-python", script)
    done = call(checkout, "make", target, "PYTHON=some-python")
    assert done.returncode != 0
    assert sentence in done.stdout and not (checkout / ".venv").exists()
    assert sum("install" in line or "too old" in line for line in done.stdout.splitlines()) == 1


def test_a_second_call_installs_nothing(checkout):
    for name in ("python", "pip", "jupyter"):
        stand_in(checkout / ".venv" / "bin" / name, f'echo {name} "$@" >> calls')
    assert call(checkout, "make", "lab", "PORT=9000", "ARGS=--debug").returncode == 0
    first = (checkout / "calls").read_text()
    assert "pip install --quiet -r requirements.txt" in first
    assert "jupyter lab --ip=127.0.0.1 --port=9000" in first and first.rstrip().endswith("--debug")
    (checkout / "calls").unlink()
    call(checkout, "make", "lab")
    copies, second = (checkout / "calls").read_text().splitlines()
    assert copies == "python -m gpt2lab.classroom.copies work"
    assert second.startswith("jupyter lab") and "work/00_start_here.ipynb" in second and "token" not in second


@pytest.mark.parametrize("fails", [False, True])
def test_uv_installs_where_there_is_one_and_pip_where_it_fails(checkout, fails):
    note = 'echo $(basename "$0") "$@" >> calls'
    stand_in(checkout / ".venv/bin/python", '[[ "$*" == *importlib* ]] && exit 1; exit 0')
    stand_in(checkout / ".venv/bin/pip", f'{note}; [[ "$*" == *index* || "$*" == *-r* ]]')
    stand_in(checkout / "bin/uv", f'{note}; [[ {int(fails)} == 0 && ("$*" == *index* || "$*" == *-r* ) ]]')
    stand_in(checkout / "bin/uname", "echo Linux")
    assert call(checkout, "make", ".venv/test.stamp", "TORCH_INDEX=https://here").returncode == 0
    torch = re.search(r"^torch==.*", (ROOT / "requirements.txt").read_text(), re.M)[0] + "+cpu"
    wanted = [torch, f"--extra-index-url https://here {torch}"]
    wanted += ["-r requirements.txt", "-r requirements-dev.txt"]
    uv = [f"uv pip install --quiet --python .venv/bin/python {what}" for what in wanted]
    pip = [f"pip install --quiet {what}" for what in wanted]
    due = [line for pair in zip(uv, pip, strict=True) for line in pair] if fails else [uv[0], pip[0], *uv[1:]]
    assert (checkout / "calls").read_text().splitlines() == due


def test_a_changed_requirement_is_installed(checkout):
    for name in ("python", "pip", "jupyter"):
        stand_in(checkout / ".venv" / "bin" / name, f'echo {name} "$@" >> calls')
    call(checkout, "make", "lab")
    later = (checkout / ".venv" / "lab.stamp").stat().st_mtime + 10
    os.utime(checkout / "requirements.txt", (later, later))
    (checkout / "calls").unlink()
    call(checkout, "make", "lab")
    assert "pip install" in (checkout / "calls").read_text()


@pytest.mark.parametrize("gone", ["python", "jupyter"])
def test_an_environment_of_a_moved_folder_or_of_a_python_that_is_gone_is_told(checkout, gone):
    for name in ("python", "pip", "jupyter"):
        stand_in(checkout / ".venv" / "bin" / name, "exit 0")
    assert call(checkout, "make", "lab").returncode == 0
    (file := checkout / ".venv" / "bin" / gone).unlink()
    if gone == "python":
        file.symlink_to(checkout / "elsewhere")
    else:
        stand_in(file, "exit 0", f"{checkout}/elsewhere/python")
    done = call(checkout, "make", "lab")
    assert done.returncode != 0 and "Build it anew: rm -rf .venv .venv-site, then make lab." in done.stdout


def test_slides_are_found_in_a_folder_with_a_space_in_its_name(checkout):
    page = checkout / "my lab" / "site" / "07_halves.html"
    page.parent.mkdir(parents=True)
    page.touch()
    shutil.copy(checkout / "Makefile", checkout / "my lab")
    stand_in(checkout / "bin" / "some-python", "exit 0")
    done = call(checkout, "make", "-C", "my lab", "slides", "ARGS=07", "PYTHON=some-python")
    assert f"file://{page}?slides".replace(" ", "%20") in done.stdout.splitlines()


def test_without_a_display_lab_still_serves(checkout):
    stand_in(checkout / "bin" / "uname", "echo Linux")
    line = call(checkout, "make", "-n", "lab", DISPLAY="", WAYLAND_DISPLAY="").stdout
    assert "--no-browser" in line
    assert "--no-browser" not in call(checkout, "make", "-n", "lab", DISPLAY=":0").stdout
    assert ("--allow-root" in line) == (os.getuid() == 0)


def test_help_lists_every_target(checkout):
    lines = call(checkout, "make").stdout
    targets = "lab test test-quick test-all test-gpu notebooks figures mutants site wheel help"
    for target in targets.split():
        assert f"make {target} " in lines


UPDATE = '[[ "$1" == -c ]] && echo 0.01 && exit'


def run_parts(checkout, script, *parts, **env):
    stand_in(checkout / ".venv/bin/python", f"{UPDATE}; {script}")
    return call(checkout, sys.executable, "tests/run.py", *parts, **env)


def test_parts_say_what_they_took_and_fail_when_one_fails(checkout):
    script = '[[ "$*" == *"-m mutant"* ]] && exit 1; echo 3 passed'
    done = run_parts(checkout, script, "tests")
    assert done.returncode == 0 and "3 passed" in done.stdout and "TODAY=all: everything" in done.stdout
    done = run_parts(checkout, script, "mutants", "browser")
    report = [line.split() for line in done.stdout.split("updates")[-1].splitlines()[1:]]
    assert done.returncode == 1
    assert [(words[0], words[-1]) for words in report[:2]] == [("mutants", "FAILED"), ("browser", "ok")]


def test_processes_of_a_part_keep_what_they_compiled_for_the_next(checkout):
    done = run_parts(
        checkout, 'echo "kept: ${PYTHONDONTWRITEBYTECODE-yes}"', "tests", PYTHONDONTWRITEBYTECODE="1"
    )
    assert done.returncode == 0 and "kept: yes" in done.stdout


def test_what_does_not_exist_is_refused_with_what_does(checkout):
    done = run_parts(checkout, "exit 0", "unit")
    assert done.returncode == 2 and "There is no part 'unit'. Use lint, tests," in done.stdout
    done = run_parts(checkout, "exit 0", "tests", TODAY="7")
    assert done.returncode == 2 and done.stdout == "TODAY=7 is no day. Use 0 to 6, or all.\n"


@pytest.mark.rotates
@pytest.mark.parametrize(
    "budget, said, code", [(200, "ok", 0), (60, "over its budget", 0), (20, "FAILED", 1)]
)
def test_a_part_over_its_budget_says_so_and_fails_at_three_times_as_much(checkout, budget, said, code):
    run = checkout / "tests/run.py"
    run.write_text(run.read_text().replace("tests: 20_000", f"tests: {budget}"))
    busy = f"{sys.executable} -c 'import time\nwhile time.process_time() < 1: pass'"
    done = run_parts(checkout, busy, "tests")
    assert done.returncode == code and said in done.stdout.splitlines()[-2]


@pytest.mark.rotates
def test_seconds_of_processes_that_outlive_their_parent_are_counted(checkout):
    busy = "import time\nwhile time.process_time() < 1: pass"
    busy = (
        f"(({sys.executable} -c '{busy}'; touch done) &) ; until [ -e done ]; do sleep 0.1; done; sleep 0.3"
    )
    words = run_parts(checkout, busy, "tests").stdout.splitlines()[-2].split()
    assert words[0] == "tests" and int(words[2]) >= 1


def test_ci_runs_make_test_with_nothing_left_for_another_day(checkout):
    stand_in(checkout / "bin" / "make", 'echo "make $@" && pwd && exit 7')
    done = call(checkout, ".ci/run")
    assert done.stdout == f"make test TODAY=all\n{checkout}\n" and done.returncode == 7


def test_make_test_runs_every_part_that_no_other_covers(checkout):
    said = call(checkout, "make", "-n", "test").stdout.splitlines()[-1].split()
    assert set(said[2:]) == {part.__name__ for part in run.PARTS} - {"quick", "mutants", "gpu"}
    said = call(checkout, "make", "-n", "test", "LESSON=07").stdout.splitlines()[-1].split()
    assert said[2:] == ["tests", "lessons"]


def test_requirements_pin_what_the_package_names():
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line.split("==")[0] for line in pins if "==" in line] == named
    assert [line for line in pins if "==" not in line and line[0] != "#"] == ["-e ."]
