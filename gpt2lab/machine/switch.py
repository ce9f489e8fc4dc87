"""What connects machines that are namespaces: a switch of Ethernet frames, each wire with a rate and a delay.

A program of its own, first process of a process namespace: when it ends, the kernel ends all that runs in the machines,
and takes their networks away. `namespaces.py` starts it with a description in JSON, and ends it by closing its input.

Frames are read from each machine's wire and wait until they would have passed it. So no module of the kernel is needed
that shapes traffic, and a firewall that drops packets without a word is one condition more.
"""

import ctypes
import heapq
import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
# bytes of the kernel's note before each frame, which says what is left to be done for its checksum
HEADER = 10
TCP = 6
ANY_PROTOCOL = 3  # ETH_P_ALL
READY = """read go
ip link set lo up
for card in 0 1; do ip addr add 10.7$((7 + card)).0.{0}/24 dev eth$card; ip link set eth$card up; done
exec "$@"
"""


def separate(number: int) -> None:
    """Give this process a network of its own, with nothing in it, and a name."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET | CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "no network of its own")
    socket.sethostname(f"machine{number}")


class EthernetSwitch:
    """Learns which machine has which address, and delivers frames at `rate` bits a second after `delay` seconds.

    A frame takes its turn on the sender's wire and on the receiver's. With `let_through`, only TCP packets from or to
    these ports pass; the others are lost.
    """

    def __init__(self, wires: list[socket.socket], rate: float, delay: float, let_through=None):
        self.wires, self.rate, self.delay = wires, rate, delay
        self.let_through = set(let_through) if let_through is not None else None
        self.homes: dict[bytes, socket.socket] = {}
        self.free: dict[tuple, float] = {}  # when a wire's direction is free again
        self.waiting, self.number = [], count()

    def carry(self, seconds: float) -> None:
        """Take and deliver frames for at most so long."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            while self.waiting and self.waiting[0][0] <= now:
                _, _, wire, frame = heapq.heappop(self.waiting)
                with suppress(OSError):  # that machine has ended
                    wire.send(frame)
            due = min(until, self.waiting[0][0]) if self.waiting else until
            for wire in select.select(self.wires, [], [], max(due - now, 0))[0]:
                with suppress(OSError):
                    self.take(wire, wire.recv(1 << 17))

    def take(self, source: socket.socket, frame: bytes) -> None:
        """A frame that has begun to leave its machine: when will it have arrived, and where?"""
        target, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self.homes[sender] = source
        if self.eaten(frame[HEADER + 12 :]):
            return
        seconds = 8 * (len(frame) - HEADER) / self.rate
        left = max(time.monotonic(), self.free.get(("out", source), 0.0)) + seconds
        self.free["out", source] = left
        home = self.homes.get(target)
        for wire in [home] if home else [w for w in self.wires if w is not source]:
            arrived = max(left, self.free.get(("in", wire), 0.0) + seconds)
            self.free["in", wire] = arrived
            heapq.heappush(self.waiting, (arrived + self.delay, next(self.number), wire, frame))

    def eaten(self, packet: bytes) -> bool:
        """Whether the firewall drops this packet, given from its protocol on."""
        if self.let_through is None or packet[:2] != b"\x08\x00" or packet[11] != TCP:
            return False
        start = 2 + 4 * (packet[2] & 15)
        ports = {int.from_bytes(packet[start + i : start + i + 2]) for i in (0, 2)}
        return not ports & self.let_through


def boot(number: int, command: list[str], env: dict, out: str | None) -> subprocess.Popen:
    """A machine: a process in a network of its own that becomes `command` once its cards are there."""
    script = ["sh", "-c", READY.format(number + 1), "sh", *command]
    to = open(out, "w") if out else None  # noqa: SIM115
    both = {"stdout": to, "stderr": to}
    return subprocess.Popen(
        script, stdin=subprocess.PIPE, env=os.environ | env, preexec_fn=lambda: separate(number), **both
    )


def plug_in(number: int, pid: int) -> socket.socket:
    """Machine `number`'s wires to the switch and to nowhere: eth0 and eth1; returns the switch's end of eth0."""
    for card in ("eth0", "eth1"):
        name = f"m{number}{card}"
        line = f"ip link add {name} type veth peer name {card} netns {pid}"
        for command in (line, f"ip link set {name} up"):
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"`{command}` failed: {done.stderr.strip()}")
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ANY_PROTOCOL))
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        wire.setsockopt(SOL_PACKET, option, 1)
    wire.bind((f"m{number}eth0", 0))
    return wire


def main(said: dict) -> int:
    """Run every machine's command to its end; returns the first status that is not 0."""
    machines = [boot(i, m["command"], m["env"], m["out"]) for i, m in enumerate(said["machines"])]
    wires = [plug_in(i, m.pid) for i, m in enumerate(machines)]
    switch = EthernetSwitch(wires, said["rate"], said["delay"], said["let_through"])
    for machine in machines:
        machine.stdin.write(b"go\n")
        machine.stdin.close()
    while any(machine.poll() is None for machine in machines):
        switch.carry(0.05)
        # closed: whoever started this has had enough, or has died
        if select.select([sys.stdin], [], [], 0)[0]:
            return 1
    return next((abs(m.returncode) for m in machines if m.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
