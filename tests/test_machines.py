"""Two machines with a slow wire between them, for real: where tensor parallelism is placed decides what crosses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2lab import cli
from gpt2lab.commands import cluster, folders
from gpt2lab.lessons.labs import cluster as lab
from gpt2lab.lessons.labs.cluster import CONFIG, LENGTH, ROWS, STEPS, the_batch
from gpt2lab.machine import namespaces
from gpt2lab.machine.namespaces import Machine, Wire, running
from gpt2lab.plan import Plan, build
from gpt2lab.planner import tensor_costs
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.run import STOP, Options, read_log
from gpt2lab.storage import checkpoint
from gpt2lab.train import Trainer

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
TRAIN = "--batch 4 --sequence 8 --dtype float64 --sample 0 --steps 3 --evaluate 1000 --save 1000"
AT_ONCE = Wire()


@pytest.fixture(scope="module", autouse=True)
def permitted():
    """Skip where no networks can be made."""
    try:
        namespaces.check()
    except PermissionError as error:
        pytest.skip(str(error))


def finish(machines, wire=AT_ONCE, timeout=250, **more) -> str:
    """What the first machine wrote, when all have ended well."""
    out = more.pop("out")
    with running(
        [Machine(m.command, m.env, f"{out}{i}") for i, m in enumerate(machines)], wire, **more
    ) as all_of_them:
        status = all_of_them.wait(timeout)
    said = [Path(f"{out}{i}").read_text() for i in range(len(machines))]
    assert status == 0, "\n".join(words[-2000:] for words in said)
    return said[0]


@pytest.fixture(scope="module")
def found():
    """What four ranks saw in both placements."""
    return lab.two_placements()


def shard_bytes() -> int:
    """Bytes of the gradients of a tensor-parallel rank: half of every matrix that is cut, and what both hold whole."""
    c, layers = CONFIG.n_embd, CONFIG.n_layer
    cut = layers * (12 * c * c + 3 * c + 4 * c) + CONFIG.vocab_size * c
    whole = layers * (2 * c + 4 * c) + CONFIG.n_positions * c + 2 * c
    return 8 * (cut // 2 + whole)


def test_the_ranks_are_where_the_placement_says(found):
    assert {tuple(rank["machines"]) for rank in found["inside"]} == {(0, 0, 1, 1)}
    assert {tuple(rank["machines"]) for rank in found["across"]} == {(0, 1, 0, 1)}


def test_two_machines_train_as_one_process_does(found):
    from torch import float64

    alone = Trainer(build(Plan(), CONFIG, Mesh(), float64))
    serial = [alone.step(the_batch()).loss for _ in range(1 + STEPS)]
    for ranks in found.values():
        for rank in ranks:
            assert rank["losses"] == pytest.approx(serial, rel=1e-10)


def test_what_is_sent_to_the_other_machine_is_what_the_cost_model_says(found):
    shape = tensor_costs.Shape(ROWS // 2, LENGTH, CONFIG.n_embd, CONFIG.n_head, 2, 8)
    activations = sum(tensor_costs.step_bytes(shape, CONFIG.n_layer).values())
    for rank in found["inside"]:
        assert "tp" not in rank["crossing"] and rank["crossing"]["dp+cp"] == STEPS * shard_bytes()
    for rank in found["across"]:
        assert "dp+cp" not in rank["crossing"]
        assert STEPS * activations <= rank["crossing"]["tp"] < 1.01 * STEPS * activations  # norms come on top


def test_the_wire_carries_what_was_counted_and_far_less_with_tensor_parallelism_inside(found):
    carried = {}
    for place, ranks in found.items():
        for machine in (0, 1):
            here = [rank for i, rank in enumerate(ranks) if i // 2 == machine]
            counted = sum(sum(rank["crossing"].values()) for rank in here)
            carried[place] = max(rank["wire"] for rank in here)
            framed = 1.1 * counted + 20_000  # with frames and acknowledgements
            assert counted < carried[place] < framed, (place, machine)
    assert carried["across"] > 5 * carried["inside"]


def test_tensor_parallelism_inside_a_machine_beats_tensor_parallelism_across_as_the_cost_model_says(found):
    """The wire is limited, so a step cannot be faster than its price, and this stopwatch may be read."""
    seconds = {place: max(rank["seconds"] for rank in ranks) for place, ranks in found.items()}
    price = {place: max(rank["price"] for rank in ranks) for place, ranks in found.items()}
    for place in found:
        print(
            f"tensor parallel {place}: {seconds[place]:.2f} s a step, of which the wire {price[place]:.2f} s"
        )
        assert seconds[place] > 0.9 * price[place] - 0.01, "the wire was not limited"
    assert price["across"] > 5 * price["inside"]
    assert seconds["across"] > seconds["inside"]


def test_the_record_of_both_placements_has_the_same_losses_and_counts_as_a_live_run(found):
    for place, ranks in lab.record("placements").items():
        for mine, live in zip(ranks, found[place], strict=True):
            assert mine["crossing"] == live["crossing"] and mine["machines"] == live["machines"]
            assert mine["losses"] == pytest.approx(live["losses"], rel=1e-10)


def test_every_mistake_of_the_table_is_made_and_seen_as_the_table_says():
    """Twice at most: where a machine is very busy, a rank's patience of a second or two can end too early."""
    known = lab.record("mistakes")
    assert lab.all_mistakes() == known or lab.all_mistakes() == known


