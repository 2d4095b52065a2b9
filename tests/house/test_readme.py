"""The README's commands are those that CI runs, and what it names is there."""

import ast
import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import systolic
from systolic import recipes
from systolic.cli.main import VERBS, main
from tests.house.budget import ROOT

README = (ROOT / "README.md").read_text()


def commands(text: str) -> list[str]:
    """The lines of the shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("file", [".ci/run", "CONTRIBUTING.md"])
def test_the_test_command_is_the_same_everywhere(file: str) -> None:
    (command,) = [line for line in commands(README) if "pytest" in line]
    assert command in (ROOT / file).read_text().splitlines()


def test_one_command_sets_up_and_trains() -> None:
    assert [line for line in commands(README) if line.endswith("systolic train bytes")]


def test_recipes_and_verbs_are_named() -> None:
    for name in recipes.shipped():
        assert f"`{name}`" in README
    for verb in VERBS:
        assert f"`systolic {verb}" in README or f"`{verb} " in README


def test_links_lead_somewhere() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        if (
            page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT).parts[0]
            in COPIED
        ):
            continue
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_its_python_calls_public_functions_with_arguments_that_they_take() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    owners = {"systolic": systolic, "model": systolic.TrainedModel}
    called = []
    for node in ast.walk(ast.parse(block)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        assert isinstance(node.func.value, ast.Name)
        name, owner = node.func.attr, owners[node.func.value.id]
        if owner is systolic:
            assert name in systolic.__all__
        bound = [None] * (len(node.args) + (owner is not systolic))
        keywords = dict.fromkeys(str(keyword.arg) for keyword in node.keywords)
        inspect.signature(getattr(owner, name)).bind(*bound, **keywords)
        called.append(name)
    assert {"forecast", "plan", "train", "open"} <= set(called)


def test_it_is_short() -> None:
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 900
    for line in re.findall(r"^- `systolic \w+`: (.*)$", README, re.MULTILINE):
        assert len(line.split()) <= 12, line


def test_its_accuracy_is_what_the_command_prints() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "accuracy" / "front.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table, _, rest = printed.partition("\n\n")
    assert table in README
    for kind in ("own program", "rebuilt", "operation", "rebuilt decode step"):
        assert f"| {kind} | all |" in rest
    assert "are forecast to fit." in rest


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["forecast", "plan"])
def test_its_outputs_are_todays(verb: str, tmp_path: Path) -> None:
    """Each line that is shown is printed, but for seconds of this machine."""
    blocks = re.findall(r"```console\n\$ systolic (.*?)\n(.*?)```", README, re.DOTALL)
    ((words, shown),) = [block for block in blocks if block[0].startswith(f"{verb} ")]
    command = [sys.executable, "-m", "systolic", *shlex.split(words), "--quiet"]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert [
        line for line in shown.splitlines() if line != "…" and " ".join(line.split()) not in printed
    ] == []


COPIED = ("changelog.md", "contributing.md", "measurements", "reference")
"""What a build of the site writes into docs."""
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/dependencies.md")
PATH = re.compile(r"`((?:[a-z_.]+/)+(?:[a-z_]+\.(?:py|toml|md|html))?)`")
"""A path in backticks: a folder that ends with a slash, or a file of ours; capitals stand for what the reader has."""


@pytest.mark.slow
def test_its_python_runs(tmp_path: Path) -> None:
    """From the first line to the last in one process; only the sizes are smaller."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    sizes = {
        "sequence=256": "model=Decoder(layers=1, d_model=32, d_ff=64, heads=2, kv_heads=2, head_dim=16), sequence=256",
        "import systolic\n": "import systolic\nfrom systolic.models.decoder.config import Decoder\n",
        "steps=300": "steps=20",
        "tokens=50": "tokens=20",
    }
    for written, small in sizes.items():
        assert written in block
        block = block.replace(written, small)
    (tmp_path / "block.py").write_text(block)
    command = [sys.executable, "block.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "runs" / "first" / "job.json").is_file()


def named_paths() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for path in PATH.findall((ROOT / page).read_text()):
            yield page, path


def test_paths_that_pages_name_are_there() -> None:
    places = (ROOT, ROOT / "src" / "systolic", ROOT / "docs")
    found = list(named_paths())
    assert ("docs/architecture.md", "data/batches.py") in found
    gone = [(page, path) for page, path in found if not any((p / path).exists() for p in places)]
    assert gone == []


def test_the_map_has_a_row_for_each_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| layer | holds |") :].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    packages = [path.parent.name for path in (ROOT / "src" / "systolic").glob("*/__init__.py")]
    assert sorted(rows) == sorted(packages)


def test_a_mistake_reads_as_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    errors = (ROOT / "docs" / "errors.md").read_text()
    block, *_ = re.findall(r"```console\n\$ systolic (.*?)```", errors, re.DOTALL)
    command, shown = block.split("\n", 1)
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err == shown


def systolic_commands() -> list[list[str]]:
    whole = [
        line
        for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line)[1:] for line in whole if line.startswith("systolic ")]
    return [line[: line.index("--")] if "--" in line else line for line in words]


@pytest.mark.parametrize("command", systolic_commands(), ids=lambda words: " ".join(words[:2]))
def test_the_options_of_its_commands_are_in_the_help(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    helps = []
    for words in (command[:1], command[:2]):
        with contextlib.suppress(SystemExit):
            main([*words, "--help"])
        helps.append(capsys.readouterr().out)
    options = {word for word in command if word.startswith("--")}
    known = set(re.findall(r"--[a-z][a-z0-9.-]*", " ".join(helps)))
    assert options
    assert options <= known
