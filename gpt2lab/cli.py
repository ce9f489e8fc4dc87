"""The command line: `gpt2lab COMMAND`, or `python -m gpt2lab COMMAND`."""

import contextlib
import errno
import importlib
import os
import re
import signal
import sys

from . import lacking
from .machine.options import parser_of
from .machine.words import CROWDED, choose, did_you_mean

COMMANDS = {
    "train": "train GPT-2, on Shakespeare unless told otherwise",
    "cluster": "train on several machines that are namespaces of this one",
    "generate": "let a trained model write",
    "export": "a trained model in the Hugging Face layout",
    "convert": "checkpoints of the version before, for this one",
    "verify": "compare a plan with the serial run: loss, gradients, weights",
    "plans": "which strategies go together, from what the tests run",
    "plan": "choose a plan for a model, a machine and a goal",
    "memory": "what each rank of a plan holds, and for what",
    "calibrate": "measure this machine, for predictions of plans",
    "schedule": "draw, check and simulate a pipeline schedule",
    "data": "turn your own text into tokens to train on",
    "info": "what this machine is and how fast it multiplies",
    "handout": "notebooks for students, exercises blank",
    "grade": "run what students handed in, and write their results",
    "progress": "which exercises pass here",
    "bench": "time our strategies against PyTorch's own",
}


TOLD = ("BadCheckpoint", "CannotSave", "FloatingPointError", "OSError")  # of Python and ours, then of a watch
TOLD += ("ProcessDied", "TimeoutError", "Deadlock", "Mismatch")
"""Failures of a rank whose message is enough: no traceback is shown."""
WAYS = {
    FileNotFoundError: "Check its name.",
    FileExistsError: "Use another name.",
    IsADirectoryError: "Use the name of a file.",
    NotADirectoryError: "Use the name of a folder.",
    PermissionError: "Use a place that is open to you.",
}
"""The way out of what the system says about a file."""
FULL = {errno.ENOSPC: "Make room, or use another place.", errno.EMFILE: "Allow more of them: ulimit -n 1024."}
NO_MEMORY = ("MemoryError", "OutOfMemoryError")
LACKING = ("not enough memory", "can't allocate memory", "CUDA out of memory")
REFUSED = ("can't start new thread", os.strerror(errno.EAGAIN))
SMALLER = "Use a smaller --config, fewer rows or tokens, more micro-batches, or a plan of more ranks."


def overview() -> str:
    """The help of the command line as a whole."""
    lines = ["usage: gpt2lab COMMAND [options]", "", "GPT-2 in parallel: run it and check it.", ""]
    lines += [f"  {name:10}{about}" for name, about in COMMANDS.items()]
    lines += ["", "gpt2lab COMMAND --help explains a command; --debug shows where an error came from."]
    status = (
        "Exit status: 0 done; 1 failed, or what is compared differs; 2 cannot be done as typed; 130 Ctrl-C."
    )
    return "\n".join([*lines, status])


def told(error: RuntimeError) -> str:
    """A failed rank's message without its traceback, and the notes that say how to continue."""
    said = re.split(rf"^(?:\w+\.)*{error.ename}: ", str(error), maxsplit=1, flags=re.MULTILINE)[-1]
    ways = [SMALLER] if "out of memory" in said else []
    return "\n".join([said, *ways, *getattr(error, "__notes__", [])])


def in_words(error: Exception) -> str | None:
    """The sentence that a user gets for an error, without a traceback; None for an error that is ours."""
    name = getattr(error, "ename", type(error).__name__)
    where = f"rank {error.rank}: " if hasattr(error, "rank") else ""
    if name in NO_MEMORY or any(words in str(error) for words in LACKING):
        return "\n".join([f"{where}there is not enough memory. {SMALLER}", *getattr(error, "__notes__", [])])
    if any(words in str(error) for words in REFUSED):
        return where + CROWDED
    if isinstance(error, OSError) and error.strerror:
        way = WAYS.get(type(error)) or FULL.get(error.errno, "")
        return f"{error.filename or 'A file or the output'}: {error.strerror}. {way}".rstrip()
    if isinstance(error, OSError | ValueError | FloatingPointError):
        return str(error)
    return told(error) if getattr(error, "ename", "") in TOLD else None


def entry() -> int:
    """The shell's entry point: a process that will compute restarts itself with huge pages, if there are any."""
    for name in ("stdin", "stdout", "stderr"):  # in the place of one that is closed no other file may open
        setattr(sys, name, getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no error
    try:
        os.getcwd()
    except FileNotFoundError:
        print("gpt2lab: the current folder has been deleted. Change to another one.", file=sys.stderr)
        return 2
    os.environ["MPLBACKEND"] = "agg"  # figures are written into files, whatever a notebook asked for
    from .machine import huge_pages

    computes = sys.argv[1:2] and sys.argv[1] in ("train", "generate", "verify", "bench", "info", "calibrate")
    if computes and huge_pages.ask_for_huge_pages():
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        safe = [] if os.path.samefile(home, os.curdir) else ["-P"]  # no module lies in the current folder
        os.execv(sys.executable, [sys.executable, *safe, "-m", "gpt2lab", *sys.argv[1:]])
    status = main()
    launchers = sys.modules.get(f"{__package__}.processes.launchers")
    if launchers and launchers.JOINED:
        end_at_once(status)
    return status


def end_at_once(status: int) -> None:
    """End a rank that a launcher started, without PyTorch's own farewell.

    In about one of 30 ends on a busy machine a thread of gloo outlives what it belongs to, and C++ aborts the process:
    "terminate called without an active exception". The work is done and written by then.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status. An error that the user can fix is one sentence, without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _one(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as under `| head`: what is still to be written goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("gpt2lab: nobody reads the output any more.", file=sys.stderr)
    except OSError as error:
        print(f"gpt2lab: {in_words(error)}", file=sys.stderr)
    return 1


def _one(arguments: list[str]) -> int:
    """What `main` does, while somebody reads the output."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, choose(COMMANDS))
        print(f"gpt2lab: there is no command {name!r}. {hint}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f".commands.{name}", __package__)
    except ModuleNotFoundError as error:
        print(f"gpt2lab {name}: {lacking(error)}", file=sys.stderr)
        return 1
    parser = parser_of(command, f"gpt2lab {name}")
    for before, word in zip(["", *rest], rest, strict=False):
        option = word.removesuffix("=") if word else before
        if (not word or word.startswith("--") and word.endswith("=")) and option != "--prompt":
            what = option if option.startswith("--") else "a word"
            parser.error(f"{what} is empty (an unset variable?). Give it a value, or leave it out")
    debug = "--debug" in rest
    args = parser.parse_args([word for word in rest if word != "--debug"])
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command.run(args) or 0
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug or (said := in_words(error)) is None:
            raise
        print(f"gpt2lab {name}: {said}", file=sys.stderr)
        wrong = getattr(error, "ename", "") == "BadCheckpoint" or isinstance(error, (ValueError, *WAYS))
        return 2 if wrong else 1
    except KeyboardInterrupt:
        print(f"\ngpt2lab {name}: interrupted.", file=sys.stderr)
        return 130
