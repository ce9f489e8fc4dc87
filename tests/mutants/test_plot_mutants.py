"""Bugs in figures (another rank's value, another stage's bar, another unit) and in what commands print and choose."""

import pytest
import test_bench_race as races
import test_command_words as words
import test_plots as numbers
from planting import bugs, is_killed

from gpt2lab import cli
from gpt2lab.benchmarks import race
from gpt2lab.commands import data, export, folders, generate, lines, memory, plans, report, schedule, train
from gpt2lab.machine import options
from gpt2lab.parallel.zero.costs import paper_bytes
from gpt2lab.plots import benchmarks, collectives, forms, steps, tensor, timeline, zero
from gpt2lab.plots import schedule as drawn

pytestmark = pytest.mark.mutant


TIMELINE = numbers.test_a_bar_of_a_timeline_is_in_the_row_of_its_rank_from_its_start_in_milliseconds
BOX = numbers.test_a_box_of_a_schedule_is_in_the_row_of_its_rank_and_says_its_micro_batch
PALE = numbers.test_the_later_chunk_of_a_rank_is_the_paler_one
PANELS = numbers.test_a_comparison_has_each_number_in_its_panel
DASHBOARD = numbers.test_a_panel_of_the_dashboard_has_medians_in_milliseconds_and_the_range
SWEEP = numbers.test_a_sweep_is_in_milliseconds_and_gigabytes_and_its_fits_are_dashed
BLOCKS = numbers.test_blocks_are_where_they_lie_in_the_colour_of_their_first_owner
BARS = numbers.test_bars_of_memory_stand_on_each_other_and_circles_are_what_ranks_hold
STEP = numbers.test_a_step_s_memory_is_in_megabytes_with_a_mark_at_the_peak
BESIDE = numbers.test_bars_beside_each_other_are_of_their_program_and_place
FORMS = numbers.test_a_form_puts_each_number_at_its_place
SURFACE = (
    numbers.test_a_square_of_the_cost_surface_is_the_slowest_stage_of_its_cut_and_the_chosen_cut_is_framed
)
MOMENT = numbers.test_a_moment_is_told_in_milliseconds_and_its_boxes_are_the_ranks

