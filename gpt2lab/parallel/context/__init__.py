"""Context parallelism: every rank owns some tokens of every sequence, and attention must see the others'.

exchanges   the plan's words: which exchange and which layout, and how the model is edited
layouts     which rank owns which token
borrow      keys and values lent, by a table of loans and a way to move them; their gradients given back
ring        keys and values passed round a ring, forward and backward; paths: a ring, or a ring of rings
ulysses     all-to-all: from tokens to heads and back
halo        only the neighbours' edge tokens are borrowed, for windowed attention
attention   attention over blocks, merged by log-sum-exp; tiles: which rectangles of it are not masked
costs       operations, bytes and memory, by formula
"""
