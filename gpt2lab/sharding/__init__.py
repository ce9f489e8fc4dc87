"""Sharding algebra: who holds which part of a tensor, what a change costs, and a program partitioned from marks.

Plain Python, which a planner can use without ranks and without torch:

layout       a tensor on a mesh of named axes: cut, whole or partial; the papers' text form `S0R`
cost         steps from one layout to another, their bytes and messages, and the cheapest path
expression   the language in which operators are described
describe     an operator as a lambda over indices, from which follows how it can be cut (Tofu)
operators    the descriptions of GPT-2's operators, softmax, attention, cross entropy, convolution
graph        a program: named values, each made by a described operator
halo         the rows that windows over a cut dimension need from neighbours
propagate    a few marked layouts spread over the graph to a fixed point (GSPMD)
marks        the marks that make Megatron, data parallelism, ZeRO and sequence splitting
partition    one option for each operator, and the changes of layout between them: the program of every rank
named        dimensions by name, a mesh axis for some of them (Mesh-TensorFlow)
tofu         GPT-2's graph as a chain, cut by recursive halving and dynamic programming
crossing     from one group of ranks to another: only the boxes that overlap
staged       GPT-2 as pipeline stages, each cut in its own way on a mesh of its own

On live ranks, over ranks/comm:

reshard      a change of layout, forward and backward
capture      a function of tensors, backward included, as a graph
gpt2         GPT-2's forward, loss, backward, clipping and update
interpret    a rank runs its part of a partitioned program
run_staged   a rank runs its stage
products     matrix products on grids of ranks: 1-D, SUMMA, 3-D
"""
