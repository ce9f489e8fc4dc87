"""The figures of lesson 09 are drawn from data alone."""

from gpt2lab.lessons.labs.servers_on_arrival import arrivals, log_of, missed
from gpt2lab.lessons.labs.staleness import LETTERS, homes_of, losses
from gpt2lab.model import GPT2
from gpt2lab.parallel.pipeline.versions import Read
from gpt2lab.plots import asynchronous as plots
from gpt2lab.plots.style import png
from gpt2lab.schedules import Cost, simulate
from gpt2lab.schedules.asynchronous import FREE, make_stream


def test_each_figure_is_drawn():
    for name in FREE:
        assert png(plots.version_map(make_stream(name, 3, 6, 3 if name == "2bw" else 1), 6, name))
    stream = make_stream("pipedream", 2, 4)
    record = [
        [Read(op, 0, held, 0) for op, held in zip(stream.schedule.orders[s], stream.held(s), strict=True)]
        for s in range(2)
    ]
    assert png(plots.kept({"pipedream": record}))
    logs = {name: log_of(arrivals([1.0, 3.0], 4, bound)) for name, bound in (("BSP", 0), ("ASP", None))}
    assert png(plots.staleness({name: missed(log) for name, log in logs.items()}))
    assert png(plots.loss_by_rule({"BSP": [([0.0, 1.0], [3.0, 2.0]), ([0.0, 1.5], [3.1, 2.2])]}))
    losses = {("1f1b", 0.1, 0): [[3.0, 2.0]], ("2bw", 0.1, 0): [[3.0, 2.5], [3.1, 2.4]]}
    losses["2bw", 0.1, 9] = [[3.0, 2.4]]
    assert png(plots.curves(losses, {"1f1b": 1.75, "2bw": 1})) and png(
        plots.tradeoff(losses, {"1f1b": 1.75, "2bw": 1})
    )


def test_the_clock_says_which_version_is_read_and_how_many_are_kept():
    stream = make_stream("ampnet", 3, 5)
    clock = simulate(stream.schedule, Cost(1, backward=2))
    above, below = plots.in_time(stream, clock).axes
    boxes = [(float(b.start + b.end) / 2, s + 0.5, b.op) for s, row in enumerate(clock.rows) for b in row]
    assert [(*t.get_position(), int(t.get_text())) for t in above.texts] == [
        (x, y, stream.reads[op]) for x, y, op in boxes
    ]
    shades = [c for of_stage in above.collections for c in of_stage.get_facecolors()]
    for (_, _, op), shade in zip(boxes, shades, strict=True):
        assert (shade[1] < 0.9) == (stream.staleness(op) > 0), op
    for stage, line in enumerate(below.lines):
        assert list(line.get_ydata()) == [1, *map(len, stream.held(stage))]


def test_letters_are_learnt_with_every_parameter_at_home():
    homes = homes_of(LETTERS, 4)
    assert set(homes) == {n for n, _ in GPT2(LETTERS).named_parameters()} and set(homes.values()) == set(
        range(4)
    )
    found = losses("1f1b", 0.2, 0, 0, 12, stages=2)
    assert found[-1] < found[0] - 0.5
