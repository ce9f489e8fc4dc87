"""Tasks: work cut into pieces that say which parts of which tensors they touch, so that their order follows.

Read in this order: `graph` (a task, its accesses, the edges that follow), `check` (races, needless edges, critical
path), `runtime` (program order, fork-join), `scheduler` (worker threads, one iteration or many), `gpt2` (a training
iteration as tasks), `messages` (communication as tasks), `cores` (processes that lend each other cores). The model is
that of OmpSs-2 (Barcelona Supercomputing Center): data accesses order tasks, an iteration's graph is built once and
replayed (taskiter), and a task that waits gives its core back.
"""
