"""Bugs planted in the shared-memory transport: the checks of `transport_edges` notice each of them."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transport_edges as edges
from planting import bugs, rewritten
from transport_cases import check
from transport_edges import RANKS, examine

from gpt2lab import Ranks, transport
from gpt2lab.transport import engine, group, kinds, memory, moves, semaphores, stream

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not transport.AVAILABLE, reason="this system has no semaphores in shared memory"),
]


def given_back_early(right):
    """A reader that frees the slot of a delivery, and reads it a moment later."""

    def following(self, size, kind):
        there = yield from right(self, size, kind)
        type(self).release(self)
        time.sleep(0.01)
        self.release = lambda: None
        return there

    return following


def every_call(group, rank, keys):
    """The ordinary checks of calls, on two ranks and on three, some of many slots."""
    for line in (range(RANKS), (0, 1)):
        group = dist.new_group(line, timeout=timedelta(seconds=2 if keys.bug else 60))
        for dtype in (torch.float64, torch.uint8, torch.bfloat16) if rank in line else ():
            for size in (7, 600_001 if dtype is torch.float64 else 5_001):
                for name in check(group, line, size, dtype):
                    yield name, torch.tensor(False), torch.tensor(True)


def cuts_what_it_should_round(right):
    """The lower half of a float32 away: a bfloat16, but never the next larger one."""
    cut = lambda x: (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return right | {"SUM": lambda a, b, out: out.copy_(cut(a.float() + b.float()))}


BUGS = {
    "a chunk is a number longer than its slot":
        (moves._chunks, "x.split(size // x.element_size())", "x.split(size + 1)", edges.lengths_at_the_limits),
    "a part of a sum is read at its sender's place":
        (moves._reduce_then_share, "like(mine, starts[ends.rank])", "like(mine, starts[peer])",
         edges.lengths_at_the_limits),
    "places in a later round count from the whole tensor":
        (moves._reduce_then_share, " - x.storage_offset()", "", edges.lengths_at_the_limits),
    "a part of a sum is as long as its slot, whatever is in it":
        (moves.reduce_scatter, "sum(row.numel() for row in rows) * width", "ends.out.size",
         edges.parts_of_another_length_are_refused),
    "views of a slot are remembered without their place":
        (stream.Slot.like, "key = (x.numel(), x.dtype, at)", "key = (x.numel(), x.dtype)",
         edges.lengths_at_the_limits),
    "views of a slot are remembered without their type":
        (stream.Slot.like, "key = (x.numel(), x.dtype, at)", "key = (x.numel(), at)", every_call),
    "a scattered sum has as many rounds as its shortest part":
        (moves.reduce_scatter, "max(part.numel()", "min(part.numel()", every_call),
    "a gather has as many rounds as its shortest shard":
        (moves.all_gather, "max(out.numel()", "min(out.numel()", every_call),
    "an all-to-all ends when this rank has sent its part":
        (moves.all_to_all, "max(len(going), len(coming))", "len(going)", every_call),
    "a delivery's note is written behind the ring":
        (stream.Outgoing.deliver, "% SLOTS * NOTE", "* NOTE", edges.rings_go_round),
    "a delivery's note is read behind the ring":
        (stream.Incoming.next, "% SLOTS * NOTE", "* NOTE", edges.rings_go_round),
    "the first note is read again": (stream.Incoming.next, "self._read += 1", "pass", edges.rings_go_round),
    "every delivery lies in the first slot":
        (stream.Outgoing.deliver, "(self._next + 1) % SLOTS", "0", edges.a_sleeping_writer),
    "a writer believes in one slot more":
        (stream.Outgoing.claim, "len(self._in_use) == SLOTS", "len(self._in_use) > SLOTS", edges.a_sleeping_writer),
    "a writer waits for the first of its readers alone":
        (stream.Outgoing._reclaim, "in self._in_use[0]:", "in self._in_use[0][:1]:", edges.a_late_reader),
    "a delivery that is too long is believed":
        (stream.Incoming.next, "there != size", "there < size", edges.another_length_is_refused),
    "a delivery of another kind is believed":
        (stream.Incoming.next, " or what != kind", "", edges.another_type_is_refused),
    "the kind of a call says nothing of its type":
        (kinds.number, "DTYPES.index(dtype)", "0", edges.another_type_is_refused),
    "a strided tensor counts as flat": (group._flat, ".contiguous()", "", edges.strides),
    "each rank adds from itself on":
        (moves.exchange_slots, "return everyone", "return everyone[ends.rank :] + everyone[: ends.rank]",
         edges.the_same_bits_everywhere),
    "a barrier does not wait for the last rank":
        (moves.barrier, "for peer in ends.peers:", "for peer in ends.peers[:-1]:",
         edges.nobody_leaves_a_barrier_early),
    "sends to several ranks stand in one line":
        (group.SharedMemoryGroup.send, 'lane=("send", to)', 'lane=("send",)', edges.two_receivers),
    "receives from several ranks stand in one line":
        (group.SharedMemoryGroup.recv, 'lane=("recv", source)', 'lane=("recv",)', edges.two_senders),
    "a new request does not wake who sleeps for another":
        (engine.ProgressEngine._enter, "semaphores.post(self._wakeup)", "pass", edges.a_thread_beside_a_sleeper),
    "the last rank's part is forgotten in a sum":
        (moves.exchange_slots, "return everyone", "return [*everyone[:-1], 0 * x]", edges.lengths_at_the_limits),
    "a neighbour's part is shared":
        (moves.all_gather, "step =", "outs = [*outs[1:], outs[0]]; step =", edges.lengths_at_the_limits),
    "an all-to-all sends parts to the wrong ranks":
        (moves.all_to_all, "outs[ends.rank].copy_", "parts = parts[::-1]; outs[ends.rank].copy_", every_call),
    "a broadcast is always from rank 0": (moves.broadcast, "if ends", "root = 0\n    if ends", edges.rings_go_round),
    "the last chunk of a large tensor is lost":
        (moves._chunks, "element_size())\n", "element_size())[:-1]\n", edges.lengths_at_the_limits),
    "a slot is written while it is read":
        (stream.Outgoing._reclaim, "for reader in self._in_use[0]:", "for reader in ():", edges.a_late_reader),
    "a slot is given back before it is read": (stream.Incoming, "next", given_back_early, edges.rings_go_round),
    "results stay in the flat copy": (group._back, "x.detach().copy_(flat.view(x.shape))", "pass", edges.strides),
    "a receive stands in the way of a send":
        (engine.ProgressEngine._enter, "default(lane,", "default('all',", edges.rings_go_round),
    "a send does not wait for its receiver":
        (stream.Outgoing.settle, "while self._in_use:", "while False:", edges.a_send_ends_with_its_receive),
    "nobody rings":  # but another bell
        (stream.Outgoing.deliver, "semaphores.post(wakeup)", "semaphores.post(pair.free)", edges.a_sleeper_in_a_sum),
    "a slot given back is not told":
        (stream.Incoming.release, "if self._memory.raw[self._pair.wanted]:", "if False:", edges.a_sleeping_writer),
    "a writer does not say that it waits":
        (stream.Outgoing._reclaim, "self._memory.raw[pair.wanted] = 1\n            semaphores.post(self._wakeup)",
         "pass", edges.a_sleeping_writer),
    "sums of 64 bits in 32":
        (kinds, "COMBINE",
         lambda right: right | {"SUM": lambda a, b, out: out.copy_(a.float() + b.float())}, every_call),
    "bfloat16 is cut, not rounded": (kinds, "COMBINE", cuts_what_it_should_round, every_call),
    "or for exclusive or": (kinds, "COMBINE", lambda right: right | {"BXOR": right["BOR"]}, every_call),
    "the sum for the largest": (kinds, "COMBINE", lambda right: right | {"MAX": right["SUM"]}, every_call),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    with Ranks(RANKS, echo=False, timeout=60, backend="shm") as made:
        yield made


@bugs(BUGS)
def test_mutant_is_killed(bug, check, ranks):
    assert any(ranks.run(examine, check, bug))


def test_without_a_bug_every_call_is_right(ranks):
    assert ranks.run(examine, every_call) == [[]] * RANKS


def overlaps(ranks: int) -> bool:
    """Whether two things in the shared memory lie on each other, or beyond its end."""
    descriptor = os.memfd_create("edges")
    shared = memory.Memory(descriptor, ranks)
    os.close(descriptor)
    there = [(0, memory.TOKEN)]
    for rank in range(ranks):
        there += [(shared._page(rank), memory.WORD + 1), (shared.wakeup(rank) - shared.base, semaphores.SIZE)]
        there += [(slot.data_ptr() - shared.base, memory.SLOT) for slot in shared.slots(rank)]
        for reader in range(ranks):
            slots = shared.slots(rank, reader)
            there += [(slot.data_ptr() - shared.base, memory.MESSAGE_SLOT) for slot in slots]
            for pair in (shared.pair(rank, reader, messages) for messages in (False, True)):
                there += [(at - shared.base, semaphores.SIZE) for at in (pair.full, pair.free)]
                there += [(pair.wanted, memory.WORD), (pair.notes, memory.SLOTS * memory.NOTE)]
    there.sort()
    ends = [start + size for start, size in there]
    return ends[-1] > shared.size or any(
        end > start for end, (start, _) in zip(ends, there[1:], strict=False)
    )


LAYOUT = {
    "messages share the semaphores of collectives": (memory.Memory.pair, "2 * messages", "0"),
    "notes of messages begin in those of collectives":
        (memory.Memory.pair, "(SLOTS * NOTE + WORD)", "SLOTS * NOTE"),
    "the first rank's page is the token's": (memory.Memory._page, "(1 + rank)", "rank"),
    "messages lie in the last stream": (memory.Memory.__init__, "+ ranks * SLOTS", "+ (ranks - 1) * SLOTS"),
    "both directions of a pair are one":
        (memory.Memory._pair, "writer * self.ranks + reader", "writer + reader"),
}  # fmt: skip


@pytest.mark.parametrize("count_of_ranks", range(1, 6))
def test_no_two_things_in_the_memory_overlap(count_of_ranks):
    assert not overlaps(count_of_ranks)


@pytest.mark.parametrize("bug", LAYOUT)
def test_mutant_of_the_layout_is_killed(bug):
    with rewritten(*LAYOUT[bug]):
        assert overlaps(3)


def test_a_kind_is_told_with_its_type_and_its_root_and_the_mutant_is_killed():
    told = lambda: kinds.kind_name(kinds.number("broadcast", torch.int16, root=2))
    assert told() == "broadcast int16 of root 2"
    with rewritten(kinds.kind_name, "root - 1", "root"):
        assert told() != "broadcast int16 of root 2"
