"""The README's picture shows a run and loads nothing."""

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

from docs.pictures import picture, picture_of_command
from tests.training.display.fabricate_run import records, summary, write_run


def words_of(svg: str) -> str:
    ElementTree.fromstring(svg)
    addresses = re.findall(r"https?://[^\"\s]+|@import|@font-face", svg)
    assert addresses == ["http://www.w3.org/2000/svg"]
    return unescape(re.sub(r"<[^>]+>", "", svg)).replace("\xa0", " ")


def test_the_picture_of_a_command() -> None:
    text = words_of(picture_of_command(["recipes"]))
    assert "systolic recipes" in text
    assert "fashion" in text


def test_the_picture_of_a_run(tmp_path: Path) -> None:
    svg = picture(write_run(tmp_path, records(), summary(tmp_path)))
    text = words_of(svg)
    for words in (
        "systolic train bytes --steps 3000",
        "2,550/3,000",
        "beats gzip",
        "27 % less",
        "sample",
    ):
        assert words in text, words
