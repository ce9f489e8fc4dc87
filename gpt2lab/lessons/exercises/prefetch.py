"""The scored puzzle of lesson 05: in which order a link should carry ZeRO-3's weights and gradients."""

from dataclasses import dataclass, field

from . import returned, scored

SIZES = (2, 3, 1, 2, 2)
"""Room of each block's whole weights, and the time that its gather, or the sum of its gradients, takes."""

FORWARD = (2, 1, 3, 2, 1)
"""The time of each block's forward; its backward takes twice as long."""

ROOM, BAR, BEST = 5, 33, 32


@dataclass
class Rank:
    """A rank with one link and one processor: what has been done when, and what is held."""

    order: list[str]
    done: dict[str, int] = field(default_factory=dict)  # F0, B0 -> when it ends
    there: dict[int, list[int]] = field(default_factory=dict)  # block -> when each of its gathers ends
    freed: list[tuple[int, int]] = field(default_factory=list)  # (when, room)
    held: int = 0
    computed: int = 0

    def compute(self) -> None:
        """Run forwards, then backwards, as far as weights have been gathered."""
        blocks = range(len(SIZES))
        for word in [*(f"F{i}" for i in blocks), *(f"B{i}" for i in reversed(blocks))]:
            kind, i = word[0], int(word[1])
            gathers = self.order.count(f"G{i}")
            needed = 0 if kind == "F" else gathers - 1
            if word in self.done:
                continue
            if len(self.there.get(i, ())) <= needed:
                return
            begin = max(self.computed, self.there[i][needed])
            self.done[word] = self.computed = begin + FORWARD[i] * (1 if kind == "F" else 2)
            if kind == "B" or gathers == 2:
                self.freed.append((self.computed, SIZES[i]))

    def gather(self, i: int, begin: int) -> int:
        """Gather block i on a link that is free from `begin` on, once there is room; returns when it has come."""
        again = len(self.there.get(i, ()))
        assert not again or f"F{i}" in self.done, (
            f"the second G{i} comes before F{i} could run: block {i} is still there"
        )
        begin = max(begin, self.done[f"F{i}"]) if again else begin
        while self.held - sum(room for when, room in self.freed if when <= begin) + SIZES[i] > ROOM:
            later = [when for when, _ in self.freed if when > begin]
            held = self.held - sum(room for _, room in self.freed)
            assert later, (
                f"the link waits at G{i} for ever: {held} of {ROOM} units are held, block {i} needs {SIZES[i]}, and "
                "nothing that comes before it in your order will free any"
            )
            begin = min(later)
        self.held += SIZES[i]
        self.there.setdefault(i, []).append(begin + SIZES[i])
        return begin + SIZES[i]


def makespan(words: list[str]) -> int:
    """When a step ends whose link works in this order. Raises AssertionError where it never does."""
    rank, link = Rank(words), 0
    for word in words:
        rank.compute()
        kind, i = word[0], int(word[1])
        if kind == "G":
            link = rank.gather(i, link)
        else:
            assert f"B{i}" in rank.done, (
                f"the link waits at R{i} for ever: B{i} needs a G that comes after it"
            )
            link = max(link, rank.done[f"B{i}"]) + SIZES[i]
    rank.compute()
    return max(link, rank.computed)


def order(answer) -> str:
    """Exercise: the order of gathers and sums on the link of a rank with room for five units of weights; a score."""
    words = returned(answer())
    words = words.split() if isinstance(words, str) else list(words)
    known = {f"{kind}{i}" for kind in "GR" for i in range(len(SIZES))}
    strange = [word for word in words if word not in known]
    assert not strange, f"{strange[0]!r} is no work for the link. Write G0 to G4 and R0 to R4"
    for i in range(len(SIZES)):
        gathers, sums = words.count(f"G{i}"), words.count(f"R{i}")
        assert 1 <= gathers <= 2, f"G{i} stands {gathers} times in your order: once, or twice"
        assert sums == 1, f"R{i} stands {sums} times in your order: every gradient is summed once"
    return scored(makespan(words), "units of time", bar=BAR, best=BEST)
