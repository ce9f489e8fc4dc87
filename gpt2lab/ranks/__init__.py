"""How ranks talk. Every byte between ranks passes through `comm`, where it is counted and traced.

comm             every call between ranks, once, beside the call that its gradient makes; read this file
mesh, axis       ranks on named axes; a call is made along one of them
call             what happens around every call: checked, announced, timed, counted
traffic          the log of calls, and what each call costs
trace            spans: what a rank did, and when
paced            messages delayed to a slower network's latency and bandwidth
buffers          tensors in the form that a backend accepts
refusals         what was wrong with the arguments of a call that failed
unfinished       calls on a GPU that the host does not wait for, kept on the status board
"""
