"""``systolic explain`` and ``systolic plan`` of a program that is started, with the real compiler."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from systolic.chips import slice
from systolic.cli.main import main

ROOT = Path(__file__).parents[2]
TRAINER = [sys.executable, str(ROOT / "examples/plain_trainer.py"), "--layers", "2"]


def test_explain_names_causes_by_the_mesh_of_the_program(capsys, tmp_path: Path) -> None:
    assert main(["explain", "--on", "v5e-8", "--json", "--", *TRAINER]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["program"], made["slice"], made["quick"]) == ("train_step", "v5e-8", True)
    causes = {one["name"]: one for one in made["causes"]}
    assert "exposed-collectives-data" in causes  # the axis that the program's own mesh has
    assert causes["exposed-collectives-data"]["advice"]
    shares = [one["share"] for one in made["causes"]]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < share <= 1 for share in shares)
    text = json.dumps(made["causes"])
    assert "--layout" not in text  # no option of ours is one of this program
    assert "plain_trainer.py" in text


def test_explain_of_a_dump_says_what_it_says_of_the_program(capsys, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ["--on", "v5e-8", "--json"]
    assert main(["forecast", *words, "--quick", "--keep", str(kept), "--", *TRAINER]) == 0
    capsys.readouterr()
    assert main(["explain", str(kept / "program0.txt"), *words]) == 0
    of_dump = json.loads(capsys.readouterr().out)
    assert main(["explain", *words, "--", *TRAINER]) == 0
    of_program = json.loads(capsys.readouterr().out)
    seconds = [
        {one["name"].split("-data")[0].split("-other")[0]: one["seconds"] for one in made["causes"]}
        for made in (of_dump, of_program)
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert main(["explain", str(kept / "program0.txt"), "--on", "v5e-8"]) == 0
    assert "problems found" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_explains_and_plans_its_example(capsys, monkeypatch) -> None:
    page = (ROOT / "docs/your-own-program.md").read_text()
    lines = re.findall(r"^systolic ((?:explain|plan) .*plain_trainer.*)$", page, re.MULTILINE)
    assert len(lines) == 2
    monkeypatch.chdir(ROOT)
    for line in lines:
        words = [sys.executable if word == "python" else word for word in shlex.split(line)]
        assert main(words) == 0
    shown = capsys.readouterr().out
    assert "problems found" in shown
    assert all(name in shown for name in ("2xv5e-8", "cheapest", "fastest"))


def test_plan_ranks_slices_by_the_same_work(capsys, tmp_path: Path) -> None:
    # Each device has four examples: a step on sixteen does twice the work of one on eight.
    program = tmp_path / "train.py"
    text = (ROOT / "examples/plain_trainer.py").read_text()
    assert '"--batch", type=int, default=32' in text
    program.write_text(text.replace("default=32", "default=4 * jax.device_count()"))
    table = tmp_path / "table.csv"
    words = ["plan", "--on", "v5e-16,v5e-8", "--csv", str(table)]
    command = [sys.executable, str(program), "--layers", "2"]
    assert main([*words, "--json", "--", *command]) == 0
    made = json.loads(capsys.readouterr().out)
    by_slice = {one["slice"]: one for one in made["candidates"]}
    large, small = by_slice["v5e-16"], by_slice["v5e-8"]
    assert "0.5 on v5e-8" in made["notes"][0]
    assert large["steps_per_second"] == pytest.approx(1 / large["step_seconds"])
    assert small["steps_per_second"] == pytest.approx(0.5 / small["step_seconds"], rel=0.02)
    hourly = slice("v5e-8").usd_per_hour.on_demand
    assert hourly is not None
    usd = hourly * 1e6 / small["steps_per_second"] / 3600
    assert small["usd_per_million_steps"] == pytest.approx(usd)
    assert made["best"] == made["cheapest"] == made["candidates"][0]["slice"]
    assert made["fastest"] == "v5e-16"
    assert table.read_text().startswith("slice,chips,")


def test_plan_lists_slices_where_the_program_fails(capsys, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    text = (ROOT / "examples/plain_trainer.py").read_text()
    program.write_text(
        text.replace(
            "mesh = Mesh", "assert len(jax.devices()) < 16, 'too many devices'\nmesh = Mesh"
        )
    )
    words = ["plan", "--on", "v5e-16,v5e-8,v5e-1", "--goal", "time"]
    assert main([*words, "--", sys.executable, str(program), "--layers", "2"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[2].startswith("v5e-8 ")
    assert "fastest" in lines[2]
    assert lines[4].startswith("v5e-16")
    assert "AssertionError: too many devices" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["explain", "lm", "--on", "v5e-8", "--"], "lm is explained, or the program behind --"),
        (["explain", "--on", "v5e-8,v5e-16", "--", "python"], "systolic plan --on v5e-8,v5e-16"),
        (["forecast", "--on", "v5e-8,v5e-16", "--", "python"], "systolic plan --on v5e-8,v5e-16"),
        (["plan", "--on", "v5e-8", "--goal", "energy", "--", "python"], "rank by cost or time"),
        (["plan", "--on", "v5e-8,h100", "--", "false"], "captured for TPU slices only"),
        (["plan", "--on", "v5e-8", "--", "no-such-python"], "there is no command 'no-such-pyth"),
    ],
)
def test_lines_that_are_refused(words: list[str], says: str, capsys) -> None:
    assert main(words) != 0
    told = capsys.readouterr()
    assert says in " ".join((told.err + told.out).split())
