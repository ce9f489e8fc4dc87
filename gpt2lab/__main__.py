"""`gpt2lab` and `python -m gpt2lab`: the command line."""

import os
import sys

# `python -m` looks for modules in the current folder first, where anything may lie
if __name__ == "__main__" and not sys.flags.safe_path:
    here = sys.path.pop(0)
    if here == os.path.dirname(os.path.dirname(__file__)):
        sys.path.append(here)  # the package itself lies here: last is early enough

try:
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import, until a command runs
except KeyboardInterrupt:
    sys.exit(130)  # it came while `signal` itself was imported

from .cli import entry

if __name__ == "__main__":
    sys.exit(entry())
