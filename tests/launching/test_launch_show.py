"""Output of ``systolic launch``: a summary, and the files where they are asked for."""

from pathlib import Path

import pytest

from tests.launching.test_launch import GKE, RECIPE, SERVE, TPU, run


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


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
