"""Machines: how fast they compute and send, what a process holds, and switches that make a step faster.

few_rows      layers of one row at the speed of memory, as when a model writes
timing        a stopwatch that warms up, waits and repeats
device_time   when a GPU gets somewhere, without waiting for it
speed         flop/s and bytes/s of this machine
links         alpha-beta links and the time of collectives on them
memory        bytes that a process holds, by tensor storage
checksum      a tensor in one short line
options       what an option of a command is, said once; words: the nearest name for a misspelled one
fast          oneDNN for matrix products, if a check shows that its results are exact
namespaces    several machines on one: namespaces of the kernel, with wires between them
switch        carries their frames, at a rate and with a delay
huge_pages    glibc settings that must be made before a process starts
"""
