"""The page of a run: complete, safe, small, and on its own."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from systolic.core.errors import RunError
from systolic.report import pages
from systolic.report.pages import columns, is_even
from systolic.runs.record import load_run
from systolic.training.display.page import (
    MAX_EVENTS,
    MAX_TERMS,
    TABLE_ROWS,
    render,
    tiles,
    write_report,
)
from systolic.training.ledger import Spent
from tests.training.display.fabricate_run import (
    JOB,
    SAMPLE,
    event,
    failed_records,
    records,
    start,
    summary,
    write_run,
)

VOID = {"meta", "input", "br", "link", "img", "hr"}


class Page(HTMLParser):
    """Checks nesting while it parses; keeps tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(path: Path, lines: list[dict], end: dict | None = None) -> tuple[str, Page]:
    text = render(load_run(write_run(path, lines, end)))
    return text, Page(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    path = tmp_path_factory.mktemp("run")
    return page_of(path, records(), summary(path))


def test_nothing_is_loaded_from_anywhere(whole: tuple[str, Page]) -> None:
    text, page = whole
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not {"src", "href", "action"} & {name for name, _ in page.attributes}


def test_it_is_small(whole: tuple[str, Page]) -> None:
    assert len(whole[0].encode()) < 300_000


def test_figures_verdict_and_commands(whole: tuple[str, Page]) -> None:
    text = whole[1].text
    for words in (
        "beats gzip",
        "27 % less",
        "validation bits per byte 1.9206",
        "103 k tokens/s",
        "bad steps 4",
        "last of 2 sessions",
        "systolic train bytes --steps 3000",
        "signal 15",
        "jaxlib 0.10.2",
    ):
        assert words in text, words


def test_every_chart_has_a_curve_inside_its_frame(whole: tuple[str, Page]) -> None:
    text, _ = whole
    assert re.findall(r'<figure class="chart" data-key="([^"]+)"', text) == [
        *("loss", "term-accuracy", "learning_rate", "grad_norm", "throughput", "data_wait")
    ]
    for figure in text.split('<figure class="chart"')[1:]:
        paths = re.findall(r' d="([^"]+)"', figure.partition("</figure>")[0])
        assert paths
        for path in paths:
            places = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)
            assert places
            assert all(-1 <= float(x) <= pages.WIDTH + 1 for x, _ in places)


def test_thousands_of_records_are_thinned_and_that_is_said(whole: tuple[str, Page]) -> None:
    text, page = whole
    assert "3,000 records, thinned: the lowest and highest of every 10 are drawn." in page.text
    raw = re.findall(r'<path class="raw" d="([^"]+)"', text)
    assert max(path.count("L") + path.count("M") for path in raw) <= 3 * pages.BUCKETS
    records_json = re.search(r'id="records">(.*?)</script>', text)
    assert records_json is not None
    hover = json.loads(records_json[1])
    assert len(hover["x"]) == TABLE_ROWS
    assert (hover["x"][0], hover["x"][-1]) == (1, 3000)
    assert {len(column) for column in hover["columns"].values()} == {TABLE_ROWS}


def test_losses_that_are_not_numbers_are_marked_and_counted(whole: tuple[str, Page]) -> None:
    text, page = whole
    assert "3 records with a loss that is not a number (red marks)." in page.text
    assert text.count('<i class="bad"') >= 2
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)


def test_a_run_of_nothing_but_nan(tmp_path: Path) -> None:
    lines = [
        line | {"loss": math.nan, "grad_norm": math.inf} if line["kind"] == "train" else line
        for line in records(120)
        if line["kind"] != "eval"
    ]
    text, page = page_of(tmp_path, lines)
    assert 'data-key="loss"' in text
    assert "120 records with a loss that is not a number" in page.text


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    lines = [
        start() | {"name": evil},
        event("kernel", 0, 1.76e9, 1.0, evil),
        {"kind": "sample", "step": 1, "time": 1.76e9, "prompt": evil, "text": SAMPLE + evil},
    ]
    path = tmp_path / "<b>&run"
    text, page = page_of(path, lines)
    assert page.tags.count("script") == 2, "the records and the page's own"
    assert "<script>alert" not in text
    assert "<banners>" not in text
    assert "<b>banners</b>" in page.text
    assert "\x1b" not in text
    assert JOB["job"]["data"]["path"] in page.text


def test_an_unfinished_run(tmp_path: Path) -> None:
    text, page = page_of(tmp_path, records()[:700])
    assert "unfinished" in page.text
    assert "Added up from the records, because there is no summary." in page.text
    assert 'data-key="loss"' in text
    assert "–" not in page.text.partition("Job")[0]


def test_a_failed_run(tmp_path: Path) -> None:
    _, page = page_of(tmp_path, failed_records())
    assert "the loss of step 1000 is not a number" in page.text
    assert "systolic train --replay" in page.text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    text, page = page_of(tmp_path, [start()])
    assert "No training step is on record." in page.text
    assert 'class="tiles"' not in text


