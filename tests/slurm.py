"""Slurm on one machine, for a test: its own key, its own ports, its own folder. Linux, as root."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time

import pytest

CONF = """
ClusterName=gpt2lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={worker}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, all different: below those that systems give to connections."""
    found = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            found.append(port)
    return found


@contextlib.contextmanager
def slurm(folder):
    """The environment in which `srun` finds a cluster of this one machine; skips where there can be none."""
    for tool in ("munged", "slurmctld", "slurmd", "srun"):
        if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"):
            pytest.skip(f"there is no {tool} here (Debian: apt-get install slurm-wlm munge)")
    if os.geteuid():
        pytest.skip("only root can start slurmd")
    controller, worker = free_ports(2)
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, folder=folder, controller=controller, worker=worker)
    )
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with contextlib.ExitStack() as stack:
        munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key"]
        munged += [
            f"--{kind}={folder}/munge.{kind}" for kind in ("socket", "pid-file", "log-file", "seed-file")
        ]
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            stack.enter_context(_daemon(command, env, folder / f"{command[0]}.out"))
        _wait_for_an_idle_machine(env)
        yield env


@contextlib.contextmanager
def _daemon(command: list[str], env, log):
    """A program that runs as long as the block."""
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=20)


def _wait_for_an_idle_machine(env, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True)
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    pytest.fail(f"Slurm did not come up within {seconds:.0f} s: {found.stdout} {found.stderr}")
