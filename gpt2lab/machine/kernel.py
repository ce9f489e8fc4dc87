"""The kernel of `make lab`: that of ipykernel, without its port (`python -m gpt2lab.machine.kernel -f FILE`).

Whatever carries its other messages, ipykernel listens on a TCP port for the output of processes that are forked from a
cell. Ranks do not print through it, so here it is never opened.
"""

from ipykernel import kernelapp
from ipykernel.iostream import IOPubThread

if __name__ == "__main__":
    kernelapp.IOPubThread = lambda socket, pipe, **more: IOPubThread(socket, pipe=False, **more)
    kernelapp.launch_new_instance()
