"""How ranks talk. Every byte between ranks passes through `comm`, where it is counted and traced.

mesh             ranks on named axes; a collective runs over one of them
comm             the calls that strategies use, in adjoint pairs: what forward sends, backward sends back
collectives      the same calls without autograd: the only place that names torch.distributed's
point_to_point   messages between two ranks
call             what happens around every call: checked, announced, timed, counted
traffic          the log of calls, and what each call costs
node_traffic     bytes inside a machine and between machines, from the log
buffers          tensors in the form that a backend accepts, and their bytes
paced            messages delayed to a slower network's latency and bandwidth
trace            spans: what a rank did, and when
"""
