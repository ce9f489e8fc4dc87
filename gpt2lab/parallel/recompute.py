"""Activation recomputation: keep the input of a block, run the block again in backward (Chen et al. 2016)."""

import torch


class _Recomputed(torch.autograd.Function):
    """Forward without a graph; backward builds the graph of this one block again and runs it."""

    @staticmethod
    def forward(ctx, block, x, others, *parameters):
        ctx.block, ctx.others = block, others
        ctx.save_for_backward(x)
        return block(x, *others)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        parameters = [p for p in ctx.block.parameters() if p.requires_grad]
        with torch.enable_grad():
            y = ctx.block(x, *ctx.others)
        grads = torch.autograd.grad(y, [x, *parameters], grad, allow_unused=True)
        return None, grads[0], None, *grads[1:]


def apply_recompute(model) -> None:
    """Every block of the model, in place, saves only its input x (B, T, C); the gradients are bitwise the same.

    Backward: the block's forward runs a second time, about a third more work a step (Chen 2016, section 4).
    """
    model.run_block = recomputed


def recomputed(block, x, *others):
    """`block(x, *others)`, of which only x is kept until backward."""
    if not torch.is_grad_enabled():
        return block(x, *others)
    return _Recomputed.apply(block, x, others, *(p for p in block.parameters() if p.requires_grad))
