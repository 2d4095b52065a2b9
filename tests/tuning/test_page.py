"""The page of a study in a browser, wide and narrow."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from systolic.tuning.answer import Repeated
from systolic.tuning.display.page import write_page
from tests.tuning.test_trials import RATES, tuning, work

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]
WORDS = ["--search=dropout=0.1,0.2", "--search=batch=8,16", "--search=checkpoints.every=4,8"]
WORDS += ["--search=evaluation.every=4,8", RATES, "--search=scale=0.5..1.0"]


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of Chromium; messages on its console are errors."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as played:
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = browser.new_page()
        made.on("pageerror", lambda error: problems.append(str(error)))
        made.on("console", lambda said: problems.append(said.text))
        yield made
        browser.close()
    assert problems == []


CUT = """
() => [...document.querySelectorAll("main *")].filter(one => {
    const box = one.getBoundingClientRect();
    return box.width && !one.closest("svg") && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map(one => one.outerHTML.slice(0, 90))
"""
"""Elements that a window cuts off."""


def opened(page: Any, file: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_page_fits_wide_and_narrow_windows(page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    made = tuning(folder, *WORDS, "--trials=4", "--sampler=random", "--objective=max:accuracy")
    # As in a longer search.
    weights = {one.name: 1 / len(made.searched) for one in made.searched}
    repeats = Repeated(
        trial=0, aim=made.aims[0], seeds=2, best=(0.97, 0.9), default=(0.91, 0.88)
    ).to_json()
    found = replace(work(made), importance=weights, repeats=repeats)
    file = write_page(made.with_command(found), folder)
    for width in (1300, 360, 320):
        opened(page, file, width)
        assert page.evaluate(CUT) == []
        # An option is not broken after its dashes.
        (word,) = page.locator(".note .word").all()
        assert word.inner_text() == "--repeats"
        assert word.evaluate("one => one.getClientRects().length") == 1
        panels = page.locator(".slices figure")
        assert panels.locator("figcaption").all_inner_texts() == [one.name for one in made.searched]
        # A dot for each trial in each panel, and the best ringed.
        assert [each.locator("b").count() for each in panels.all()] == [4] * 6
        assert [each.locator("b.best").count() for each in panels.all()] == [1] * 6
        assert panels.nth(0).locator(".words span").all_inner_texts() == ["0.1", "0.2"]
    opened(page, file, 1300)
    # The names of the axes don't overlap.
    boxes = [each.bounding_box() for each in page.locator(".parallel em").all()]
    assert len(boxes) == 7
    for left, right in itertools.pairwise(boxes):
        assert left["x"] + left["width"] <= right["x"]
    assert page.locator("path.so-far").get_attribute("d")
    accuracies = [row.figures["accuracy"] for row in found.rows]
    assert page.locator(".trials tr:nth-child(2) td").nth(7).inner_text() == (
        f"{max(accuracies) * 100:.1f} %"
    )
    page.locator("td a").first.click()
    assert page.locator("header .kicker").inner_text().startswith("Systolic")
    assert page.url.endswith(f"trials/{found.best.number:04d}/report.html")


def test_one_option_has_a_plot_and_commands_wrap_between_words(page: Any, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    words = ["--evaluation.every", "4", "--checkpoints.every", "8", "--dropout", "0.2"]
    made = tuning(folder, RATES, "--trials=3", "--sampler=random", *words)
    file = write_page(made.with_command(work(made)), folder)
    for width in (1300, 360):
        opened(page, file, width)
        assert page.locator(".parallel").count() == 0
        panel = page.locator(".slices .plot")
        assert panel.count() == 1
        # A logarithmic axis: its ticks are powers of ten, equally far apart.
        assert panel.locator("i.x").all_inner_texts() == ["0.0001", "0.001", "0.01", "0.1"]
        places = [each.bounding_box()["x"] for each in panel.locator("i.x").all()]
        gaps = [right - left for left, right in itertools.pairwise(places)]
        assert max(gaps) - min(gaps) < 1
        spans = page.locator(".commands code span")
        assert spans.all_inner_texts()[:2] == ["systolic", "train"]
        # An option is not cut after its dashes: each is on one line.
        for each in spans.all():
            if each.inner_text().startswith("--"):
                assert each.evaluate("one => one.getClientRects().length") == 1
                assert each.bounding_box()["height"] < 30
    ticks = page.locator(".plot").first.locator("i.x").all_inner_texts()
    assert ticks == ["0", "1", "2"]
