"""Names of launches, the options that their commands give, and the output: a summary, and the files where they are asked for."""

import json
from pathlib import Path

import pytest

from tests.launching.test_launch import GKE, RECIPE, SERVE, TPU, run


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("on", ["cpu", "1xcpu", "8xcpu"])
def test_a_launch_has_the_name_of_what_was_typed(
    on: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for via in ("local", "docker"):
        told = json.loads(run(f"launch digits --on {on} --via {via} --out {via} --json", capsys)[0])
        assert told["name"] == {"cpu": "digits-1xcpu"}.get(on, f"digits-{on}")


def test_recipes_whose_long_names_begin_alike_have_launches_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One name would be one run: the second recipe would find it trained."""
    stem = "an_experiment_with_a_very_long_name_"
    text = RECIPE.replace("import part\n", "").replace("part.STEPS", "5")
    for end in "ab":
        Path(f"{stem}{end}.py").write_text(text + "\n\ndef other():\n    return job()\n")
    told = [
        json.loads(run(f"launch {target} --on 2xcpu --via local --json", capsys)[0])
        for target in (f"{stem}a.py:job", f"{stem}b.py:job", f"{stem}b.py:other")
    ]
    names = [one["name"] for one in told]
    assert len(set(names)) == len({one["run"] for one in told}) == 3
    assert all(len(name) <= 40 and name.endswith("-2xcpu") for name in names)


def test_an_option_that_was_typed_is_given_at_its_default_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run may have begun with another value, which a continued run keeps where none is given."""
    line = "launch digits --on 2xcpu --via local --label-smoothing 0.1 --steps 30 --json"
    told = json.loads(run(line, capsys)[0])
    command = json.loads((Path(told["folder"]) / "local.json").read_text())["command"]
    place = command.index("--label-smoothing")
    assert command[place + 1] == "0.1"
    assert "--schedule.warmup" not in command


@pytest.mark.parametrize(
    "line",
    [
        f"{GKE} --on v5e-16 --out launches/x",
        f"{SERVE} --out launches/x",
        f"{TPU} --on v5e-16 --zone us-west4-a --out launches/x",
        "launch mine.py:job --on 8xh100 --via slurm --out launches/x",
    ],
)
def test_the_files_are_printed_after_the_summary_where_asked(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(RECIPE)
    Path("part.py").write_text("STEPS = 5\n")
    short, _ = run(line, capsys)
    assert len(short.splitlines()) < 20
    names = short.partition("--show prints ")[2].partition("\n")[0].split(", ")
    out, _ = run(f"{line} --show", capsys)
    for name in names:
        text = (Path("launches/x") / name).read_text().rstrip()
        assert f"\n── launches/x/{name}\n{text}\n" in out
        # A header names what was launched, not how it was shown.
        assert "--show" not in text
    assert out.startswith(short.partition("         --show prints")[0])
    assert out.splitlines()[-2:] == short.splitlines()[-2:]
    assert "leave one of them out" in run(f"{line} --show --json", capsys, 2)[1]