@pytest.mark.slow
def test_the_cluster_command_on_two_machines_equals_a_serial_run(tmp_path):
    ours = [sys.executable, "-m", "gpt2lab"]
    subprocess.run(
        [*ours, "train", *TRAIN.split(), "--out", tmp_path / "alone"], check=True, capture_output=True
    )
    plan = ["train", *TRAIN.split(), "--plan", "pp=2,tp=2,micro=2", "--out", str(tmp_path / "two")]
    cluster = [*ours, "cluster", "--machines", "2x2", "--wire", "1gbit,0.1ms", "--", *plan]
    done = subprocess.run(cluster, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "machine 1: torchrun --nnodes 2 --nproc-per-node 2 --node-rank 1" in done.stdout
    losses = {
        name: [e["loss"] for e in read_log(next((tmp_path / name).iterdir()))] for name in ("alone", "two")
    }
    assert len(losses["two"]) == 3 and losses["two"] == pytest.approx(losses["alone"], rel=1e-10)


TALKS = """
import socket, sys, time
if sys.argv[1] == "hears":
    with socket.create_server(("10.77.0.1", 5000)) as door:
        there, _ = door.accept()
        while there.recv(1 << 16):
            pass
        there.send(b"all")
else:
    for _ in range(500):
        try:
            there = socket.create_connection(("10.77.0.1", 5000))
            break
        except OSError:
            time.sleep(0.01)
    begin = time.perf_counter()
    there.sendall(bytes(int(sys.argv[2])))
    there.shutdown(socket.SHUT_WR)
    assert there.recv(3) == b"all"
    print(time.perf_counter() - begin)
"""


@pytest.mark.parametrize("way", namespaces.WAYS)
@pytest.mark.parametrize(("wire", "size", "least"), [("8mbit,0ms", 250_000, 0.25), ("1gbit,40ms", 1, 0.08)])
def test_a_wire_has_its_rate_and_its_delay(way, wire, size, least, tmp_path):
    """A wire is never faster than it says; how much slower it is depends on how busy this machine is."""
    if way in namespaces.refused():
        pytest.skip(namespaces.refused()[way])
    pair = [Machine([sys.executable, "-c", TALKS, *words]) for words in (("hears",), ("sends", str(size)))]
    finish(pair, Wire.parse(wire), out=tmp_path / "said", way=way)
    assert least <= float((tmp_path / "said1").read_text()) < 20


DOORS = """
import socket
doors = [socket.create_server(("10.77.0.1", port)) for port in (5000, 5001)]
guests = [doors[0].accept() for _ in range(2)]
"""
KNOCKS = """
import socket, sys, time

def knock(port, seconds):
    try:
        socket.create_connection(("10.77.0.1", port), timeout=seconds)
        return "came"
    except TimeoutError:
        return "no answer"
    except OSError:  # the doors are not there yet
        time.sleep(0.02)
        return knock(port, seconds)

if sys.argv[1] == "5001":
    print(knock(5001, 1.5))
print(knock(5000, 30))
"""


def test_three_machines_are_on_one_switch_and_what_a_firewall_eats_never_arrives(tmp_path):
    commands = [["-c", DOORS], ["-c", KNOCKS, "5000"], ["-c", KNOCKS, "5001"]]
    finish([Machine([sys.executable, *c]) for c in commands], out=tmp_path / "said", let_through=[5000])
    assert (tmp_path / "said1").read_text() == "came\n"
    assert (tmp_path / "said2").read_text() == "no answer\ncame\n"


def test_what_a_machine_has_sent_is_counted(tmp_path):
    count = "from gpt2lab.machine.namespaces import sent; print(sent() < 5000)"
    assert finish([Machine([sys.executable, "-c", count])], out=tmp_path / "said") == "True\n"


SLEEPER = "gpt2lab-sleeps-in-a-machine"


def sleepers() -> list[str]:
    """Processes of this test that are alive."""
    found = subprocess.run(["pgrep", "-f", f"{SLEEPER}-{os.getpid()}"], capture_output=True, text=True)
    return found.stdout.split()


def sleeping() -> list[Machine]:
    return [Machine(["sh", "-c", f"sleep 1000; : {SLEEPER}-{os.getpid()}"])] * 2


def wait_until(there: bool) -> None:
    until = time.monotonic() + 30
    while bool(sleepers()) != there and time.monotonic() < until:
        time.sleep(0.02)
    assert bool(sleepers()) == there


@pytest.mark.parametrize("how", ["raises", "is interrupted", "is killed"])
def test_nothing_is_left_of_machines_whose_owner(how):
    """A fault in the block, Ctrl-C, kill -9: the kernel ends what lives in the namespaces, which have no name."""
    links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    if how == "raises":
        with pytest.raises(ZeroDivisionError), running(sleeping()):
            wait_until(True)
            raise ZeroDivisionError
    else:
        owner = "from gpt2lab.machine.namespaces import *; import sys\n"
        owner += f"with running([Machine({sleeping()[0].command})] * 2) as m: m.wait()"
        process = subprocess.Popen([sys.executable, "-c", owner], stderr=subprocess.DEVNULL)
        wait_until(True)
        process.send_signal(signal.SIGINT if how == "is interrupted" else signal.SIGKILL)
        process.wait(30)
    wait_until(False)
    assert subprocess.run(["ip", "link"], capture_output=True, text=True).stdout == links


def test_ctrl_c_ends_a_run_on_machines_with_its_newest_step_saved(tmp_path):
    train = "train --plan dp=2 --steps 100000 --batch 2 --sequence 8 --no-fast --out"
    command = [sys.executable, "-m", "gpt2lab", "cluster", "--machines", "2x1", "--wire", "10gbit", "--"]
    command += [*train.split(), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout:
            if "step 10:" in line:
                break
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=100)[0]
    finally:
        process.kill()
        process.wait()
    (run,) = tmp_path.glob("*")
    step = checkpoint.read_state(checkpoint.all_in(run)[-1])["step"]
    assert process.returncode == 0 and f"Stopped by SIGINT: saved step {step}." in said, said


@pytest.mark.parametrize("resumed", [False, True])
def test_ctrl_c_ends_no_run_of_others(resumed, tmp_path):
    """All that was new among the runs was asked to end; beside something new, a resumed run was not."""
    old = folders.new(Options(), tmp_path)
    with cluster._saved_at_a_signal([old] * resumed, tmp_path, "ours"):
        new, other = (folders.new(Options(), tmp_path, job) for job in ("ours", "theirs"))
        (tmp_path / "notes").touch()
        signal.raise_signal(signal.SIGINT)
    assert [(run / STOP).exists() for run in (old, new, other)] == [resumed, not resumed, False]


def test_where_networks_are_refused_both_ways_are_named_with_the_ways_out(monkeypatch, capsys):
    monkeypatch.setattr(
        namespaces, "refused", lambda: dict.fromkeys(namespaces.WAYS, "Operation not permitted")
    )
    assert cli.main(["cluster", "--", "train", "--plan", "dp=2,tp=2"]) == 2
    said = capsys.readouterr().err
    assert "(as this user: Operation not permitted; in a user namespace: Operation not permitted)" in said
    assert "Run this as root; or allow user namespaces: sysctl" in said
