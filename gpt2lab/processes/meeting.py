"""Ranks of several machines before their first call: who is here, with which versions, and who can reach whom?

Each rank tells the store where it listens. Rank 0 looks whether all have come and are alike, and tells all of them what
it found; then each calls its next neighbour through the network card that messages will take. So what is wrong with a
cluster is said at once, by name, where a library would wait and then show an address.
"""

import errno
import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

CARD = "GLOO_SOCKET_IFNAME"
PATIENCE = 10.0  # seconds in which a rank that is there must answer the one before it


def open_store(here, address: str, port: int, timeout: float) -> dist.Store:
    """The job's store, kept by rank 0 or by torchrun. Raises TimeoutError where nobody answers at its address."""
    keeps = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not keeps:
        why = _knock(address, port, timeout)
        if why:
            raise TimeoutError(
                f"rank {here.rank} on {platform.node()} waited {timeout:g} s at {address}:{port}, and no rank 0 "
                f"answered ({why}). Is MASTER_ADDR the first machine, has it started, and does its firewall let this "
                "port through? --timeout allows more time."
            )
    store = dist.TCPStore(
        address, port, None, keeps, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
    )
    # torchrun keeps its store, with what dead ranks said, through a restart: so each start has its own prefix
    return dist.PrefixStore(f"start {here.restarts}", store)


def _knock(address: str, port: int, timeout: float) -> str:
    """Why nobody answers there until the time is over; empty when somebody does."""
    until, why = time.monotonic() + timeout, "no time"
    while (left := until - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
            return ""
        except OSError as error:
            silent = isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH
            why = "no answer" if silent else error.strerror
            time.sleep(min(0.05, left))
    return why


def meet_all(store: dist.Store, here, address: str, timeout: float) -> None:
    """Wait until all ranks are here, alike, and able to reach their next one; every rank raises the same error.

    Raises TimeoutError with the ranks that did not come, ValueError where versions differ or a network card is not
    there, ConnectionError where ranks do not reach the next one.
    """
    said = {"host": platform.node(), "versions": versions()}
    try:
        mine = own_address(address)
    except ValueError as error:
        mine, said["wrong"] = "127.0.0.1", f"rank {here.rank}: {error}"
    with socket.create_server((mine, 0), backlog=64) as door:
        store.set(f"rank {here.rank}", json.dumps(said | {"address": mine, "port": door.getsockname()[1]}))
        _agree(store, here, "who came", timeout, _who_came)
        store.set(f"from {here.rank}", _reached(store, here, min(timeout, PATIENCE)))
        _agree(store, here, "who is reached", timeout, _who_is_reached)


def _agree(store: dist.Store, here, what: str, timeout: float, judge) -> None:
    """Let rank 0 judge for all; raise what it found. It leaves last, because the store may end with it."""
    store.set_timeout(timedelta(seconds=timeout + 10 * (here.rank > 0)))
    if here.rank == 0:
        store.set(what, json.dumps(judge(store, here.world_size, timeout)))
    try:
        kind, sentence = json.loads(store.get(what))
    except RuntimeError as error:
        raise TimeoutError(f"rank {here.rank} lost rank 0 before all had come: see its output.") from error
    if not kind:
        return
    store.set(f"heard {here.rank}", "")
    if here.rank == 0:
        came = [rank for rank in range(here.world_size) if store.check([f"rank {rank}"])]
        with suppress(RuntimeError):
            store.wait([f"heard {rank}" for rank in came], timedelta(seconds=5))
    raise {"TimeoutError": TimeoutError, "ValueError": ValueError, "ConnectionError": ConnectionError}[kind](
        sentence
    )


def _who_came(store: dist.Store, count: int, timeout: float) -> tuple[str, str]:
    """The kind of error and a sentence; empty when all have come and are alike."""
    names = [f"rank {rank}" for rank in range(count)]
    with suppress(RuntimeError):
        store.wait(names)
    missing = [rank for rank, name in enumerate(names) if not store.check([name])]
    if missing:
        return "TimeoutError", (
            f"{ranks_in_words(missing)} of {count} did not come within {timeout:g} s. Look there for a program that "
            "could not start, or allow more time with --timeout."
        )
    said = [json.loads(store.get(name)) for name in names]
    wrong = next((one["wrong"] for one in said if "wrong" in one), None)
    if wrong:
        return "ValueError", wrong
    for what, first in said[0]["versions"].items():
        for rank, one in enumerate(said):
            if one["versions"][what] != first:
                return "ValueError", (
                    f"{what}: {one['versions'][what]} for rank {rank} on {one['host']}, but {first} for rank 0 on "
                    f"{said[0]['host']}. Install the same on all machines."
                )
    return "", ""


def _reached(store: dist.Store, here, timeout: float) -> str:
    """Why this rank does not reach the next one; empty when it does."""
    following = (here.rank + 1) % here.world_size
    other = json.loads(store.get(f"rank {following}"))
    why = _knock(other["address"], other["port"], timeout)
    return why and (
        f"rank {here.rank} on {platform.node()} does not reach rank {following} on {other['host']} at "
        f"{other['address']} ({why})"
    )


def _who_is_reached(store: dist.Store, count: int, timeout: float) -> tuple[str, str]:
    """The kind of error and a sentence; empty when every rank reaches the next one."""
    store.set_timeout(timedelta(seconds=timeout + 10))
    whys = [why for rank in range(count) if (why := store.get(f"from {rank}").decode())]
    more = f" (and {len(whys) - 1} more)" if len(whys) > 1 else ""
    return ("ConnectionError" if whys else ""), (
        f"{whys[0]}{more}. Name the network card that leads to the other machines in {CARD}, and let their firewalls "
        "pass all that comes from each other." if whys else ""
    )  # fmt: skip


def versions() -> dict[str, str]:
    """What must be the same on all machines."""
    from ..machine.checksum import sources

    python = ".".join(map(str, sys.version_info[:2]))
    return {"Python": python, "torch": torch.__version__, "gpt2lab's files": sources()[:8]}


def ranks_in_words(ranks: list[int]) -> str:
    """Such as `rank 3` or `ranks 4 to 7, 9`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def own_address(towards: str) -> str:
    """The address of the first network card named in the environment; without one, name that which leads `towards`.

    Raises ValueError where there is no card of one of these names, which commas separate.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        asks.connect((towards, 9))  # sends nothing
        mine = asks.getsockname()[0]
    found = cards()
    leads = [name for name, address in found.items() if address == mine]
    said = os.environ.setdefault(CARD, leads[0]) if leads else os.environ.get(CARD, "")
    named = [card for card in said.split(",") if card]
    if found and (missing := [card for card in named if card not in found]):
        raise ValueError(
            f"{CARD}={said}, but {platform.node()} has no network card {missing[0]} with an address. It has "
            f"{', '.join(f'{name} ({address})' for name, address in found.items())}."
        )
    return found.get(named[0], mine) if named else mine


def cards() -> dict[str, str]:
    """This machine's network cards that have an IPv4 address, each with its first."""
    import psutil

    said = psutil.net_if_addrs().items()
    return {name: a.address for name, those in said for a in reversed(those) if a.family == socket.AF_INET}
