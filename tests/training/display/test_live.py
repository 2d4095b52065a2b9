"""The view in the terminal: what is drawn where, with a clock in hand and a terminal in memory."""

import io
import math
import random
import threading
from pathlib import Path

import pytest
from rich.console import Console

from systolic.report.progress import ProgressLine
from systolic.report.terminal import BoundedCurve, can_redraw, one_line, sparkline
from systolic.runs.job_record import JobRecord
from systolic.runs.metrics import FinalRecord, StartRecord, SummaryRecord
from systolic.runs.record import RunRecord
from systolic.training.display.live import MAX_LINES, Live, Screen
from systolic.training.display.plain import Plain, headline
from systolic.training.display.summary import judge
from tests.training.display.fabricate_run import event, records, start, train

UTF = {"TERM": "xterm-256color"}


class Terminal(io.StringIO):
    """A terminal whose screen is a text."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **values: object) -> dict:
    return train(number, 0.0, chance=random.Random(number)) | values


def screen(clock: Clock, width: int = 100) -> tuple[Screen, Terminal]:
    terminal = Terminal()
    return Screen(stream=terminal, clock=clock, width=width), terminal


def drawn(view: Screen) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None).print(view.panel())
    return stream.getvalue()


def test_before_the_first_step_it_says_how_long_it_has_been_getting_ready() -> None:
    clock = Clock()
    view, _ = screen(clock)
    view.see(start())
    clock.now += 12.0
    assert "getting ready: data, weights, compile … 12.0 s" in drawn(view)


def test_what_is_left_counts_down_between_records() -> None:
    clock = Clock()
    view, _ = screen(clock)
    view.see(start())
    clock.now += 20.0
    view.see(step(500, eta_seconds=30.0))
    clock.now += 10.0
    text = drawn(view)
    assert "20.0 s left" in text
    assert "30.0 s so far" in text
    assert "500/3,000" in text


def test_a_loss_that_is_not_a_number_shows_as_such() -> None:
    view, _ = screen(Clock())
    view.see(start())
    for number in range(1, 9):
        view.see(step(number, loss=math.nan if number == 8 else 2.0))
    text = drawn(view)
    assert "NaN" in text
    assert "▁×" in text


@pytest.mark.parametrize("width", [60, 72, 100, 200])
def test_the_panel_fits_its_width(width: int) -> None:
    view, _ = screen(Clock(), width)
    for record in records(600):
        view.see(record)
    lines = drawn(view).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= min(width, 110)
    assert any("600/600" in line for line in lines)


def test_lines_of_the_log_are_printed_once_above_the_panel_which_goes_at_the_end() -> None:
    view, terminal = screen(Clock())
    view.see(start())
    view.see(event("compile", 0, 1.0, 11.6, "train step"))
    view.draw()
    view.draw()
    view.close()
    text = terminal.getvalue()
    assert text.count("compile (11.6 s), train step") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert text.rindex("\x1b[2K") > text.rindex("getting ready"), "the panel is gone"


def test_many_lines_draw_the_panel_once() -> None:
    view, terminal = screen(Clock())
    view.see(start())
    view.draw()
    before = len(terminal.getvalue())
    for number in range(20):
        view.see(event("skip", number, 1.0))
    view.draw()
    text = terminal.getvalue()[before:]
    assert all(f"step {number}: skip" in text for number in range(20))
    assert text.count("╰") == 1


def test_a_flood_of_events_is_counted_not_printed() -> None:
    view, _ = screen(Clock())
    view.see(start())
    for number in range(MAX_LINES + 10):
        view.see(event("skip", number, 1.0))
    lines = [line.plain for line in view.take_lines()]
    assert len(lines) == MAX_LINES + 1
    assert lines[-1].strip() == "and 11 more lines"
    assert view.take_lines() == []


def test_after_close_nothing_is_drawn_and_no_thread_is_left() -> None:
    terminal = Terminal()
    live = Live(stream=terminal, clock=Clock(), environ=UTF, width=100, redraw_seconds=60)
    live.see(start())
    live.close()
    before = terminal.getvalue()
    live.see(step(1))
    live.close()
    assert terminal.getvalue() == before
    assert "4.85 M parameters" in before
    assert "systolic-live" not in {thread.name for thread in threading.enumerate()}


def test_a_view_that_saw_nothing_prints_nothing() -> None:
    terminal = Terminal()
    live = Live(stream=terminal, clock=Clock(), environ=UTF, width=100)
    live.close()
    live.see(start())
    assert terminal.getvalue() == ""
    assert "systolic-live" not in {thread.name for thread in threading.enumerate()}


def test_a_terminal_that_is_gone_does_not_end_the_run() -> None:
    view = Screen(stream=Gone(), clock=Clock(), width=100)
    view.see(start())
    view.draw()
    view.see(step(1))
    view.close()


@pytest.mark.parametrize(
    ("environ", "width", "drawing"),
    [
        (UTF, 100, True),
        (UTF, 59, False),
        ({"TERM": "dumb"}, 100, False),
        (UTF | {"COLAB_RELEASE_TAG": "x"}, 100, False),
    ],
)
def test_where_it_draws(environ: dict[str, str], width: int, drawing: bool) -> None:
    assert can_redraw(Terminal(), environ, width) is drawing
    assert not can_redraw(io.StringIO(), environ, width)


def test_in_a_pipe_there_are_lines_without_escapes() -> None:
    stream = io.StringIO()
    live = Live(stream=stream, clock=Clock(), environ=UTF, width=100)
    for record in (start(), step(1), event("compile", 1, 1.0, 2.0, "\x1b[31mred")):
        live.see(record)
    live.close()
    live.see(step(2))
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["start", "train", "event"]
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_thin_out_and_a_bad_loss_is_always_said() -> None:
    clock = Clock()
    stream = io.StringIO()
    plain = Plain(stream=stream, clock=clock)
    plain.see(start(steps=2_500))
    for number in range(1, 2001):
        clock.now += 0.1
        plain.see(step(number, loss=math.nan if 1000 <= number < 1005 else 2.0))
    printed = [line for line in stream.getvalue().splitlines() if line.startswith("train")]
    assert len(printed) == 1 + 1 + 2, (
        "the first, the NaN, and one a minute, however many tenths of the steps"
    )
    assert sum("loss NaN" in line for line in printed) == 1


def test_a_long_evaluation_says_how_far_it_is() -> None:
    clock, stream = Clock(), io.StringIO()
    view = Plain(stream=stream, clock=clock)
    for number in range(12):
        view.see(evaluating(number))
        clock.now += 12.0
    view.see(
        {
            "kind": "eval",
            "step": 7,
            "split": "validation",
            "metrics": {"loss": 1.0},
            "seconds": 12.0,
            "batches": 12,
            "of": 40,
        }
    )
    assert stream.getvalue().splitlines() == [
        "eval    step 7, validation: 5 of 12 batches",
        "eval    step 7, validation: 10 of 12 batches",
        "eval    step 7, validation: loss 1.0000 (12.0 s, 12 of 40 batches)",
    ]


def test_a_stage_that_counts_has_a_line_a_minute_in_a_log() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressLine(stream, "export", environ={}, clock=clock) as progress:
        for number in range(1, 11):
            progress.say(f"weights {10 * number} % of 1.5 GB")
            clock.now += 15.0
        progress.say("comparing")
    assert stream.getvalue().splitlines() == [
        "export: weights 10 % of 1.5 GB, 0 ms",
        "export: weights 50 % of 1.5 GB, 1 m 00 s",
        "export: weights 90 % of 1.5 GB, 2 m 00 s",
        "export: comparing, 2 m 30 s",
    ]


def test_adapters_are_headed_as_a_part_of_their_model() -> None:
    whole = {"name": "sft", "num_parameters": 134_500_000, "total_parameters": 134_500_000}
    assert headline(StartRecord(**whole)) == "sft · 134 M parameters"
    adapted = whole | {"num_parameters": 4_880_000}
    assert headline(StartRecord(**adapted)) == "sft · 4.88 M parameters trained, of 134 M"
    assert headline(StartRecord(name="sft", num_parameters=5)) == "sft · 5 parameters", "of before"


def test_a_run_is_headed_by_the_metric_that_it_is_ranked_by() -> None:
    metrics = {"validation_loss": 0.5, "validation_mae": 0.25, "validation_accuracy": 0.5}
    final = FinalRecord(loss=0.4, metrics=metrics)
    summary = SummaryRecord(steps=1, time={}, final=final)

    def sentence(metric: str) -> str:
        job = JobRecord(job={"evaluation": {"metric": metric}})
        return judge(RunRecord(path=Path("runs/a"), job=job, summary=summary)).sentence

    assert sentence("mae") == "Validation mae 0.2500."
    assert sentence("loss").startswith("Validation accuracy")


def test_the_panel_shows_an_evaluation_while_it_runs() -> None:
    view, _ = screen(Clock())
    view.see(start())
    view.see(evaluating(3))
    assert "evaluating validation: 3 of 12 batches" in drawn(view)
    view.see(step(8))
    assert "evaluating" not in drawn(view)


def evaluating(batches: int) -> dict:
    return {"kind": "evaluating", "step": 7, "split": "validation", "batches": batches, "of": 12}


def test_a_stream_that_is_closed_does_not_end_the_run() -> None:
    stream = io.StringIO()
    plain = Plain(stream=stream, clock=Clock())
    stream.close()
    plain.see(start())


def test_sparkline() -> None:
    assert sparkline([1, 2, 3], 3) == "▁▅█"
    assert sparkline([2, 2], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert sparkline([1, math.nan, math.inf, 3], 4) == "▁××█"
    assert len(sparkline(range(1000), 40)) == 40


def test_a_steep_start_does_not_flatten_the_rest_of_a_sparkline() -> None:
    line = sparkline([100.0, 50.0, *range(38, 0, -1)], 40)
    assert line[:4] == "████"
    assert set(line) == set("▁▂▃▄▅▆▇█")


def test_a_history_stays_small_and_keeps_its_shape() -> None:
    history = BoundedCurve(capacity=16)
    for value in range(10_000):
        history.add(float(value))
    assert len(history.values) <= 16
    assert history.values == sorted(history.values)
    assert history.values[0] < 1000 < 8000 < history.values[-1]


def test_one_line() -> None:
    assert one_line("a\n b\t\x1b[0mc") == "a b ·[0mc"
    assert one_line("x" * 300, 10) == "x" * 9 + "…"
