"""Guards in the code of ranks: without one of them, in a copy of the checkout, the test of a fault fails.

They are bugs by hand of `power/planted.toml`: in a process that runs already none of them could be planted.
"""

import shutil
import socket
from dataclasses import replace

import pytest
from power.killing import Copy
from power.mutate import planted

pytestmark = [pytest.mark.live, pytest.mark.timeout(250)]

GUARDS = (
    "ranks hear Ctrl-C",
    "a rank listens to the whole network",
    "gloo chooses the network",
    "others can read the private folder",
    "no report before the group is destroyed",
    "a full disk is not explained",
)


@pytest.fixture(scope="module")
def bugs():
    return {bug.kind: bug for bug in planted() if bug.kind in GUARDS}


@pytest.fixture(scope="module")
def copy():
    made = Copy()
    yield made
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.mark.parametrize("what", GUARDS)
def test_without_the_guard_its_test_fails(bugs, copy, what):
    if what == "gloo chooses the network" and {name for _, name in socket.if_nameindex()} <= {"lo", "lo0"}:
        pytest.skip("this machine has no network to choose but loopback")
    assert copy.try_out(bugs[what], [bugs[what].killer]) == ("killed", bugs[what].killer)


def test_with_all_guards_these_tests_pass_in_the_copy(bugs, copy):
    nothing = replace(bugs[GUARDS[0]], wrong=bugs[GUARDS[0]].right)
    assert copy.try_out(nothing, sorted({bug.killer for bug in bugs.values()})) == ("lives", "")
