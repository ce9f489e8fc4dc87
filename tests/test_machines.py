"""Two machines with a slow wire between them, for real: where tensor parallelism is placed decides what crosses."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from machine_rank import CONFIG, LENGTH, ROWS, STEPS, batch
from machines import BITS_PER_SECOND, BURST, processes, read, torchrun, two_machines

from gpt2lab.parallel import tensor_costs
from gpt2lab.plan import Plan, build
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.run import read_log
from gpt2lab.train import Trainer

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
RANK = Path(__file__).with_name("machine_rank.py")


@pytest.fixture(scope="module")
def machines():
    """Two network namespaces, as long as this file's tests run."""
    with two_machines() as names:
        yield names


@pytest.fixture(scope="module")
def found(machines, tmp_path_factory):
    """What four ranks saw in both placements."""
    folder = tmp_path_factory.mktemp("machines")
    torchrun(machines, [RANK, folder], timeout=200)
    return {place: [rank[place] for rank in read(folder)] for place in ("inside", "across")}


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
    serial = [alone.step(batch()).loss for _ in range(1 + STEPS)]
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
        assert seconds[place] > 0.9 * price[place] - BURST / (BITS_PER_SECOND / 8), "the wire was not limited"
    assert price["across"] > 5 * price["inside"]
    assert seconds["across"] > seconds["inside"]


@pytest.mark.slow
def test_the_training_command_on_two_machines_equals_a_serial_run(machines, tmp_path):
    train = [
        "train",
        "--batch",
        "4",
        "--sequence",
        "8",
        "--dtype",
        "float64",
        "--sample",
        "0",
        "--steps",
        "3",
    ]
    train += ["--evaluate", "1000", "--save", "1000"]
    alone = [sys.executable, "-m", "gpt2lab", *train, "--out", tmp_path / "alone"]
    subprocess.run(alone, check=True, capture_output=True, timeout=200)
    plan = ["--plan", "pp=2,tp=2,micro=2", "--out", tmp_path / "two"]
    torchrun(machines, ["-m", "gpt2lab", *train, *plan], timeout=250, port=29512)
    losses = {
        name: [e["loss"] for e in read_log(next((tmp_path / name).iterdir()))] for name in ("alone", "two")
    }
    assert len(losses["two"]) == 3 and losses["two"] == pytest.approx(losses["alone"], rel=1e-10)


def test_nothing_is_left_of_machines_in_which_something_failed():
    left = []
    with pytest.raises(ZeroDivisionError), two_machines() as names:
        left += names
        sleeper = subprocess.Popen(["ip", "netns", "exec", names[1], "sleep", "1000"])
        while not processes(names[1]):
            time.sleep(0.01)
        raise ZeroDivisionError
    assert left and sleeper.wait(timeout=10) < 0
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not [name for name in left if name in listed]
