"""The folder for students, and the wheel with which it runs where there is no checkout."""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gpt2lab import cli
from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.lessons.source import BLANK

ROOT = Path(__file__).parents[1]


def test_a_handout_holds_the_students_notebooks_and_a_page_with_blank_dates(tmp_path, capsys):
    folder = tmp_path / "week 3"
    assert cli.main(["handout", "04", "07", "--to", str(folder)]) == 0
    files = ["04_data_parallel.ipynb", "07_pipeline.ipynb", "README.md"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [files[2], *files[:2]]
    page = (folder / "README.md").read_text()
    assert "gpt2lab-*.whl" in page
    for lesson in lessons_named(NOTEBOOKS, ["04", "07"]):
        cells = {cell.id: cell for cell in nbformat.read(folder / f"{lesson.name}.ipynb", 4).cells}
        tasks = [cell for cell in lesson.cells if "exercise" in cell.tags]
        assert f"| [{lesson.name}]({lesson.name}.ipynb) | {len(tasks)} | | |" in page
        assert tasks and all(BLANK in cells[cell.id].source for cell in tasks)
        assert not any(cell.solved() in cells[cell.id].source for cell in tasks)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["99", "--to", "{tmp}/new"], "no lesson starts with '99'"),
        (["04", "--to", "{tmp}"], "is there already. Take a new folder"),
        (["04", "--to", "{tmp}/new", "--notebooks", "{tmp}"], "There are no lessons in"),
    ],
)
def test_a_handout_that_cannot_be_is_refused_and_nothing_is_written(arguments, words, tmp_path, capsys):
    (tmp_path / "04_data_parallel.ipynb").write_text("hours of work")
    assert cli.main(["handout", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "04_data_parallel.ipynb").read_text() == "hours of work"
    assert not list(tmp_path.rglob("README.md"))


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def checkout(folder):
    """A copy of all that is installed."""
    shutil.copytree(ROOT / "gpt2lab", folder / "gpt2lab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def called(*words, folder="/"):
    """What a command prints, outside of any checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(home, *what):
    """The Python of a new environment with this; torch and the other requirements are those of this one."""
    called(sys.executable, "-m", "venv", "--without-pip", home / "env")
    python = home / "env" / "bin" / "python"
    (packages,) = (home / "env").glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    options = "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"
    called(*PIP, "--python", python, "install", *options, *what)
    return python


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A new environment with gpt2lab from a wheel."""
    home = tmp_path_factory.mktemp("fresh")
    called(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", home, checkout(home / "tree"))
    python = installed(home, *home.glob("gpt2lab-*.whl"))
    torchrun = python.with_name("torchrun")  # as pip would have installed it with torch
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    shutil.rmtree(home / "tree")
    return python


@pytest.mark.rotates
def test_the_wheel_brings_the_texts_and_the_command(fresh, tmp_path):
    text = "import gpt2lab.corpus as c; print(c.shakespeare()[:4], c.encoding().encode('ROMEO'), c.__file__)"
    found = called(fresh, "-c", text, folder=tmp_path)
    assert str(fresh.parent.parent) in found and "[33676, 4720]" in found
    assert "handout" in called(fresh, fresh.parent / "gpt2lab", "--help", folder=tmp_path)


@pytest.mark.rotates
def test_every_file_of_the_package_that_is_no_program_is_in_the_wheel(fresh):
    (there,) = fresh.parents[1].glob("lib/python*/site-packages/gpt2lab")
    files = [path.relative_to(ROOT / "gpt2lab") for path in ROOT.glob("gpt2lab/**/*") if path.is_file()]
    assert not [file for file in files if file.suffix != ".pyc" and not (there / file).exists()]


SETTINGS = "import jupyterlab_server.settings_utils as s; print(s._get_overrides('nowhere')[0])"


@pytest.mark.rotates
def test_where_the_wheel_is_installed_no_news_pops_up_in_the_lab(fresh, tmp_path):
    assert "'fetchNews': 'false'" in called(fresh, "-c", SETTINGS, folder=tmp_path)


@pytest.mark.rotates
def test_nor_where_a_checkout_is_installed_by_hand(tmp_path):
    """`pip install -r requirements.txt`, which says `-e .`, and `jupyter lab` with nothing set."""
    assert "\n-e .\n" in (ROOT / "requirements.txt").read_text()
    python = installed(tmp_path, "-e", checkout(tmp_path / "tree"))
    assert "'fetchNews': 'false'" in called(python, "-c", SETTINGS, folder=tmp_path)


@pytest.mark.rotates
def test_the_readmes_cell_for_colab_installs_the_wheel_where_there_is_no_git(fresh, tmp_path):
    """The cell as it stands, `%pip` too, in an environment that has PyTorch and no gpt2lab; then lesson 00 begins."""
    readme = (ROOT / "README.md").read_text()
    cell = readme.split("<!-- colab -->\n```python\n")[1].split("```")[0]
    (wheel,) = fresh.parents[2].glob("gpt2lab-*.whl")
    assert f" {wheel.name}\n" in cell
    shutil.copy(wheel, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for folder in site.getsitepackages():
        for one in Path(folder).iterdir():
            if "gpt2lab" not in one.name and not (packages / one.name).exists():
                (packages / one.name).symlink_to(one)
    lesson = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", 4)
    first = [c.source for c in lesson.cells if c.cell_type == "code"][:3]
    env = {"PATH": str(tmp_path / "env/bin"), "HOME": str(tmp_path)}
    env |= {"GPT2LAB_STATIC": "1", "MPLBACKEND": "agg"}
    words = [tmp_path / "env/bin/python", "-m", "IPython", "--colors=NoColor", "-c"]
    where = "import gpt2lab, shutil\nprint(gpt2lab.__file__, shutil.which('git'))"
    done = subprocess.run(
        [*words, "\n".join([cell, where, *first])], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert all(f"hello from {rank} of 4" in done.stdout for rank in range(4))
    assert f"{packages}/gpt2lab/__init__.py None" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lesson", ["00", "04", "07"])
def test_a_handout_runs_from_its_folder_with_the_wheel(fresh, lesson, tmp_path):
    cli.main(["handout", lesson, "--to", str(tmp_path / "class")])
    (file,) = (tmp_path / "class").glob("*.ipynb")
    program = f"""
import nbformat, nbclient
notebook = nbformat.read({str(file)!r}, 4)
nbclient.NotebookClient(notebook, timeout=120).execute(cwd={str(file.parent)!r})
nbformat.write(notebook, "ran.ipynb")
"""
    called(fresh, "-c", program, folder=tmp_path)
    cells = json.loads((tmp_path / "ran.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert sum("TODO" in "".join(o.get("text", "")) for o in outputs) >= 4
