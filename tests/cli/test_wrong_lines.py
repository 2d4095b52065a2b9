"""Two hundred wrong command lines over all options of all verbs: one line each, and none is accepted."""

from pathlib import Path

import pytest

from systolic.cli.main import main
from tests.cli.wrong import Wrong, wrong_lines

NUMBER = 200


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Wrong]:
    folder = tmp_path_factory.mktemp("wrong")
    text = folder / "text file.txt"
    text.write_text("a file with a space in its name\n" * 100)
    small = ["--model.layers", "1", "--model.d-model", "32", "--model.d-ff", "32", "--model.ngrams"]
    size = [*small, "0", "--steps", "1", "--sequence", "32", "--evaluation.batches", "1"]
    run = folder / "a run"
    assert main(["train", "lm", "--path", str(text), *size, "--run", str(run), "--json"]) == 0
    return wrong_lines(run, text, NUMBER, seed=0)


@pytest.mark.parametrize("index", range(NUMBER))
def test_a_wrong_command_line_is_refused_in_one_line(
    lines: list[Wrong],
    index: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    args, why = lines[index]
    code = main(list(args))
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("systolic:")]
    assert code in (1, 2), f"accepted: systolic {' '.join(args)} ({why})"
    assert len(told) == 1, f"systolic {' '.join(args)} ({why}): {told}"
    assert not list(tmp_path.iterdir()), f"left something: systolic {' '.join(args)} ({why})"
