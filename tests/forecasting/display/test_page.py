"""The page of a forecast: on its own, nested right, and true to the forecast."""

import json
import re
from dataclasses import replace

import pytest

from systolic.forecasting.display import page as trees
from systolic.forecasting.display.page import render, roofline
from tests.forecasting.display.recorded import dumped, fitting, refused, small
from tests.training.display.test_page import Page

LARGEST = 3_000_000


def spans_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="tree">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("make", [fitting, dumped, refused, small])
def test_the_page_needs_nothing_else(make) -> None:
    text = render(make())
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert len(text) < LARGEST


def test_what_fits_says_how_fast() -> None:
    page = Page(render(fitting()))
    assert "lm on v5e-4 fits" in page.text
    assert "By place in the model" in page.text
    assert "attention" in page.text
    assert "Live buffers at the peak" in page.text
    assert "peak memory is compiled" in page.text


def test_what_does_not_fit_says_by_how_much() -> None:
    page = Page(render(refused()))
    assert "Needs 20.50 GiB, 15.75 GiB available (4.75 GiB over)." in page.text
    assert "12.00 GiB saved activations f32[64,2048,32768]" in page.text
    assert "Time line" not in page.text


def test_what_would_hold_the_memory_is_shown_once() -> None:
    page = Page(render(replace(refused(), memory=fitting().memory)))
    assert "What needs it" in page.text
    assert "saved activations f32[64,2048,32768]" not in page.text


def test_loops_stay_folded() -> None:
    made = spans_of(render(small()))
    (loop,) = [span for span in made["spans"] if len(span) > 11]
    assert loop[11] == 4
    assert len(loop[12]) == 3
    assert loop[3] == pytest.approx(8e6)
    assert made["seconds"] == 12e-3


def test_short_spans_are_left_out_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(trees, "MAX_SPANS", 3)
    made = spans_of(render(small()))
    assert made["hidden"] == 3
    assert made["floor"] == pytest.approx(1.5e-3)


def test_text_from_a_program_is_escaped() -> None:
    text = render(replace(small(), recipe="<script>alert(1)</script>"))
    assert "<script>alert" not in text


def test_dots_lie_below_the_roof_where_the_simulation_does() -> None:
    found = roofline(small())
    assert found is not None
    (dot,) = found.dots
    # 2e11 FLOPs a turn in 1.5 ms from 1e8 bytes: 133 TFLOP/s at 2,000 FLOP/byte.
    assert "133 TFLOP/s at 2 k FLOP/byte" in dot.text
    assert 0 < dot.bottom < 100
    assert found.peak_text == "197 TFLOP/s bf16"


def test_no_roofline_without_flops() -> None:
    assert roofline(refused()) is None
