"""Time something against a rival in the same run. Each benchmark prints a table of medians and ratios.

    python -m gpt2lab bench step          one serial step against transformers, and what each switch for speed gives
    python -m gpt2lab bench generate      tokens a second with and without cache, against transformers
    python -m gpt2lab bench launch        how long live ranks take to start
    python -m gpt2lab bench transport     shared memory against gloo on the same ranks
    python -m gpt2lab bench collectives   our algorithms against the library's
    python -m gpt2lab bench data          data parallel and ZeRO against DDP and fully_shard
    python -m gpt2lab bench tensor        tensor parallel against DTensor
    python -m gpt2lab bench pipeline      our engine against torch.distributed.pipelining
    python -m gpt2lab bench context       sequence splitting against serial attention and PyTorch's ring
    python -m gpt2lab bench tasks         an iteration in six ways: threads, fork-join, tasks, ranks
    python -m gpt2lab bench sharding      the sharding algebra against DTensor: layouts, bytes, a block's seconds
    python -m gpt2lab bench experts       a mixture of experts against transformers' Mixtral block

On a machine with fewer cores than ranks a stopwatch also measures the scheduler: read the ratios.
"""

import argparse
import difflib
import importlib
from pathlib import Path

from .. import benchmarks


def names() -> list[str]:
    """The benchmarks there are: the files of gpt2lab/benchmarks that can be run."""
    files = Path(benchmarks.__file__).parent.glob("[a-z]*.py")
    return sorted(f.stem for f in files if "\ndef run(" in f.read_text())


def add_arguments(parser) -> None:
    """The name; what follows it belongs to the benchmark."""
    parser.add_argument("name", help=", ".join(names()))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark; --help explains them")


def run(args) -> int:
    """Hand over to the benchmark."""
    from ..cli import Parser

    if args.name not in names():
        near = difflib.get_close_matches(args.name, names(), 1)
        hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(names())}."
        raise ValueError(f"there is no benchmark {args.name!r}. {hint}")
    benchmark = importlib.import_module(f"gpt2lab.benchmarks.{args.name}")
    parser = Parser(
        prog=f"gpt2lab bench {args.name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_arguments(parser)
    return benchmark.run(parser.parse_args(args.options))
