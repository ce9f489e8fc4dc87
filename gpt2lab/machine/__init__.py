"""What one machine can do and hold: stopwatch, speed, memory, and switches that make a step faster.

timing        a stopwatch that warms up, waits and repeats
speed         flop/s and bytes/s of this machine
memory        what a process holds, by tensor storage
checksum      a tensor in one short line
fast          oneDNN for matrix products, behind a check of its results
huge_pages    glibc settings that must be made before a process starts
"""
