"""The page for trying models, in a real browser."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from systolic.serving.request import ModelKind
from tests.serving.http.running import Running, echo_model, running, toy_model

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed"),
]


@pytest.fixture
def page(server: Running) -> Iterator[Page]:
    with sync_playwright() as played:
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda said: problems.append(said.text) if said.type == "error" else None
        )
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        yield page
        browser.close()
        assert problems == []
        assert all(url.startswith((server.url, "blob:", "data:")) for url in asked)


def test_a_chat(page: Page) -> None:
    page.select_option("#model", "echo")
    page.click("#settings summary")
    page.fill("#tokens", "12")
    page.fill("#text", "<b>hello</b>")
    page.press("#text", "Enter")
    expect(page.locator("#speed")).to_contain_text("12 tokens")
    turns = page.locator("#log .turn").all_inner_texts()
    # The echo says the prompt again, as the template writes it; markup is shown, not carried out.
    assert turns == ["<b>hello</b>", "<user><b>hel"]
    # A system prompt goes before all turns, whatever was said before.
    page.click("#clear")
    page.click("#settings summary")
    page.fill("#system", "be brief")
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    expect(page.locator("#speed")).to_contain_text("12 tokens")
    assert page.locator("#log .turn").all_inner_texts() == ["hello", "<system>be b"]
    page.click("#settings summary")  # a text that is sent closes them
    page.fill("#tokens", "4000")
    page.fill("#text", "again")
    page.press("#text", "Enter")
    page.click("#stop")
    expect(page.locator("#stop")).to_be_disabled()
    assert page.locator(".error").count() == 0


def test_settings_give_way_to_the_answer_on_a_telephone(page: Page) -> None:
    """390 px wide: open they push the conversation down, and sending closes them."""
    page.set_viewport_size({"width": 390, "height": 700})
    page.select_option("#model", "echo")
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    expect(page.locator("#speed")).to_contain_text("tokens")
    page.click("#settings summary")
    page.fill("#tokens", "12")
    panel, log = (page.locator(one).bounding_box() for one in ("#settings > div", "#log"))
    assert panel is not None
    assert log is not None
    assert panel["y"] + panel["height"] <= log["y"] + 1
    assert panel["x"] >= 0
    assert panel["x"] + panel["width"] <= 390
    page.fill("#text", "again")
    page.press("#text", "Enter")
    assert page.locator("#settings").get_attribute("open") is None
    expect(page.locator("#speed")).to_contain_text("12 tokens")


def test_a_picture(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(red())
    page.select_option("#model", "image")
    page.set_input_files("#file", file)
    page.wait_for_selector(".assistant")
    assert page.locator(".assistant").inner_text().split() == ["cat", "100.0", "%"]
    # The bar is as wide as the share.
    assert page.locator(".bar i").evaluate("i => i.offsetWidth == i.parentElement.offsetWidth")
    assert (
        page.locator("#log img").evaluate("image => image.decode().then(() => image.naturalWidth)")
        == 1
    )


def test_a_recording_and_texts(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(b"RIFF....")
    page.select_option("#model", "transcription")
    page.set_input_files("#file", file)
    page.wait_for_selector(".assistant")
    assert page.locator(".assistant").inner_text() == "Hello world."
    page.select_option("#model", "embedding")
    for number, text in enumerate(("four", "seventy"), 1):
        page.fill("#text", text)
        page.press("#text", "Enter")
        expect(page.locator(".assistant")).to_have_count(number)
    # The toy's vectors are [4, 0, 0, 3] and [7, 0, 0, 3].
    cosine = (4 * 7 + 3 * 3) / 5 / 58**0.5
    assert page.locator(".assistant .classes").inner_text().split() == ["four", f"{cosine:.3f}"]


def test_a_refusal_is_shown_and_the_text_kept(server: Running) -> None:
    with sync_playwright() as played:
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 780})
        page.goto(server.url)
        page.select_option("#model", "echo")
        page.click("#settings summary")
        page.fill("#tokens", "99999")
        page.fill("#text", "a question")
        page.press("#text", "Enter")
        expect(page.locator(".error")).to_contain_text("context is 4096 tokens")
        assert page.input_value("#text") == "a question"
        # On a telephone nothing is wider than the screen.
        for name in ("echo", "image", "transcription", "embedding", "tensors"):
            page.select_option("#model", name)
            expect(page.locator(".turn").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") == 390
        browser.close()


SHOWN = """() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = parts(color).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (parts(color).length === 3) return color;
    }
  };
  const found = [];
  const note = (element, text, color) => {
    const [low, high] = [light(color), light(behind(element))].sort((one, other) => one - other);
    found.push([text.trim().slice(0, 30), (high + 0.05) / (low + 0.05)]);
  };
  for (const element of document.body.querySelectorAll("*:not(script, option)")) {
    if (!element.checkVisibility()) continue;
    const text = [...element.childNodes].filter(one => one.nodeType === 3).map(one => one.data).join("");
    if (text.trim()) note(element, text, getComputedStyle(element).color);
    if (element.placeholder) note(element, element.placeholder, getComputedStyle(element, "::placeholder").color);
    if (element.matches("select, input:not([type=file])")) note(element, element.id, getComputedStyle(element).color);
  }
  return found;
}"""
"""What can be read on the page, each with the contrast to what is behind it (WCAG 2.2, 1.4.3)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_in_both_schemes(scheme: Literal["light", "dark"], tmp_path: Path) -> None:
    long, word = "organisation-of-a-long-name/model-of-a-long-name-1.7B-instruct", "x" * 300
    models = [echo_model(long), *(toy_model(kind, kind.value) for kind in ModelKind)]
    sound, picture = tmp_path / f"{'recording' * 9}.wav", tmp_path / f"{'picture' * 9}.png"
    sound.write_bytes(b"RIFF....")
    picture.write_bytes(red())
    with running(models) as server, sync_playwright() as played:
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 375, "height": 667}, color_scheme=scheme)

        def fits(*told: str) -> None:
            assert page.evaluate("document.documentElement.scrollWidth") == 375
            log = page.locator("#log").evaluate("log => [log.scrollWidth, log.clientWidth]")
            assert log[0] == log[1]
            found = page.evaluate(SHOWN)
            assert {text for text, _ in found} >= set(told)
            assert [one for one in found if one[1] < 4.5] == []

        page.goto(server.url)
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark != "rgb(255, 255, 255)") == (scheme == "dark")
        fits("Clear", "Settings", "Ask something", "Send")
        page.click("#settings summary")
        fits("Temperature", "Most tokens", "API key")
        page.fill("#tokens", "700")
        page.fill("#text", word)
        page.press("#text", "Enter")
        expect(page.locator("#speed")).to_contain_text("700 tokens")
        page.click("#settings summary")
        page.fill("#tokens", "99999")
        page.fill("#text", word)
        page.press("#text", "Enter")
        expect(page.locator(".error")).to_be_visible()
        fits(word[:30])
        for kind, file in (("image", picture), ("transcription", sound)):
            page.select_option("#model", kind)
            fits("choose a file")
            page.set_input_files("#file", file)
            expect(page.locator(".assistant")).to_be_visible()
            fits(file.name[:30])
        page.select_option("#model", "embedding")
        for text in (word, "short"):
            page.fill("#text", text)
            page.press("#text", "Enter")
        expect(page.locator(".classes")).to_be_visible()
        fits(word[:30], "short")
        page.select_option("#model", "tensors")
        expect(page.locator("table")).to_be_visible()
        fits("FP32")
        browser.close()


def red() -> bytes:
    """A PNG of one red pixel."""

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(b"\0\xff\0\0"))
        + part(b"IEND", b"")
    )


def test_a_text_of_a_model_that_knows_no_chat() -> None:
    with (
        running([replace(echo_model("plain"), template=None)]) as server,
        sync_playwright() as played,
    ):
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        page.click("#settings summary")
        page.fill("#tokens", "4")
        page.fill("#text", "hello")
        page.press("#text", "Enter")
        expect(page.locator("#speed")).to_contain_text("4 tokens")
        # The first of the prompt's tokens, which the echo says again, is the document's.
        assert page.locator("#log .turn").all_inner_texts() == ["hello", "hel"]
        browser.close()


def test_a_model_that_is_ready_later_is_listed() -> None:
    with running([echo_model("first")]) as server, sync_playwright() as played:
        browser = played.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#model option")).to_have_text(["first"])
        page.fill("#text", "half a questi")
        second = echo_model("second")
        second.start()
        server.state.registry.put(second)
        expect(page.locator("#model option")).to_have_text(["first", "second"], timeout=20_000)
        expect(page.locator("#text")).to_have_value("half a questi")
        browser.close()
