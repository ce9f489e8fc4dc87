"""The command lines equivalent to `gpt2lab train`: on one machine, and on several under other launchers."""

import shlex

from ..run import Options

MEETING = "MASTER_ADDR=HOST0 MASTER_PORT=29500"  # the store's address where the launcher does not set it


def plain_command(options: Options, *more: str) -> str:
    """The command that does the same with every option spelled out; through torchrun where there are several ranks.

    `more` are arguments that are not options of the run: where it is written, which checkpoint it resumes.
    """
    world, module = options.the_plan().world, _module(options, more)
    return f"python {module}" if world == 1 else f"torchrun --standalone --nproc-per-node {world} {module}"


def on_machines(options: Options, *more: str) -> dict[str, str]:
    """The same on several machines, by launcher; HOST0 stands for the first one. Empty for one rank."""
    world, module = options.the_plan().world, _module(options, more)
    if world == 1:
        return {}
    nodes, inside = (2, world // 2) if world % 2 == 0 else (world, 1)
    hosts = ",".join(f"HOST{node}:{inside}" for node in range(nodes))
    return {
        f"torchrun, on each of {nodes} machines": f"torchrun --nnodes {nodes} --nproc-per-node {inside} "
        f"--max-restarts 3 --rdzv-backend c10d --rdzv-id lab --rdzv-endpoint HOST0:29500 {module}",
        "Slurm": f"{MEETING} srun --nodes {nodes} --ntasks {world} --distribution=block python {module}",
        "Open MPI": f"{MEETING} mpirun --host {hosts} --map-by slot -np {world} "
        f"-x MASTER_ADDR -x MASTER_PORT python {module}",
    }


def _module(options: Options, more: tuple[str, ...]) -> str:
    return "-m gpt2lab train " + shlex.join([*options.arguments(), *more])