FIGURES = {
    "a bar one rank further": (timeline.timeline, "(MAIN, row[s.rank])", "(MAIN, row[s.rank] + 1)", TIMELINE),
    "a timeline in seconds that says ms": (timeline.timeline, "scale = UNITS[unit]", "scale = 1.0", TIMELINE),
    "a timeline whose unit is fixed": (timeline.timeline, 'f"time in {unit}"', '"time in ms"', TIMELINE),
    "a timeline that starts at the clock's zero":
        (timeline.timeline, "zero = min((s.start for s in spans), default=0.0)", "zero = 0.0", TIMELINE),
    "communication in the row of the work": (timeline.timeline, "row[s.rank] + 0.4", "row[s.rank]", TIMELINE),
    "ranks are named by their row":
        (timeline._label, 'f"rank {rank}" for rank in ranks', 'f"rank {rank}" for rank in range(len(ranks))',
         TIMELINE),
    "the number of the stage in place of the micro-batch":
        (drawn._boxes, "text = str(box.op.micro)", "text = str(box.op.stage)", BOX),
    "boxes one rank further": (drawn._boxes, "rank - 0.45, width, TIME", "rank + 0.55, width, TIME", BOX),
    "every box ends an operation late":
        (drawn._boxes, "float(box.end - box.start)", "float(box.end - box.start) + 1", BOX),
    "a backward in the colour of a forward":
        (drawn._boxes, "width, TIME, box.op.kind, pale)", 'width, TIME, "F", pale)', BOX),
    "the earlier chunk is the paler one": (drawn._box, "[kind]], pale)", "[kind]], 0.55 - pale)", PALE),
    "memory in shares of the own peak": (drawn._memory, "MEMORY * h / most", "MEMORY * h / max(held)", BOX),
    "the mark at the last peak":
        (drawn._memory, "peak = held.index(max(held))", "peak = len(held) - 1 - held[::-1].index(max(held))",
         BOX),
    "weights in the panel of activations":
        (drawn.side_by_side, "(held, weights, sent)", "(weights, held, sent)", PANELS),
    "a bubble as a share that says %": (drawn.side_by_side, "[100 * b for b in shares]", "[*shares]", PANELS),
    "KiB called MiB": (drawn.side_by_side, '"weights", "KiB sent"', '"weights", "MiB sent"', PANELS),
    "seconds called milliseconds":
        (benchmarks.dashboard, "[1e3 * s for s in samples]", "[*samples]", DASHBOARD),
    "the mean called median":
        (benchmarks.dashboard, "ax.plot(statistics.median(samples)", "ax.plot(statistics.fmean(samples)",
         DASHBOARD),
    "rivals in our colour": (benchmarks.dashboard, "if is_rival(what)", "if not is_rival(what)", DASHBOARD),
    "a sweep's fit in seconds": (collectives.sweep_figure, "1e3 * t for t in", "t for t in", SWEEP),
    "megabytes called gigabytes": (collectives.sweep_figure, 'r["bus"] / 1e9', 'r["bus"] / 1e6', SWEEP),
    "fitted sizes are hollow":
        (collectives.sweep_figure, "if size not in unseen", "if size in unseen", SWEEP),
    "blocks of the rank above":
        (collectives.blocks, "cell(ax, column + 0.04, rank + 0.5,", "cell(ax, column + 0.04, rank + 1.5,",
         BLOCKS),
    "blocks in the colour of their holder":
        (collectives.blocks, "owner = whose[rank][place] if whose else None",
         "owner = rank if whose else None", BLOCKS),
    "bars that begin at zero": (forms.stacked, "left += amount", "pass", BARS),
    "the sum of a row in the row below":
        (forms.stacked, "ax.text(left, row,", "ax.text(left, row + 1,", FORMS),
    "a bar's number in another row": (forms.bars, "max(value, 0), place,", "max(value, 0), 0,", FORMS),
    "the first run called the mean": (forms.band, "values.mean(0)", "values[0]", FORMS),
    "a line more than looks is not drawn": (forms.lines, "cycle(looks)", "looks", FORMS),
    "a part without a look is left out": (forms.stacked, "parts.keys() - looks.keys()", "set()", FORMS),
    "a text beside its box": (forms.cell, "left + width / 2", "left + width", FORMS),
    "rows of a map for its columns": (forms.heat, "left + (column + 0.5)", "left + (row + 0.5)", SURFACE),
    "a cut matrix upside down":
        (tensor.cut_product, "(ranks - 1 - r) / ranks, width", "r / ranks, width", FORMS),
    "a total without its unit's factor":
        (zero.bars, "[live[name] / UNITS[unit] for name in stages]", "[live[name] for name in stages]", BARS),
    "gradients shared out from stage 3 on":
        (paper_bytes, "stage >= shared", "stage >= shared + 1",
         numbers.test_figure_1_has_the_published_gigabytes),
    "a curve in kilobytes":
        (zero.memory_over_a_step, "[h / 1e6 for h in held]", "[h / 1e3 for h in held]", STEP),
    "the mark at the end": (forms.peak, "ax.plot(x[top],", "ax.plot(x[-1],", STEP),
    "programs in each other's place": (forms.beside, "x + (i - (", "x - (i - (", BESIDE),
    "microseconds called milliseconds": (steps._title, "* 1e3", "* 1e6", MOMENT),
    "kilobytes of a thousand": (steps.size_of, "size / 1024", "size / 1000", MOMENT),
}  # fmt: skip


