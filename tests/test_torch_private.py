"""torch's private names that the package uses, each with its reason: the list to go through when torch is raised."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gpt2lab"
ALLOWED = {  # name -> why there is no public one
    "_attention": "ring attention as PyTorch ships it, to time ours against",
    "_children": "multiprocessing ends its processes in every fork that ends, also where they are the parent's",
    "_context_parallel": "the same",
    "_decomp": "the rules that reduce ATen to its core operators",
    "_device_types": "a group's backends by device: needed for the timeout of the default group",
    "_dynamo": "imported by the first optimizer of a process; the forkserver does it once for all ranks",
    "_get_backend": "the options of the default group, which hold its timeout",
    "_get_default_group": "the same: torch.distributed has no public name for the group of all ranks",
    "_get_pipeline_order": "a pipeline schedule's order table, to compare with ours",
    "_is_view": "autograd adds the second gradient of a tensor into the first unless that is a view",
    "_local_scalar_dense": "ATen's name of the operator that asks a tensor for its number",
    "_log_softmax": "ATen's name of the operator, in captured graphs",
    "_meta_registrations": "rules for the shapes that operators give, of which some are in Python",
    "_profiler_enabled": "record_function takes microseconds also where no profiler is running",
    "_python_dispatch": "to see what DTensor sends, beside its own count of collectives, in a benchmark",
    "_scaled_dot_product_flash_attention_for_cpu": "attention that also returns its log-sum-exp",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "its backward from a log-sum-exp over all blocks",
    "_schema": "whether an operator is told a device, and whether it gives new tensors or views",
    "_softmax": "the same",
    "_templated_ring_attention": "ring attention as PyTorch ships it, to time ours against",
    "_templated_ring_attention_backward": "the same",
    "_timeout": "new_group does not inherit the timeout of the default group",
    "_unsafe_preserve_version_counter": "a backward with the weights of its forward, which autograd refuses",
}
OURS = {"_exit", "_getframe", "_replace"}  # of os, sys and named tuples: documented


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def methods(text: str) -> set[str]:
    """The names of the methods that a file defines."""
    classes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)]
    return {m.name for c in classes for m in c.body if isinstance(m, ast.FunctionDef)}


def used(text: str, own: set[str] = frozenset()) -> set[str]:
    """Private names that a file imports from torch, or takes from an object whose class the package did not write."""
    tree, found, own = ast.parse(text), set(), own | methods(text)
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for n in ast.walk(tree):
        if isinstance(n, ast.Import):
            found |= {p for a in n.names if a.name.startswith("torch") for p in a.name.split(".")}
        elif isinstance(n, ast.ImportFrom) and not n.level and (n.module or "").startswith("torch"):
            found |= {*n.module.split("."), *(a.name for a in n.names)}
        elif isinstance(n, ast.Attribute) and not (isinstance(n.value, ast.Name) and n.value.id == "self"):
            found |= {n.attr} - own
    return {name for name in found if private(name)} - OURS


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    files = {str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
    own = set().union(*map(methods, files.values()))
    return {file: used(text, own) for file, text in files.items() if "torch" in text}


def test_every_private_name_of_torch_is_in_the_list(names):
    new = {file: found for file, seen in names.items() if (found := seen - set(ALLOWED))}
    assert not new, f"{new}: find a public name, or say in ALLOWED why there is none"


def test_the_list_is_sorted_and_has_no_name_too_many(names):
    assert list(ALLOWED) == sorted(ALLOWED)
    assert set(ALLOWED) == set().union(*names.values())


@pytest.mark.parametrize(
    "text",
    [
        "import torch._C\n",
        "from torch.distributed._tensor import DTensor\n",
        "from torch.nn.parallel import _functions\n",
        "import torch as t\nt.nn.functional._helper(1)\n",
        "import torch\ndef f(group):\n    return group._private\n",
    ],
)
def test_a_private_name_is_noticed(text):
    assert used(text)


def test_a_files_own_private_names_are_its_own():
    text = "import torch\nclass A:\n    def _f(self):\n        self._x = A._g(self)\n    def _g(self): ...\n"
    assert not used(text)
