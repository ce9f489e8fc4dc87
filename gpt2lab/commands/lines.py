"""The plain command lines that do what `gpt2lab train` does: on one machine, and on several under other launchers."""

import shlex

from ..run import Options

MEETING = "MASTER_ADDR=HOST0 MASTER_PORT=29500"  # where ranks find each other when the launcher does not say


def plain_command(options: Options) -> str:
    """The command that does the same with every option spelled out; through torchrun where there are several ranks."""
    world = options.the_plan().world
    module = "-m gpt2lab train " + shlex.join(options.arguments())
    return f"python {module}" if world == 1 else f"torchrun --standalone --nproc-per-node {world} {module}"


def on_machines(options: Options) -> dict[str, str]:
    """The same on several machines, by launcher; HOST0 stands for the first one. Empty for one rank."""
    world = options.the_plan().world
    if world == 1:
        return {}
    module = "-m gpt2lab train " + shlex.join(options.arguments())
    nodes, inside = (2, world // 2) if world % 2 == 0 else (world, 1)
    return {
        f"torchrun, on each of {nodes} machines": f"torchrun --nnodes {nodes} --nproc-per-node {inside} "
        f"--max-restarts 3 --rdzv-backend c10d --rdzv-id lab --rdzv-endpoint HOST0:29500 {module}",
        "Slurm": f"{MEETING} srun --nodes {nodes} --ntasks {world} python {module}",
        "Open MPI": f"{MEETING} mpirun -x MASTER_ADDR -x MASTER_PORT -np {world} python {module}",
    }
