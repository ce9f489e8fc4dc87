"""`make` says in one sentence what is missing, and the parts of the test run report and fail as they should."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with nothing but what make reads, and a folder of commands that stand in for the real ones."""
    for name in (
        "Makefile",
        "requirements.txt",
        "requirements-dev.txt",
        "pyproject.toml",
        "tests/parts.sh",
        ".ci/run",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def stand_in(path: Path, script: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def call(checkout, *command, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=checkout, env=os.environ | {"PATH": path} | env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "script, sentence",
    [
        (None, "There is no some-python: install Python 3.11 or newer"),
        (
            '[[ "$*" == *version_info* ]] && exit 1; echo Python 3.9.2',
            "Python 3.9.2 is too old: gpt2lab needs",
        ),
        (
            '[[ "$*" == *ensurepip* ]] && exit 1; exit 0',
            "cannot make virtual environments: install its venv module",
        ),
    ],
)
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
    assert "pip install --quiet -r requirements.txt -e ." in first
    assert "jupyter lab --ip=127.0.0.1 --port=9000" in first and first.rstrip().endswith("--debug")
    (checkout / "calls").unlink()
    call(checkout, "make", "lab")
    (second,) = (checkout / "calls").read_text().splitlines()
    assert (
        second.startswith("jupyter lab")
        and "notebooks/00_start_here.ipynb" in second
        and "token" not in second
    )


def test_a_changed_requirement_is_installed(checkout):
    for name in ("python", "pip", "jupyter"):
        stand_in(checkout / ".venv" / "bin" / name, f'echo {name} "$@" >> calls')
    call(checkout, "make", "lab")
    later = (checkout / ".venv" / "lab.stamp").stat().st_mtime + 10
    os.utime(checkout / "requirements.txt", (later, later))
    (checkout / "calls").unlink()
    call(checkout, "make", "lab")
    assert "pip install" in (checkout / "calls").read_text()


def test_without_a_display_lab_still_serves(checkout):
    stand_in(checkout / "bin" / "uname", "echo Linux")
    line = call(checkout, "make", "-n", "lab", DISPLAY="", WAYLAND_DISPLAY="").stdout
    assert "--no-browser" in line
    assert "--no-browser" not in call(checkout, "make", "-n", "lab", DISPLAY=":0").stdout
    assert ("--allow-root" in line) == (os.getuid() == 0)


def test_help_lists_every_target(checkout):
    lines = call(checkout, "make").stdout
    for target in (
        "lab",
        "test",
        "test-quick",
        "test-all",
        "test-gpu",
        "notebooks",
        "figures",
        "mutants",
        "site",
        "wheel",
        "help",
    ):
        assert f"make {target} " in lines


def test_parts_say_how_long_they_took_and_fail_when_one_fails(checkout):
    stand_in(
        checkout / ".venv" / "bin" / "pytest",
        '[[ "$*" == *"-m mutant"* ]] && exit 1; echo 3 passed',
    )
    stand_in(checkout / ".venv" / "bin" / "ruff", "exit 0")
    done = call(checkout, "tests/parts.sh", "unit")
    assert done.returncode == 0 and "3 passed" in done.stdout and "unit" in done.stdout.splitlines()[-2]
    done = call(checkout, "tests/parts.sh", "mutants", "browser")
    assert done.returncode == 1 and "Failed: mutants" in done.stdout
    report = [line.split() for line in done.stdout.splitlines() if " s " in line]
    assert [(words[0], words[-1]) for words in report] == [("mutants", "FAILED"), ("browser", "ok")]


def test_parts_side_by_side_are_all_told_and_one_that_fails_fails_all(checkout):
    stand_in(
        checkout / ".venv" / "bin" / "pytest",
        'case "$*" in *"-m mutant"*) touch second; exit 1;; esac\n'
        "for i in {1..100}; do [ -e second ] && break; sleep 0.1; done; [ -e second ] && echo together",
    )
    done = call(checkout, "tests/parts.sh", "unit,live+mutants", "browser")
    assert done.returncode == 1 and "Failed: mutants" in done.stdout and "together" in done.stdout
    report = [line.split() for line in done.stdout.splitlines() if " s " in line]
    told = [("unit", "ok"), ("live", "ok"), ("mutants", "FAILED"), ("browser", "ok")]
    assert [(words[0], words[-1]) for words in report] == told


def test_ci_runs_exactly_make_test(checkout):
    stand_in(checkout / "bin" / "make", 'echo "make $@" && pwd && exit 7')
    done = call(checkout, ".ci/run")
    assert done.stdout == f"make test\n{checkout}\n" and done.returncode == 7


def test_a_part_over_its_budget_says_so_and_the_slowest_tests_are_told(checkout):
    parts = checkout / "tests/parts.sh"
    parts.write_text(parts.read_text().replace("[unit]=150", "[unit]=0"))
    stand_in(
        checkout / ".venv" / "bin" / "pytest",
        'sleep 1.2; for i in {1..12}; do echo "$i s  t$i" >>$TEST_SECONDS; done',
    )
    said = call(checkout, "tests/parts.sh", "unit", "mutants")
    lines = said.stdout.splitlines()
    assert said.returncode == 0
    assert [line.split()[3:] for line in lines if line.startswith("  unit")] == [
        ["over", "its", "budget", "of", "0", "s", "ok"]
    ]
    assert [line.split()[3:] for line in lines if line.startswith("  mutants")] == [["ok"]]
    slowest = lines[lines.index("The slowest tests of all:") + 1 :][:10]
    assert [line.split()[0] for line in slowest] == ["12", "12", "11", "11", "10", "10", "9", "9", "8", "8"]


def test_whatever_shows_a_strategy_equal_to_serial_runs_over_gloo_too_in_make_test_all():
    part = (ROOT / "tests/parts.sh").read_text().split("\ngloo() {")[1].split("\n}")[0]
    shows = re.compile(r"^def test_\w*(?:equal|serial)\w*\(pools\b", re.MULTILINE)
    files = [path for path in (ROOT / "tests").glob("test_*.py") if shows.search(path.read_text())]
    assert len(files) > 6
    assert not [path.name for path in files if f"tests/{path.name}" not in part]
