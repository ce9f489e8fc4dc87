"""What a plan costs, predicted, and which plan is best, in plain Python: no torch.distributed.

cost          seconds, bytes and memory of a whole plan on a cluster
dry           a step without numbers: what any plan sends and holds; numberless counts its memory
memory        what each rank holds at its fullest moment: moments walks through a step, for a search; else a dry run
kept          what it keeps from forward to backward; experts: of a mixture
sends         what each rank sends, axis by axis; gathers: how often ZeRO gathers and sums
share         what a plan gives one rank; tensor_costs: what tensor and sequence parallelism send and keep
seconds       how long a rank works on a stage
fit           alpha and beta from measured times, with their uncertainty
metrics       speed-up, efficiency, Amdahl, Karp-Flatt
published_steps  steps that others have published, beside what we predict of them
failures      expected time lost to failures, and how often to save
models        networks as data: GPT-2's relatives by name, by a config.json or by their sizes
space         the plans that a search looks at; bounds: what each takes at least; choose: the best of them
problem       GPT-2 as a graph of operators, and clusters of devices
scale         collectives on thousands of ranks: machines, rails, a spine
events        a clock for jobs on devices and messages on links that they share
placement     which device runs which operator: bounds, list scheduling, branch and bound
reinforce     the same, learned
balance       chains cut into stages: dynamic programs, PipeDream's and DAPPLE's planners
graph_stages  graphs cut into stages: an integer program, and Piper's two levels
cuts          one problem for all searches: operators on blocks of devices and cut there, and the clock of a plan
search        a planner is a space, a pruning, a search and an evaluation; and from a plan found to what runs
alpa          operators clustered, cuts by an integer program, stages on submeshes by a dynamic program
"""
