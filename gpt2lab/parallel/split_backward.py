"""The backward of one micro-batch through one stage, whole or in two halves.

The input gradient is what the stage before waits for; nobody waits for the weight gradients, so zero-bubble
schedules run them later (Qi et al. 2023). The halves are found in autograd's graph: where a path to the
weights leaves the path to the input, the gradient is kept, and the second half goes on from there.
"""

import torch
from torch.autograd.graph import GradientEdge, Node


class Work:
    """The graph between the input and the output of one stage, for one micro-batch.

    `x` is a leaf, the stage's input. `before` is what x was detached from where that has weights of its own
    (the embedding). `sides` are (tensor of this graph, leaf): whatever gradient the leaf has collected enters
    here too.
    """

    def __init__(self, x: torch.Tensor, output: torch.Tensor, before=None, sides=()):
        self.x, self.output, self.before, self.sides = x, output, before, list(sides)
        self.forks: list[Fork] = []
        self.grad = None

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor:
        """The whole backward: adds to the `.grad` of weights; returns the gradient of x. A loss takes no
        `grad`.
        """
        sides = [(t, leaf.grad) for t, leaf in self.sides if leaf.grad is not None]
        torch.autograd.backward([self.output, *(t for t, _ in sides)], [grad, *(g for _, g in sides)])
        if self.before is not None:
            self.before.backward(self.x.grad)
        return self.x.grad

    def input_gradient(self, grad: torch.Tensor | None) -> torch.Tensor:
        """The first half: the gradient of x; touches no weight and keeps the graph."""
        self.forks = find_forks(self.output, self.x)
        hooks = [fork.node.register_prehook(fork.keep) for fork in self.forks]
        (self.grad,) = torch.autograd.grad(self.output, self.x, grad, retain_graph=True)
        for hook in hooks:
            hook.remove()
        return self.grad

    def weight_gradient(self) -> None:
        """The second half: adds to the `.grad` of weights, from the gradients that the first half kept."""
        for fork in self.forks:
            fork.walk()
        if self.before is not None:
            self.before.backward(self.grad)


class Fork:
    """A node of the graph that lies on a way to the input and has a side way to weights."""

    def __init__(self, node: Node, weights: list[torch.Tensor]):
        self.node, self.weights, self.grads = node, weights, ()

    def keep(self, grads) -> None:
        """Remember the gradients that arrive at the node."""
        self.grads = grads

    def walk(self) -> None:
        """Go down the side way only: autograd leaves out what does not lead to these weights."""
        kept = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.grads) if g is not None]
        torch.autograd.backward([edge for edge, _ in kept], [g for _, g in kept], inputs=self.weights)


def find_forks(output: torch.Tensor, x: torch.Tensor) -> list[Fork]:
    """All forks between x and the output, those nearest to the output first, as backward meets them."""
    end = torch.autograd.graph.get_gradient_edge(x).node
    leads_to_x: set[Node] = set()
    weights: dict[Node, list[torch.Tensor]] = {}  # of nodes that do not lead to x: the weights below them
    forks = []
    for node in _from_below(output.grad_fn):
        below = [child for child, _ in node.next_functions if child is not None]
        if node is end or any(child in leads_to_x for child in below):
            leads_to_x.add(node)
            beside = _unique(w for child in below if child not in leads_to_x for w in weights[child])
            if beside:
                forks.append(Fork(node, beside))
        elif hasattr(node, "variable"):
            weights[node] = [node.variable]
        else:
            weights[node] = _unique(w for child in below for w in weights[child])
    return forks[::-1]


def _from_below(root: Node | None) -> list[Node]:
    """All nodes of a graph, each after everything below it."""
    order, seen, stack = [], set(), [(root, False)] if root is not None else []
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in reversed(node.next_functions) if child is not None]
    return order


def _unique(tensors) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
