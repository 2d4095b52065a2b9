"""Command lines of the feature pages, which no test executes: their verbs and options exist."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--[a-z][\w.-]*")
PAGES = (
    "bundles",
    "exporting",
    "launching",
    "quantization",
    "serving",
    "tuning",
    "width-transfer",
    "your-own-program",
)


def command_lines(text: str) -> list[list[str]]:
    """Words of each ``systolic`` command in the shell blocks, without what follows ``--``."""
    lines = [
        line.removeprefix("$ ")
        for block in BLOCK.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    split = [shlex.split(line, comments=True) for line in lines if line.startswith("systolic ")]
    return [words[1 : words.index("--") if "--" in words else None] for words in split]


def unknown_options(words: list[str]) -> list[str]:
    """Options that are neither in the help of the verb nor in that of a shipped recipe."""
    verb = "-".join(words[:2]) if words[1:2] == ["serve"] else words[0]
    helps = [GOLDEN / "help" / f"{verb}.txt", *(GOLDEN / "train").glob("*.txt")]
    known = set(OPTION.findall("".join(path.read_text() for path in helps)))
    options = [OPTION.match(word) for word in words]
    return [option[0] for option in options if option and option[0] not in known]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_known_options(page: str) -> None:
    commands = command_lines((ROOT / "docs" / f"{page}.md").read_text())
    assert commands
    assert {" ".join(words): unknown_options(words) for words in commands} == {
        " ".join(words): [] for words in commands
    }


def test_an_option_that_is_gone_is_reported() -> None:
    (words,) = command_lines("```sh\nsystolic plan serve MODEL --tpots 50ms\n```\n")
    assert unknown_options(words) == ["--tpots"]
