"""Collectives built by hand from messages between two ranks, as libraries build them.

Each module is one algorithm: `all_reduce(x, axis)` gives the sum on every rank, out of place, for any number of ranks.
`kernels` has the operations of GPT-2 by hand, forward and backward.
"""

from . import double_tree, doubling, hierarchical, naive, rabenseifner, ring, tree

ALL_REDUCE = {
    "naive": naive,
    "ring": ring,
    "tree": tree,
    "double tree": double_tree,
    "recursive doubling": doubling,
    "rabenseifner": rabenseifner,
    "hierarchical": hierarchical,
}
