"""What CONTRIBUTING promises: a new schedule is a generator and one line of the registry, and all else follows."""

from planting import is_noticed, planted

from gpt2lab.plan import Plan
from gpt2lab.reference import CONFIG
from gpt2lab.schedules import Op, Schedule, check, registry, simulate


def by_pairs(ranks: int, micros: int) -> Schedule:
    """Two forwards, then their two backwards, and so on: between `naive` and `gpipe`."""
    pairs = [range(i, min(i + 2, micros)) for i in range(0, micros, 2)]
    order = [(kind, i) for pair in pairs for kind in "FB" for i in pair]
    orders = tuple(tuple(Op(kind, s, i) for kind, i in order) for s in range(ranks))
    return Schedule(orders, tuple(range(ranks)), micros, name="by_pairs", promise=(min(micros, 2),) * ranks)


LINE = registry, "GENERATORS", lambda known: (*known, registry.Generator("by_pairs", by_pairs, "this test"))


def test_a_schedule_that_is_one_line_of_the_registry_is_checked_simulated_planned_and_run(pools):
    plan = Plan.parse("pp=2,micro=5,schedule=by-pairs")
    with planted(*LINE):
        plan.check(CONFIG, 7, 11)
        found = registry.make("by_pairs", 2, 5)
        check(found)
        assert simulate(found).makespan == 3 * 5 + 3 * 3  # of three rounds each waits for the other stage
        assert not is_noticed(pools[2], LINE, plan, CONFIG)
