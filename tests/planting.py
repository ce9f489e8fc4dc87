"""Plant a bug for the time of a `with` block: the ground of every mutant test."""

from contextlib import contextmanager


@contextmanager
def planted(owner, name: str, make):
    """Replace `owner.name` by `make(right)`, where `right` is what stood there, and put it back afterwards."""
    own, right = vars(owner).get(name), getattr(owner, name)
    wrong = make(right)
    setattr(owner, name, staticmethod(wrong) if isinstance(own, staticmethod) else wrong)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def compare_with_bug(rank, world_size, bug, plan, config, rows=7, length=11):
    """What `verify.compare` finds on this rank while a bug (owner, name, make) is planted; None plants nothing."""
    from gpt2lab.verify import Plan, compare

    if bug is None:
        return compare(rank, world_size, Plan.parse(plan), config, rows, length)
    with planted(*bug):
        return compare(rank, world_size, Plan.parse(plan), config, rows, length)


def noticed(found, limit: float = 1e-6) -> bool:
    """Whether some rank saw an error far above rounding (or not a number)."""
    return any(not claim.error <= limit for claims in found for claim in claims)
