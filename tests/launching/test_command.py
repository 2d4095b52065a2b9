"""Launches from Python: the functions do what the command lines do, silently."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

import systolic
from systolic import recipes
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.core.reporter import Reporter, reporting
from systolic.job import Job
from systolic.launching.platforms import streamed
from systolic.launching.record import WrittenLaunch
from systolic.launching.state import WRITTEN
from tests.launching.kubectl import stand_in
from tests.launching.made import executable, listed
from tests.launching.test_launch import PLAN, RECIPE
from tests.planning import fabricated

IMAGE = "registry/systolic:1"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def files(folder: Path) -> dict[str, str]:
    """Texts of a launch's files, without the label that each new folder gets, which YAML quotes where it begins with a digit."""
    label = json.loads((folder / "launch.json").read_text())["id"]
    return {
        path.name: path.read_text().replace(f"'{label}'", label).replace(label, "ID")
        for path in folder.iterdir()
        if path.suffix in (".yaml", ".sh")
    }


def test_a_launch_from_python_is_that_of_the_command_it_names(
    capfd: pytest.CaptureFixture[str],
) -> None:
    launched = systolic.launch(
        "digits",
        on=systolic.slice("v5e-16"),
        via="gke",
        image=IMAGE,
        run="gs://bucket/digits",
        spot=True,
        train=["--workers", "4"],
        out=Path("python"),
        steps=30,
    )
    assert capfd.readouterr() == ("", "")
    words = list(launched.record.made_by)
    line = f"launch digits --on v5e-16 --via gke --spot --out python --run gs://bucket/digits '--train=--workers 4' --image {IMAGE} --steps 30"
    assert words == ["systolic", *shlex.split(line)]
    assert launched.record.submitted is None
    assert launched.bill.usd_per_hour == pytest.approx(4.77, abs=0.005)
    assert launched.files[0].read_text().startswith(f"# Made by: systolic {line}\n")
    before = files(Path("python"))
    assert {"jobset.yaml", "free.sh"} == set(before)
    Path("python").rename("before")
    assert main(words[1:]) == 0
    assert files(Path("python")) == before


def test_a_server_from_python_is_that_of_the_command_it_names() -> None:
    launched = systolic.launch_server(
        "gs://bucket/chat", via="gke", image=IMAGE, serve="--context 8192", max_replicas=2
    )
    words = list(launched.record.made_by)
    line = f"launch serve gs://bucket/chat --via gke --image {IMAGE} --max-replicas 2 '--serve=--context 8192'"
    assert words == ["systolic", *shlex.split(line)]
    assert (launched.bill.usd_per_hour, launched.bill.usd_per_hour_most) == (9.6, 19.2)
    before = files(launched.folder)
    launched.folder.rename("before")
    assert main(words[1:]) == 0
    assert files(launched.folder) == before


def test_a_reporter_gets_the_launch_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the other verbs find it; the client's own words stay on stderr."""
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    seen: list[WrittenLaunch] = []

    class Kept(Reporter):
        def update(self, state: WrittenLaunch) -> None:
            assert not (clusters / "calls").exists()
            seen.append(state)

    with reporting(Kept()):
        launched = systolic.launch(
            "digits", on="v5e-16", via="gke", image=IMAGE, run="gs://bucket/x", submit=True
        )
    (before,) = seen
    assert before.record.submitted is None
    assert launched.record.submitted is not None
    (run,) = systolic.launches()
    assert (run.name, run.phase) == ("digits-v5e-16", "submitted")
    assert run.cost is not None
    assert run.cost.usd_per_hour == pytest.approx(19.2)
    assert "".join(systolic.logs(run.name)) == "step 10\n"
    systolic.status(run.name).ask_client()
    stopped = systolic.stop(Path("launches") / run.name)
    assert (stopped.name, stopped.text, stopped.saved) == ("digits-v5e-16", "stopped", True)
    assert systolic.status(run.name).phase == "stopped"
    (clusters / "down").touch()
    with pytest.raises(RunError, match=r"kubectl logs .* failed in"):
        list(systolic.logs(run.name))
    assert capfd.readouterr().out == ""


