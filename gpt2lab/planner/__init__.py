"""What a plan costs, predicted in plain Python: no torch.distributed.

links      alpha-beta links and the time of collectives on them
fit        alpha and beta from measured times, with their uncertainty
metrics    speed-up, efficiency, Amdahl, Karp-Flatt
failures   expected time lost to failures, and how often to save
"""
