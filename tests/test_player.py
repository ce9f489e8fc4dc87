"""The step player: moments of a run, as a strip and as a page's script; and the recorded runs of the lessons."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest

from gpt2lab.lessons import player
from gpt2lab.lessons.labs import recorded
from gpt2lab.plots import steps
from gpt2lab.ranks.trace import Span
from gpt2lab.ranks.traffic import Event
from gpt2lab.schedules import Cost


def a_run():
    """Rank 0 computes F, then sends 8 bytes to rank 1, which computes and holds x from then on."""
    send = Event("send", "pp", 8, 1, 11.0, 12.0, targets=((1, 8),))
    first = [Span("F", "forward", 10.0, 11.0, 0)]
    second = [Span("<G>", "backward", 12.0, 14.0, 1), Span("x", "other", 12.0, 14.0, 1, "holds")]
    return [(first, [send]), (second, [])]


def test_moments_say_who_computes_who_sends_and_what_is_held():
    one, two, three = steps.moments(a_run())
    assert (one.time, one.work, one.sends) == (0.0, (("F", "forward"), None), ())
    assert (two.time, two.work, two.sends) == (1.0, (None, None), ((0, 1, "8 B"),))
    assert (three.time, three.work, three.holds) == (2.0, (None, ("<G>", "backward")), ((), ("x",)))
    assert two.words == "rank 0 sends 8 B to rank 1"


def test_what_happens_at_nearly_the_same_time_is_one_moment():
    (first, [send]), second = a_run()
    late = replace(send, start=11.001)
    assert [m.work for m in steps.moments([(first, [late]), second])] == [
        m.work for m in steps.moments(a_run())
    ]


def test_a_moment_without_change_is_no_moment():
    (first, log), second = a_run()
    first = [*first, Span("F", "forward", 10.0, 10.5, 0)]
    assert len(steps.moments([(first, log), second])) == 3


def test_the_page_needs_nothing_else_and_holds_no_foreign_markup():
    text = player.html(a_run(), 'an "alt" <text>')
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0 and "src=" not in text
    assert "<G>" not in text and "\\u003cG>" in text and "&quot;alt&quot; &lt;text>" in text
    assert text == player.html(a_run(), 'an "alt" <text>')


def test_the_script_can_be_parsed(tmp_path):
    if not (node := shutil.which("node")):
        pytest.skip("needs node")
    text = player.html(a_run(), "alt")
    (tmp_path / "player.js").write_text(text.split("<script>")[1].split("</script>")[0])
    subprocess.run([node, "--check", tmp_path / "player.js"], check=True, timeout=60)


PAGE = """
const made = [], node = (kind) => ({ kind, setAttribute(key, value) { this[key] = value; }, addEventListener() {},
  appendChild: (e) => made.push(e), replaceChildren() {}, querySelector: () => node("svg") });
globalThis.document = { getElementById: node, createElementNS: (_, kind) => node(kind) };
SCRIPT
console.log(JSON.stringify(made.filter((e) => e.fill === "none").map((e) => e.d.match(/[\\d.]+/g).map(Number))));
"""
"""As much of a page as the script asks for; prints the numbers of the first moment's arcs."""


def test_arcs_of_an_exchange_lie_around_each_other_and_far_ones_higher(tmp_path):
    if not (node := shutil.which("node")):
        pytest.skip("needs node")
    sends = [
        Event("send", "x", 8, 1, 0.0, 1.0, targets=tuple((to, 8) for to in asked)) for asked in ((1, 2), (0,))
    ]
    run = [([], [event]) for event in sends] + [([], [])]
    script = player.html(run, "alt").split("<script>")[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(PAGE.replace("SCRIPT", script))
    said = subprocess.run([node, tmp_path / "page.js"], check=True, timeout=60, capture_output=True).stdout
    there, beyond, back = ([x[0], x[-2], x[3]] for x in json.loads(said))  # from, to, height
    assert back[1] < there[0] < there[1] < back[0] and back[2] < there[2] > beyond[2]


def test_what_the_script_draws():
    data = json.loads(json.dumps(player.drawing_of(a_run())))
    assert data["end"] == 4000 and len(data["ranks"]) == 2 and data["sent"] == [[0, 1000, 2000]]
    assert [m["sends"] for m in data["moments"]] == [[], [[0, 1, "8 B"]], []]


def test_a_strip_has_as_many_pictures_as_asked_or_as_there_are():
    assert len(steps.strip(a_run(), 2).axes) == 2 and len(steps.strip(a_run(), 9).axes) == 3


def in_order(run, rank):
    return [s.name for s in sorted(run[rank][0], key=lambda s: s.start) if s.lane == "work"]


def test_a_recorded_ring_hands_every_chunk_to_everybody(pools):
    run = pools[3].run(recorded.ring_steps)
    assert [len([e for e in log if e.targets]) for _, log in run] == [4, 4, 4]
    for spans, _ in run:
        assert {s.name for s in spans[-3:]} == {"0: 012", "1: 012", "2: 012"}  # what is held at the end


def test_a_recorded_step_of_zero_3_holds_blocks_only_while_they_run(pools):
    run = pools[2].run(recorded.zero3)
    for rank, (spans, _) in enumerate(run):
        assert in_order(run, rank)[:4] == ["F0", "F1", "F2", "F3"]
        assert sum(s.lane == "holds" for s in spans) == 2 * recorded.TINY.n_layer


def test_a_recorded_pipeline_holds_what_its_schedule_promises(pools):
    for name, most in (("gpipe", 3), ("1f1b", 2)):
        run = pools[2].run(recorded.pipeline_steps, name, 3, Cost(0.01, backward=0.01))
        held = [s for s in run[0][0] if s.lane == "holds"]
        assert max(sum(s.start <= other.start < s.end for s in held) for other in held) == most
        assert in_order(run, 1)[:2] == (["F0", "F1"] if name == "gpipe" else ["F0", "B0"])


def test_recorded_ring_attention_meets_every_block_twice(pools):
    run = pools[3].run(recorded.ring_attention)
    for rank in range(3):
        blocks = [f"q{rank} x kv{(rank - step) % 3}" for step in range(3)]
        assert in_order(run, rank) == blocks * 2


def test_recorded_heads_and_buckets(pools):
    for spans, log in pools[3].run(recorded.heads_steps):
        assert [e.op for e in log] == ["all_to_all"] * 4
        assert sum(s.name == "12 tokens, 1 head" for s in spans) == 2
    for overlap, messages in ((True, 4), (False, 8)):
        run = pools[2].run(recorded.buckets, 2, overlap)
        assert sum(e.op == "all_reduce" for e in run[0][1]) == messages
        assert in_order(run, 0)[:8] == [f"B{i}" for i in range(7, -1, -1)]