def test_a_plan_gives_slice_and_options() -> None:
    Path("plan.json").write_text(json.dumps({**PLAN, "options": {"sequence": 512}}))
    common = {"via": "gke", "image": IMAGE, "run": "gs://bucket/lm"}
    launched = systolic.launch("lm", plan="plan.json", **common)
    assert launched.launch.on.name == "v5e-16"
    assert launched.bill.seconds == 4 * 3600
    assert "--sequence 512" in " ".join(launched.command)
    assert "--plan plan.json" in " ".join(launched.record.made_by)
    with pytest.raises(OptionError, match=r"the batch is what plan\.json decides"):
        systolic.launch("lm", plan="plan.json", batch=128, **common)
    with pytest.raises(OptionError, match=r"the plan is in no file, .* out='plan\.json'"):
        systolic.launch("lm", plan=fabricated.plan(), **common)


def test_what_python_gives_is_refused_in_one_line() -> None:
    common = {"on": "v5e-16", "via": "gke", "image": IMAGE, "run": "gs://bucket/x"}
    with pytest.raises(OptionError, match="its options are"):
        systolic.launch("digits", stepz=3, **common)
    with pytest.raises(OptionError, match="restarts is -1; it must be at least 0"):
        systolic.launch("digits", restarts=-1, **common)
    with pytest.raises(NotFoundError, match="did you mean digits"):
        systolic.launch("digit", **common)
    listed("two", commands={"detached": True, "hosts": 2})
    with pytest.raises(OptionError, match="process is 3, but two has 2 here"):
        systolic.logs("two", process=3)
    with pytest.raises(NotFoundError, match="there is no launch 'tow'; did you mean two"):
        systolic.status("tow")
    assert not Path("launches/digits-v5e-16").exists()


def test_a_job_is_refused_since_no_command_names_it() -> None:
    job = recipes.find("digits")({})
    assert isinstance(job, Job)
    with pytest.raises(OptionError, match="it takes the name of a recipe or path/to/file"):
        systolic.launch(job, on="2xcpu", via="local")


def test_a_recipe_file_with_paths_as_they_were_given() -> None:
    Path("mine.py").write_text(RECIPE)
    Path("part.py").write_text("STEPS = 5\n")
    launched = systolic.launch("mine.py:job", on="2xcpu", via="local")
    assert systolic.status(launched.name).phase == WRITTEN
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("some text " * 1000)
    with pytest.raises(OptionError, match="path is texts, a path relative to this folder"):
        systolic.launch("lm", path="texts", on="v5e-4", via="gke", image=IMAGE, run="gs://bucket/x")


CLIENT = """#!{python}
import os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
os.write(1, b"step 10, a half \\xc3")
while not (here / "more").exists():
    time.sleep(0.01)
os.write(1, b"\\xa9\\n")
signal.signal(signal.SIGTERM, lambda *_: (here.joinpath("ended").touch(), sys.exit(1)))
(here / "waits").touch()
time.sleep(600)
"""


def test_a_clients_output_comes_as_it_is_written(tmp_path: Path) -> None:
    """Without waiting for the end of a line; and the client ends with the iterator."""
    client = executable(tmp_path / "bin" / "client", CLIENT)
    output = streamed(tmp_path, [str(client)])
    assert next(output) == "step 10, a half "
    (client.parent / "more").touch()
    assert next(output) == "é\n"
    until = time.monotonic() + 60
    while not (client.parent / "waits").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    output.close()
    assert (client.parent / "ended").exists()
    failing = [sys.executable, "-c", "print('step 10'); raise SystemExit(3)"]
    pieces: list[str] = []
    with pytest.raises(RunError, match="failed in"):
        pieces += streamed(tmp_path, failing)
    assert "".join(pieces) == "step 10\n"


def test_quiet_and_the_short_form_of_follow(capfd: pytest.CaptureFixture[str]) -> None:
    line = "launch digits --on 2xcpu --via local --name two --quiet"
    assert main(shlex.split(line)) == 0
    out = capfd.readouterr().out
    assert "bill     none: runs on this machine\n" in out
    # How it was shown is no part of what was launched.
    assert "submit   systolic launch digits --on 2xcpu --via local --name two --submit\n" in out
    log = listed("mine") / "logs" / "0.log"
    log.parent.mkdir()
    log.write_text("step 10 loss 2.5\nstep 20 loss 2.0\n")
    assert main(["logs", "-f", "mine", "--lines", "1"]) == 0
    assert capfd.readouterr().out == "step 20 loss 2.0\n"
    with pytest.raises(SystemExit, match="0"):
        main(["logs", "mine", "--help"])
    assert "usage: systolic logs" in capfd.readouterr().out
