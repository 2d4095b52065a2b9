"""Commands of the guides: each page's blocks run as a reader types them, and shown output has the words of the real one.

A ``console`` block holds commands after ``$`` and their output; an ``sh`` block commands alone, whose output a ``text`` block
may show; a block with a caption is a file of that name. Blocks of the class ``not-run`` need hardware, a platform or minutes,
those of a class such as ``exits-1`` end with that exit code, and ``needs-PIL`` names a package without which a block is left out.
"""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
BLOCK = re.compile(r"^```(\{code-block\} )?(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"^:(\w+): (.*)\n", re.MULTILINE)
WORD = re.compile(r"[A-Za-z][A-Za-z-]{2,}")
OWN = (
    "fits",
    "slow",
    "does-not-learn",
    "own-model",
    "own-data",
    "fine-tune",
    "checkpoints",
    "functions",
    "several-hosts",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Fenced block of a page."""

    language: str
    text: str
    caption: str
    classes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Exit code of its commands."""
        return next((int(name[6:]) for name in self.classes if name.startswith("exits-")), 0)

    @property
    def steps(self) -> list[tuple[str, list[str]]]:
        """Commands, each with the lines of output that the page shows."""
        if self.language == "sh":
            return [(self.text, [])]
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found and found[-1][0].endswith("\\"):
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif found:
                found[-1][1].append(line)
        return found


def blocks_of(page: str) -> list[Block]:
    """Blocks of a page, in its order."""
    found = []
    for match in BLOCK.finditer((GUIDES / f"{page}.md").read_text()):
        options = dict(OPTION.findall(match[3])) if match[1] else {}
        text = OPTION.sub("", match[3]).lstrip("\n") if match[1] else match[3]
        found.append(
            Block(
                language=match[2],
                text=text,
                caption=options.get("caption", ""),
                classes=tuple(options.get("class", "").split()),
            )
        )
    return found


def can_run(block: Block) -> bool:
    """Whether this machine can run a block: it is meant to run, and the packages are installed that ``needs-NAME`` names."""
    if "not-run" in block.classes:
        return False
    needed = [name.removeprefix("needs-") for name in block.classes if name.startswith("needs-")]
    return all(importlib.util.find_spec(name) for name in needed)


def words(text: str) -> set[str]:
    """Words of a text, without those that ``…`` cuts."""
    return set(WORD.findall(re.sub(r"\S*…\S*", " ", text)))


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Environment of a reader in a checkout, with ``systolic`` on the path; settings go into the test's folder."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, start in (("python", ""), ("systolic", "-m systolic ")):
        command = tools / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n')
        command.chmod(0o755)
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    own = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "COLUMNS": "90",
    }
    return {**os.environ, **own}


@pytest.mark.slow
@pytest.mark.parametrize("page", OWN)
def test_commands_of_a_guide_run_as_shown(page: str, tmp_path: Path, shell: dict[str, str]) -> None:
    count, output = 0, ""
    for block in blocks_of(page):
        if block.caption:
            (tmp_path / block.caption).parent.mkdir(exist_ok=True)
            (tmp_path / block.caption).write_text(block.text)
        if block.language == "text" and can_run(block):
            assert not words(block.text) - words(output), f"{block.text}\nnot in\n{output}"
        if block.language not in ("sh", "console") or not can_run(block):
            continue
        for command, shown in block.steps:
            ended = subprocess.run(
                ["bash", "-e", "-c", command],
                cwd=tmp_path,
                env=shell,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            output = ended.stdout + ended.stderr
            assert ended.returncode == block.exit_code, f"{command}\n{output}"
            missing = words("\n".join(shown)) - words(output) - words(output.replace("-\n", "-"))
            assert not missing, f"{command}\nnot in its output: {sorted(missing)}\n{output}"
            count += 1
    assert count


@pytest.mark.parametrize("page", OWN)
def test_pages_have_a_length_that_is_read(page: str) -> None:
    text = BLOCK.sub("", (GUIDES / f"{page}.md").read_text())
    assert 200 <= len(text.split()) <= 900
