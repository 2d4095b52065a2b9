"""Names of launches, and the options that their commands give."""

import json
from pathlib import Path

import pytest

from tests.launching.test_launch import RECIPE, run


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