def test_a_run_without_any_record(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    (tmp_path / "environment.json").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    assert "unfinished" in Page(render(load_run(tmp_path))).text


def test_one_step(tmp_path: Path) -> None:
    lines = records(120)
    text, _ = page_of(tmp_path, lines[:3])
    path = re.search(r'<path class="smooth" d="(M[^"]+h0)"', text)
    assert path is not None, "a dot"


def test_many_events_samples_and_damage_are_cut_and_said(tmp_path: Path) -> None:
    lines = [start()]
    lines += [event("skip", i, 1.76e9 + i, 0.0, "x" * 500) for i in range(1000)]
    lines += [
        {"kind": "sample", "step": i, "time": 1.76e9 + i, "prompt": "", "text": "y" * 9000}
        for i in range(50)
    ]
    write_run(tmp_path, lines)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    text = render(load_run(tmp_path))
    page = Page(text)
    assert len(text.encode()) < 300_000
    for words in (
        f"the last {MAX_EVENTS} of 1,000",
        "trouble: 750 more are not drawn.",
        "the last 6 of 50",
        "(5,000 characters more)",
        "line 1052 of metrics.jsonl is damaged and left out.",
    ):
        assert words in page.text, words


def test_a_task_with_many_terms(tmp_path: Path) -> None:
    extra = {f"part_{i}": 0.5 for i in range(12)}
    lines = [line | extra if line["kind"] == "train" else line for line in records(600)]
    text, page = page_of(tmp_path, lines)
    assert text.count('data-key="term-') == MAX_TERMS
    assert "Without a chart, in metrics.jsonl only: part_7, part_8" in page.text
    assert len(text.encode()) < 300_000


def test_the_same_run_makes_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path, records(120), summary(tmp_path))
    path = write_report(tmp_path)
    first = path.read_bytes()
    write_report(tmp_path)
    assert path.read_bytes() == first


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, records(120))
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RunError, match="could not be written"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 3000.0, ["0", "1,000", "2,000", "3,000"]),
        (1.2, 1.4, ["1.20", "1.25", "1.30", "1.35", "1.40"]),
        (0.0, 1e-3, ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        (5.0, 5.0, ["4.6", "4.8", "5.0", "5.2", "5.4"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in pages.linear_axis(low, high).ticks] == labels


@pytest.mark.parametrize(("low", "high"), [(1.3, 1.35), (1.3, 6), (0.001, 1e5), (1e-12, 1.0)])
def test_a_log_axis_has_a_few_ticks_inside(low: float, high: float) -> None:
    axis = pages.log_axis(low, high)
    assert 2 <= len(axis.ticks) <= 9
    assert all(0 <= axis.place(value) <= 1 for value, _ in axis.ticks)


def test_thinning_keeps_the_extremes_and_the_gaps() -> None:
    points = [(float(i), math.sin(i / 50)) for i in range(5000)]
    points[1234] = (1234.0, 9.0)
    points[4000] = (4000.0, math.nan)
    thinned = pages.thin(points)
    assert len(thinned) <= 2 * pages.BUCKETS + 1
    assert (1234.0, 9.0) in thinned
    assert sum(math.isnan(y) for _, y in thinned) == 1
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_smoothing_passes_over_a_spike() -> None:
    points = [(float(i), 100.0 if i == 500 else 1.0) for i in range(1000)]
    assert {y for _, y in pages.smooth(points)} == {1.0}


@pytest.mark.parametrize("trouble", [{}, {"bad_steps": 0}, {"bad_steps": 0, "recompiles": 0}])
def test_the_rows_of_key_figures_are_full(tmp_path: Path, trouble: dict) -> None:
    found = tiles(load_run(write_run(tmp_path, records(), summary(tmp_path) | trouble)))
    assert len(found) >= 6
    assert is_even(len(found)), [tile.label for tile in found]
    assert not any(tile.value == "0" for tile in found), "no trouble is no figure"


def test_columns_of_key_figures() -> None:
    assert [columns(number)[0] for number in (0, 1, 5, 6, 8, 9, 10, 12, 15)] == [
        *(1, 1, 5, 3, 4, 3, 5, 4, 5)
    ]
    assert [number for number in range(1, 17) if not is_even(number)] == [7, 11, 13, 14]


def test_one_spike_among_few_values_does_not_flatten_them() -> None:
    steady = [10.0 + 0.1 * number for number in range(12)]
    low, high, above = pages.span_of([*steady, 4000.0])
    assert (low, above) == (10.0, 1)
    assert high < 12
    assert pages.span_of(steady) == (10.0, pytest.approx(11.1), 0)
    assert pages.span_of([8.0, 5.0, 4.0, 3.4, 3.1, 3.0, 2.9, 2.8]) == (2.8, 8.0, 0), "a loss falls"


def test_the_parts_of_the_time_have_colours_of_their_own(whole: tuple[str, Page]) -> None:
    hues = {one.value: pages.TIMES[one.value] for one in Spent}
    assert len(set(hues.values())) == len(hues)
    for kind, hue in hues.items():
        assert re.search(rf"\.{hue} \{{ --tone: var\(--{hue}\)", whole[0]), kind
        assert len(re.findall(rf"--{hue}: #", whole[0])) == 2, f"{kind}: light and dark"
