"""Token slices of one micro-batch, one after the other: the keys and values that TeraPipe needs (Li et al. 2021)."""

import torch


class SliceCache:
    """The keys and values of a micro-batch's earlier slices, on one stage; attention uses it like a KV cache.

    Forward: a slice attends to detached copies of the earlier slices' keys and values. Backward: later slices run
    first and leave gradients in those copies, which the earlier slice then passes into its own graph. `at` is the
    slice that runs now; when a slice is recomputed, its own copies are already there.
    """

    def __init__(self):
        self.at = 0
        self.past: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []  # (with its graph, the copy others attend to)

    def extend(self, attn, k, v, positions):
        """All keys and values (B, H, S, D) up to this slice."""
        past = self.past.setdefault(attn, [])
        if len(past) == self.at:
            past.append(tuple(t.detach().requires_grad_() for t in (k, v)))
        self.made += zip((k, v), past[self.at], strict=True)
        keys, values = zip(*past[: self.at], (k, v), strict=True)
        return torch.cat(keys, -2), torch.cat(values, -2)

    def take_made(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the slice that just ran has added."""
        made, self.made = self.made, []
        return made


def cut_columns(micro, slices: int, lengths: tuple[int, ...] | None = None) -> list:
    """A micro-batch in token slices of these lengths, or as even as can be. ValueError where they do not fit."""
    total = micro.tokens.size(1)
    if lengths is None:
        return [micro.columns(index) for index in torch.arange(total).tensor_split(slices)]
    if sum(lengths) != total or len(lengths) != slices:
        raise ValueError(
            f"Slices of {', '.join(map(str, lengths))} tokens make {sum(lengths)} in {len(lengths)} slices; the "
            f"sequence has {total} tokens and the schedule {slices} slices. Give {slices} lengths that add up."
        )
    return [micro.columns(index) for index in torch.arange(total).split(list(lengths))]
