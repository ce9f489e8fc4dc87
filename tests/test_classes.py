"""Bytes per class of link: every byte counted once, and in the class of the ranks that it travels between."""

from gpt2lab.plan import Plan, build
from gpt2lab.plots import mesh as plots
from gpt2lab.ranks import comm
from gpt2lab.ranks.classes import BETWEEN, INSIDE, by_class
from gpt2lab.ranks.launch import Ranks
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.train import Trainer
from gpt2lab.verify import CONFIG, axes, example_batch


def sent(rank, world, text, node):
    plan = Plan.parse(text)
    one = Trainer(build(plan, CONFIG, Mesh(**axes(plan))))
    comm.clear_log()
    one.step(example_batch(CONFIG, 7, 12))
    twins = [getattr(one.parallel.engine, "twins", None)]
    found = by_class(comm.log, one.parallel.mesh, node, twins)
    assert round(sum(found.values())) == sum(e.bytes for e in comm.log)
    return found


def test_tensor_parallel_neighbours_stay_inside_a_node_and_replicas_talk_between():
    with Ranks(4, echo=False) as ranks:
        for found in ranks.run(sent, "dp=2,tp=2", 2):
            assert ("tp", BETWEEN) not in found and ("dp+cp", INSIDE) not in found
            assert found["tp", INSIDE] > 0 and found["dp+cp", BETWEEN] > 0
        for found in ranks.run(sent, "pp=2,tp=2,micro=2", 2):
            assert found["pp", BETWEEN] > 0 and found["tie", BETWEEN] > 0
        whole = ranks.run(sent, "pp=4,micro=2", 2)
        assert ("pp", INSIDE) not in whole[0] or whole[0]["pp", INSIDE] > 0
        assert whole[1]["pp", INSIDE] == whole[1]["pp", BETWEEN]
        assert ("pp", BETWEEN) not in whole[0]


def test_the_figures_show_every_axis_and_plan():
    lines = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}
    assert [t.get_text() for t in plots.cube(lines, 2).axes[0].get_yticklabels()] == ["tp", "dp"]
    fig = plots.by_class({"dp=2,tp=2": {("tp", INSIDE): 2e3, ("dp+cp", BETWEEN): 1e3}})
    assert [ax.get_title(loc="left") for ax in fig.axes] == [INSIDE, BETWEEN]
