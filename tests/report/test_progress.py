"""What is redrawn in place: cut to the terminal, above a log that stays, and never in the way of a pipe."""

import io
import os
import sys

import pytest
from rich.console import Console
from rich.text import Text

from systolic.report.progress import LiveArea, ProgressLine, bar
from tests.training.display.test_live import UTF, Gone, Terminal


def test_a_bar_is_full_in_proportion_and_beside_its_words() -> None:
    for completed, total, full in ((0, 8, 0), (4, 8, 12), (8, 8, 24), (0, 0, 0)):
        console = Console(file=io.StringIO(), width=80, force_terminal=True)
        with console.capture() as captured:
            console.print(bar(completed, total, Text("4 of 8")))
        painted = captured.get()
        colour = "\x1b[32m" if completed and completed == total else "\x1b[36m"
        assert painted.partition(colour)[2].partition("\x1b")[0].count("━") == full
        assert painted.endswith("  4 of 8\n")


def test_a_line_that_ticks_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", "70")
    stream = Terminal()
    with ProgressLine(stream, "lm", environ=UTF, clock=lambda: 1.0) as progress:
        progress.say("compiling " + "x" * 100)
        while "compiling" not in stream.getvalue():
            pass
    lines = stream.getvalue().split("\r\x1b[K")
    assert {len(line) for line in lines if line} == {69}


def test_a_log_stays_above_the_lines_that_are_redrawn() -> None:
    stream = Terminal()
    with LiveArea(stream, environ=UTF, width=80) as area:
        assert not stream.getvalue(), "nothing is touched before there is something to draw"
        area.draw(Text("one of two"), [Text("began")])
        area.draw(Text("two of two"))
    area.draw(Text("late"))
    text = stream.getvalue()
    assert text.index("began") < text.index("one of two") < text.index("two of two")
    assert "late" not in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is back and the lines are gone"


def test_elsewhere_nothing_is_drawn_and_a_closed_terminal_ends_no_work() -> None:
    for stream in (io.StringIO(), Gone()):
        with LiveArea(stream, environ=UTF, width=80) as area:
            assert area.drawn is isinstance(stream, Gone)
            area.draw(Text("one"))
            area.draw(Text("two"), [Text("log")])
        assert not stream.getvalue()


def test_what_is_piped_away_stays_in_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    out, screen = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", screen)
    with LiveArea(screen, environ=UTF, width=80) as area:
        area.draw(Text("working"))
        print("a result")
        print("a warning", file=sys.stderr)
    assert out.getvalue() == "a result\n"
    assert "a warning" in screen.getvalue()
    assert "a result" not in screen.getvalue()
