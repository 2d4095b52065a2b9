"""The JSON of a forecast, and what changed between two."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from systolic.core.errors import DataError, OptionError, SystolicError
from systolic.forecasting import comparison
from systolic.forecasting.comparison import ForecastChanges
from systolic.forecasting.display import text
from systolic.report import terminal
from systolic.report.progress import ProgressLine
from tests.forecasting.display.recorded import fitting, refused, small


def test_layers_sum_to_the_time_of_the_core() -> None:
    made = fitting().to_json()
    busy = sum(made["time_by_resource"].values()) - made["time_by_resource"]["idle"]
    assert sum(made["time_by_layer"].values()) == pytest.approx(busy, rel=1e-6)
    assert made["top_ops"][0]["seconds"] >= made["top_ops"][-1]["seconds"] > 0


def test_json_survives_a_file(tmp_path: Path) -> None:
    made = fitting().to_json()
    path = tmp_path / "a.json"
    path.write_text(json.dumps(made))
    assert comparison.read(path) == made


def test_a_compile_is_recorded_alike_whether_or_not_the_program_fits() -> None:
    fits, too_large = (forecast.to_json()["compiler"] for forecast in (fitting(), refused()))
    assert fits == too_large
    assert {"jax", "stages", "flags"} <= set(fits)
    assert (fits["program"], fits["seconds"], fits["cached"]) == ("recorded", 0.5, True)


@pytest.mark.parametrize(
    ("content", "kind"), [("", DataError), ("[1, 2]", OptionError), ('{"run": "x"}', OptionError)]
)
def test_another_file_is_no_forecast(
    tmp_path: Path, content: str, kind: type[SystolicError]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(kind, match="forecast") as refused_by:
        comparison.read(path)
    assert type(refused_by.value) is kind


def test_a_forecast_does_not_differ_from_itself() -> None:
    made = fitting().to_json()
    changes = ForecastChanges.of(made, made).figures
    assert {change.group for change in changes} == {""}
    assert all(change.ratio == 0 for change in changes)


def test_what_changed() -> None:
    before = small().to_json()
    after = json.loads(json.dumps(before))
    after["step_seconds"] = 9e-3
    after["time_by_resource"]["hbm"] = 0.0
    after["time_by_layer"]["unnamed fusion"] = 0.0
    changes = {(c.group, c.name): c for c in ForecastChanges.of(before, after).figures}
    assert changes["", "step"].ratio == pytest.approx(-0.25)
    assert changes["time by resource", "hbm"].before == pytest.approx(3e-3)
    assert changes["time by layer", "unnamed fusion"].after == 0.0
    assert ("time by resource", "mxu") not in changes


def test_against_what_does_not_fit() -> None:
    figures = ForecastChanges.of(small().to_json(), refused().to_json()).figures
    changes = {c.name: c for c in figures}
    assert changes["step"].after is None
    assert changes["peak memory"].after == (20 << 30) + (1 << 29)


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("make", [fitting, refused, small])
def test_a_forecast_fits_one_screen(make, width: int) -> None:
    notes = tuple(f"note {n} " + "long " * 40 for n in range(9))
    shown = terminal.plain(text.lines(replace(make(), notes=notes), width))
    assert len(shown) <= 23
    assert max(map(len, shown)) <= width
    assert "notes" in "\n".join(shown)


def test_a_stream_that_is_no_terminal_gets_no_colour() -> None:
    stream = io.StringIO()
    text.print_forecast(small(), stream=stream, environ={}, width=80)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("small on v5e-4")


def test_progress_in_a_log_is_a_line_a_stage() -> None:
    stream, now = io.StringIO(), iter([0.0, 1.0, 61.0])
    with ProgressLine(stream, "lm", environ={}, clock=lambda: next(now)) as progress:
        for stage in ("tracing", "tracing", "", "compiling"):
            progress.say(stage)
    assert stream.getvalue() == "lm: tracing, 1.0 s\nlm: compiling, 1 m 01 s\n"


def test_a_long_stage_in_a_log_has_a_line_now_and_then() -> None:
    stream = io.StringIO()
    with ProgressLine(stream, "lm", environ={}, clock=lambda: 1.0, beat_seconds=0.001) as progress:
        progress.say("compiling")
        while stream.getvalue().count("\n") < 3:
            pass
    assert set(stream.getvalue().splitlines()) == {"lm: compiling, 0 ms"}


def test_a_call_shows_nothing_before_it_takes_long() -> None:
    for stream in (io.StringIO(), Terminal()):
        now = iter([0.0])
        with ProgressLine(
            stream,
            "f",
            environ={"TERM": "xterm"},
            clock=lambda now=now: next(now, 5.0),
            quiet_seconds=10,
        ) as progress:
            progress.say("tracing")
            progress.say("compiling")
        assert stream.getvalue() == ""
    stream = io.StringIO()
    with ProgressLine(stream, "f", environ={}, quiet_seconds=0.001) as progress:
        progress.say("compiling")
        while not stream.getvalue():
            pass
    assert stream.getvalue().startswith("f: compiling, ")


class Terminal(io.StringIO):
    encoding = "utf-8"  # ty: ignore

    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_goes_away() -> None:
    stream = Terminal()
    with ProgressLine(stream, "lm", environ={"TERM": "xterm"}, clock=lambda: 1.0) as progress:
        progress.say("tracing")
        while "tracing" not in stream.getvalue():
            pass
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_lines_that_stay_are_above_the_one_that_ticks() -> None:
    stream, out = Terminal(), io.StringIO()
    with ProgressLine(stream, "changes", environ={"TERM": "xterm"}, clock=lambda: 1.0) as progress:
        progress.told("one", out, "1 of 2")
        while "1 of 2" not in stream.getvalue():
            pass
        progress.told("two", out, "2 of 2")
    assert out.getvalue() == "one\ntwo\n"
    quiet = io.StringIO()
    with ProgressLine(quiet, "changes", environ={}, clock=lambda: 1.0) as progress:
        progress.told("one", out, "1 of 2")
    assert quiet.getvalue() == "", "a log has the lines that stay"
