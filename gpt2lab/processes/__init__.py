"""How ranks live and die. Read in this order:

launch          `launch(f, ranks=4)` and `Ranks`: what a notebook calls
pool            the processes themselves: started, kept warm, ended
rank_process    what runs inside a rank
results         how a rank's result comes back; a large one through shared memory
forkserver      where they are forked from; preload is what it imports once, so that a rank starts fast
watch           the parent's loop: results, output, progress; where a dead rank is noticed
status_board    shared memory in which each rank publishes its current call
deadlock        ranks that wait for each other in a circle; the state of every rank in words
failure         RankFailed: which rank, why, and its traceback
orphans         no process and no folder is left behind, however the parent dies
launchers       ranks that torchrun, Slurm or mpirun started
meeting         before their first call: who came, alike, and reached by the others
"""
