"""The vocabulary of charts: colours, dots, ticks; and their pages in a browser, wide and narrow."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from systolic.forecasting.display import page as forecast_page
from systolic.planning.display import page as plan_page
from systolic.report import pages
from systolic.runs.record import load_run
from systolic.sim.timeline import Resource
from systolic.training.display import page as run_page
from tests.forecasting.display.recorded import fitting, refused
from tests.planning.fabricated import plan
from tests.training.display.fabricate_run import records, summary, write_run

CHROMIUM = Path("/usr/bin/chromium")
STYLES = (Path(pages.__file__).parent / "assets" / "charts.css").read_text()
HUES = {*pages.RESOURCES.values(), *pages.MEMORY.values(), *pages.TIMES.values()}


@pytest.mark.parametrize("hue", sorted(HUES | {pages.hue(n) for n in range(20)} - {"over"}))
def test_a_colour_has_a_light_and_a_dark_value(hue: str) -> None:
    if hue == "over":  # the page's own red
        assert ".over { --tone: var(--bad); }" in STYLES
        return
    assert f".{hue} {{ --tone: var(--{hue}); }}" in STYLES
    light, dark = re.findall(rf"--{hue}: (#[0-9a-f]{{6}});", STYLES)
    assert light != dark


def test_every_resource_and_kind_of_buffer_has_a_colour() -> None:
    assert set(pages.RESOURCES) == {one.value for one in Resource}
    held = fitting().memory
    assert held is not None
    assert {buffer.kind for buffer in held.buffers} | set(held.by_kind) <= set(pages.MEMORY)


def test_more_things_than_colours_share_the_last() -> None:
    assert [pages.hue(n) for n in (0, pages.COLOURS - 1)] == ["c0", "c8"]
    assert {pages.hue(n) for n in (pages.COLOURS, 99, -1)} == {"cx"}


def test_a_dot_beyond_the_axis_lies_on_its_edge() -> None:
    x, y = pages.linear_axis(0, 10), pages.linear_axis(1, 2)
    places = [(dot.left, dot.bottom) for v in (0, 1.5, 9) if (dot := pages.dot(x, y, 5, v, ""))]
    assert places == [(50, 0), (50, 50), (50, 100)]


def test_only_axes_with_long_labels_are_crowded() -> None:
    assert not pages.log_axis(1e-4, 1e-1).is_crowded
    assert pages.log_axis(10, 1e8).is_crowded


def test_marks_a_pixel_apart_are_one() -> None:
    assert pages.spread([1.0, 1.1, 1.2, 5.0]) == [1.0, 1.2, 5.0]


PAGES: dict[str, Callable[[Path], str]] = {
    "forecast": lambda _: forecast_page.render(fitting()),
    "refused": lambda _: forecast_page.render(replace(refused(), memory=fitting().memory)),
    "plan": lambda path: plan_page.render(plan(), Path("plan.json"), root=path),
    "run": lambda path: run_page.render(
        load_run(write_run(path / "run", records(), summary(path / "run")))
    ),
}


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of Chromium; messages on its console are errors."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as played:
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("console", lambda message: problems.append(message.text))
        yield opened
        browser.close()
    assert problems == []


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_tells_what_is_under_the_pointer(
    name: str, page: Any, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "page.html"
    file.write_text(PAGES[name](tmp_path))
    for width in (1200, 360):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width
        ticks = page.locator(".plot:visible i.x span:visible")
        boxes = [one.bounding_box() for one in ticks.all()]
        for left, right in itertools.pairwise(boxes):
            same = abs(left["y"] - right["y"]) < 1 and right["x"] > left["x"]
            assert not same or left["x"] + left["width"] <= right["x"]
        mark = page.locator(".plot b, .bar i").first
        text = mark.get_attribute("aria-label")
        assert text
        mark.hover()
        shown = page.locator(".tip").inner_text()
        assert "".join(shown.split()) == "".join(text.replace(": ", "", 1).split())
