"""What works where: each row of README's table that can be tried on Linux, by taking the thing away."""

import re
import sys
from pathlib import Path

import pytest
from test_surroundings import private_mounts, told

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces and /proc"),
]
README = (Path(__file__).parents[2] / "README.md").read_text()
ROWS = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", README.split("<!-- places -->")[1].split("<!-- end -->")[0], re.M
)[2:]

PROVE = """
import torch.distributed as dist
from gpt2lab import launch, transport
from gpt2lab.verify import verify
print("equal:", verify("dp=2", depth="gradients").ok, "over", *set(launch(lambda *_: dist.get_backend(), ranks=2)))
"""
"""What must work everywhere: a plan on live ranks, equal to the serial run."""
NO_SHARED_MEMORY = """
import os, subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=1777", "none", "/dev/shm"], check=True)
del os.memfd_create
"""
NO_FORKSERVER = """
import multiprocessing
multiprocessing.get_all_start_methods = lambda: ["spawn"]
"""
NO_NAMESPACES = """
from pathlib import Path
for kind in ("user", "net", "mnt", "pid"):
    Path(f"/proc/sys/user/max_{kind}_namespaces").write_text("0")
from gpt2lab import cli
from gpt2lab.classroom import sandbox
print("cut off:", sandbox.isolated(), "|", sandbox.sentence())
print("cluster:", cli.main(["cluster", "--machines", "2x1", "--", "train", "--plan", "dp=2"]))
"""


def one_core(tmp_path):
    first = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(len(os.sched_getaffinity(0)))"
    said = told(first + PROVE, tmp_path)
    assert said.split("\n", 1)[0] == "1" and "equal: True over shm" in said


def no_shared_memory(tmp_path):
    assert "equal: True over gloo" in told(NO_SHARED_MEMORY + PROVE, tmp_path, private_mounts())


def no_forkserver(tmp_path):
    assert "equal: True over shm" in told(NO_FORKSERVER + PROVE, tmp_path)


def no_namespaces(tmp_path):
    said = told(NO_NAMESPACES + PROVE, tmp_path, ["unshare", "-r"])
    assert "cut off: False" in said and "could use the network" in said
    assert "cluster: 2" in said and "Run this as root; or allow user namespaces" in said
    assert "equal: True over shm" in said


TRIED = {
    "one core": one_core,
    "no memory that ranks can share": no_shared_memory,
    "no forkserver": no_forkserver,
    "no user namespaces": no_namespaces,
}


@pytest.mark.parametrize("place", TRIED)
def test_what_works_where_something_is_missing(place, tmp_path):
    TRIED[place](tmp_path)


def test_every_row_of_the_readme_is_tried_or_says_that_it_is_not():
    """Linux itself is where all tests run."""
    told = {place for place, how in ROWS if "a test" in how}
    assert told == {*TRIED}
    assert {place for place, how in ROWS if "not tried" in how} == {"macOS", "Windows, in WSL2"}
    assert {place for place, _ in ROWS} - told == {"Linux", "macOS", "Windows, in WSL2", "2 cores, 8 GB"}