STATUS = words.test_each_way_to_end_has_its_status
CHOSEN = words.test_a_run_s_newest_and_best_checkpoint_are_chosen
GOES = words.test_a_run_says_how_it_goes
LAUNCHERS = words.test_the_lines_of_other_launchers_start_as_many_ranks_as_the_plan_has
RESUMED = words.test_options_of_a_resumed_run_are_its_own_below_those_that_are_given
HELD = words.test_memory_says_which_moment_it_shows_and_why_parts_are_missing
TURNS = races.test_contestants_take_turns_and_only_their_own_time_counts
OWN_SECONDS = races.test_who_times_itself_is_believed_and_of_several_seconds_the_median_counts
PAIRWISE = races.test_ratios_are_those_of_turns_that_follow_one_another
TABLE = words.test_the_table_of_plans_counts_those_that_use_both
COMMANDS = {
    "an error ends with 0": (cli._one, "return 2 if wrong else 1", "return 0", STATUS),
    "an interrupt ends with 0": (cli._one, "return 130", "return 0", STATUS),
    "an unknown command ends with 0": (cli._one, "return 2\n    try:", "return 0\n    try:", STATUS),
    "an unknown option ends with 0": (options.Parser.error, "self.exit(2,", "self.exit(0,", STATUS),
    "a bug of ours without its traceback":
        (cli._one, "if debug or (said := in_words(error)) is None:",
         "if debug or (said := in_words(error) or str(error)) is None:", STATUS),
    "no way back is told":
        (cli.told, '*getattr(error, "__notes__", [])', "", words.test_an_error_is_told_by_its_own_words),
    "a file's error without its name":
        (cli.in_words, "{error.filename or 'A file or the output'}: ", "",
         words.test_an_error_is_told_by_its_own_words),
    "each chunk takes a rank's time":
        (schedule.run, "Fraction(schedule.ranks, schedule.depth * schedule.slices)", "Fraction(1)",
         words.test_the_schedule_command_shares_a_rank_s_time_among_its_chunks),
    "input and weight gradient in each other's place":
        (schedule.run, "args.input_grad * share,\n        args.weight_grad * share,",
         "args.input_grad * share,\n        args.input_grad * share,",
         words.test_the_schedule_command_shares_a_rank_s_time_among_its_chunks),
    "plans are counted in one row":
        (plans.run, "found.get((a, b), [])", "found.get((ORDER[0], b), [])", TABLE),
    "plans of fewer ranks only": (plans.run, "world <= most", "world < most", TABLE),
    "the oldest run is the newest": (folders.newest, "return max(", "return min(", CHOSEN),
    "a run without a checkpoint is one": (folders.newest, " if last}", "}", CHOSEN),
    "the oldest checkpoint is exported": (export.chosen, "else found[-1]", "else found[0]", CHOSEN),
    "--best is forgotten":
        (export.chosen, "checkpoint.best(run) if best else found[-1]", "found[-1]", CHOSEN),
    "the oldest checkpoint is resumed": (train._source, "return found[-1]", "return found[0]", CHOSEN),
    "validations are not told": (report.say_sometimes, ' or "val" in entry', "", GOES),
    "every step is told": (report.say_sometimes, "% 10 == 0", "% 1 == 0", GOES),
    "the first validation is told":
        (report.finish, "vals[-1]", "vals[0]", words.test_the_last_validation_is_the_one_that_is_told),
    "a row tells the moment of the first stage":
        (memory.run, '{when}", flush', '{first[2]}", flush', HELD),
    "why gradients exceed weights is never told":
        (memory._explained, 'parts["gradients"] > parts["weights"]',
         'parts["gradients"] > sum(parts.values())', HELD),
    "turns that warm up count": (race.turns, "if turn >= warm_up:", "if True:", TURNS),
    "the first of several seconds counts":
        (race.turns, "statistics.median(returned", "min(returned", OWN_SECONDS),
    "the rival over the contestant": (race.Outcome.ratio, "mine / theirs", "theirs / mine", PAIRWISE),
    "the smallest of all ranks is the largest":
        (race.Outcome.told, "(min, max)", "(min, min)",
         races.test_of_a_number_the_smallest_and_the_largest_of_all_ranks_are_told_and_words_of_the_first),
    "ranks of one machine on each of two": (lines.on_machines, "(2, world // 2)", "(2, world)", LAUNCHERS),
    "an odd world on two machines": (lines.on_machines, "if world % 2 == 0 else (world, 1)", "", LAUNCHERS),
    "the recipe's batch wins over the user's":
        (train._options, '{"batch": 4, "sequence": 64} | given', 'given | {"batch": 4, "sequence": 64}',
         RESUMED),
    "a resumed run's options win over the user's":
        (train._options, "asdict(base) | given", "given | asdict(base)", RESUMED),
    "the third interrupt is ignored":
        (train._stop_on_interrupt, 'if folder is None or interrupted.count("SIGINT") > 2:',
         "if folder is None:", words.test_only_a_third_ctrl_c_ends_a_run_at_once),
    "prompts count as written":
        (generate.run, "len(text) - len(prompt) for", "len(text) for",
         words.test_the_generate_command_counts_new_tokens_by_its_stopwatch),
    "validation called training":
        (data.run, "int(len(shard) * shards.TRAIN_SHARE)", "int(len(shard) * (1 - shards.TRAIN_SHARE))",
         words.test_the_data_command_says_what_became_of_a_text),
}  # fmt: skip


@bugs(FIGURES)
def test_mutant_of_a_figure_is_killed(bug, check):
    assert is_killed(bug, check), "nobody noticed"


@bugs(COMMANDS)
def test_mutant_of_a_command_is_killed(bug, check, capsys):
    assert is_killed(bug, check, capsys=capsys), "nobody noticed"
