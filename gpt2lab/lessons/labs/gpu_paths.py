"""Every path that a machine with GPUs takes and a laptop does not, and its test."""

from dataclasses import dataclass

HOWS = ("a device without numbers", "a pretended number of GPUs", "waits for a GPU")
"""Tensors that have a device and no numbers; a patched count of GPUs; skipped where there is no GPU."""
FAKE, COUNTED, REAL = HOWS


@dataclass(frozen=True)
class GpuPath:
    """What happens with GPUs, how it was tested, and where."""

    what: str
    how: str
    test: str


PATHS = (
    GpuPath("every strategy keeps weights, batch and gradients on its device", FAKE,
            "test_devices.py::test_a_step_never_mixes_devices"),
    GpuPath("the batch moves to the device", FAKE,
            "test_devices.py::test_mutant_that_forgets_to_move_the_batch_is_noticed"),
    GpuPath("each rank has a GPU of its own, or all take the CPU", COUNTED,
            "test_devices.py::test_each_rank_has_a_gpu_of_its_own_or_none_has"),
    GpuPath("too few GPUs are refused in a sentence", COUNTED,
            "test_devices.py::test_gpus_that_are_not_there_are_refused_in_one_sentence"),
    GpuPath("Slurm says how many ranks share a machine's GPUs", COUNTED,
            "test_devices.py::test_slurm_says_how_many_ranks_share_a_machine"),
    GpuPath("losses equal those of the CPU in float64", REAL, "test_devices.py::test_a_gpu_trains_as_the_cpu_does"),
    GpuPath("`--autocast` and `--compile`", REAL, "test_gpu.py::test_what_is_faster_on_a_gpu_trains_almost_alike"),
    GpuPath("NCCL carries what lies on GPUs", REAL,
            "test_devices.py::test_gpus_train_over_nccl_as_one_processor_does"),
    GpuPath("HSDP: shards inside a machine, replicas across", REAL,
            "test_gpu.py::test_hybrid_sharding_on_four_gpus_trains_as_one_process"),
    GpuPath("streams and kernels in a trace", REAL, "test_gpu.py::test_pytorchs_profiler_sees_the_kernels_of_a_step"),
)  # fmt: skip
