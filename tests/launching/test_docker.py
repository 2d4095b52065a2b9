"""Docker: the build folder passes hadolint, Docker's client parses the commands, and they fit every machine of the catalogue."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import ChipKind
from systolic.core.errors import OptionError
from systolic.launching import Purchase, prepare
from tests.launching.made import HEADER, executable, launch, shellcheck, slices


def made(on: str = "8xcpu", **fields: Any) -> Any:
    return prepare("docker", launch(on, **{"run": "/home/me/runs/lm", "user": "7:8", **fields}))


def test_all_machines_agree_with_the_catalogue() -> None:
    alone = [one for one in slices() if one.num_hosts == 1]
    assert {one.chip.kind for one in alone} == {ChipKind.cpu, ChipKind.gpu, ChipKind.tpu}
    for on in alone:
        words = made(on.name).submit[-1]
        gpus = words[words.index("--gpus") + 1] if "--gpus" in words else ""
        assert gpus == (str(on.num_chips) if on.chip.kind is ChipKind.gpu else ""), on.name
        assert ("--privileged" in words) == (on.chip.kind is ChipKind.tpu), on.name
        count = f"XLA_FLAGS=--xla_force_host_platform_device_count={on.num_devices}"
        assert (count in words) == (on.chip.kind is ChipKind.cpu), on.name


def test_the_container_trains_as_the_user_into_their_folder() -> None:
    prepared = made(paths=("/data/texts",), restarts=3)
    assert prepared.ships
    words = prepared.submit[-1]
    assert words[words.index("--user") + 1] == "7:8"
    assert "--restart" not in words
    assert "/home/me/runs/lm:/runs/lm" in words
    assert "/data/texts:/data/texts:ro" in words
    assert words[-11:] == (
        "lm",
        "bash",
        "train.sh",
        "systolic",
        "train",
        "lm",
        "--steps",
        "10",
        "--run",
        "/runs/lm",
        "--continue",
    )
    assert [one[:3] for one in prepared.submit] == [
        ("mkdir", "-p", "/home/me/runs/lm"),
        ("docker", "build", "--platform"),
        ("docker", "run", "--detach"),
    ]
    assert "systolic.launch=0a1b2c3d" in words


def test_the_files_say_what_made_them_and_pass_hadolint(tmp_path: Path) -> None:
    files = made("8xh100").files
    assert all(HEADER in text[:100] for text in files.values())
    assert "JAX_PLATFORMS=cuda,cpu" in files["Dockerfile"]
    checker = shutil.which("hadolint", path=f"{Path(sys.executable).parent}") or shutil.which(
        "hadolint"
    )
    if checker is None:
        pytest.skip("hadolint is not installed")
    (tmp_path / "Dockerfile").write_text(files["Dockerfile"])
    done = subprocess.run([checker, tmp_path / "Dockerfile"], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


TRAINING = """#!{python} -IS
import pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
codes = (here / "codes").read_text().split()
(here / "codes").write_text(" ".join(codes[1:]))
with (here / "calls").open("a") as out:
    out.write(" ".join(sys.argv[1:]) + "\\n")
if codes[0] == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (here / "ready").touch()
    time.sleep(60)
sys.exit(int(codes[0]))
"""


def entry(folder: Path, codes: str, restarts: int = 2) -> list[str]:
    """Runs the container's script with a stand-in for the training that exits with these codes, one after another."""
    (folder / "train.sh").write_text(made(restarts=restarts).files["train.sh"])
    (folder / "codes").write_text(codes)
    (folder / "calls").write_text("")
    executable(folder / "training", TRAINING)
    return ["bash", str(folder / "train.sh"), str(folder / "training"), "train", "a b"]


@pytest.mark.parametrize(
    ("codes", "code", "starts", "text"),
    [
        ("0", 0, 1, ""),
        ("1 139 0", 0, 3, "failed with exit code 139, restart 2 of 2"),
        ("1 1 7", 7, 3, "no restarts left"),
        ("2 0", 2, 1, "rejected its command line"),
        ("1 2 0", 2, 2, "rejected its command line"),
    ],
)
def test_the_container_starts_a_failed_training_again_and_not_a_refused_one(
    tmp_path: Path, codes: str, code: int, starts: int, text: str
) -> None:
    environ = os.environ | {"SYSTOLIC_WAIT_SECONDS": "0"}
    words = entry(tmp_path, codes)
    done = subprocess.run(words, env=environ, text=True, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert (tmp_path / "calls").read_text() == "train a b\n" * starts


def test_a_stop_of_the_container_lets_the_training_save(tmp_path: Path) -> None:
    with subprocess.Popen(entry(tmp_path, "waits 0")) as running:
        while not (tmp_path / "ready").exists():
            assert running.poll() is None
            time.sleep(0.02)
        running.terminate()
        assert running.wait(timeout=60) == 143
    assert (tmp_path / "calls").read_text() == "train a b\n"


def test_the_script_passes_shellcheck(tmp_path: Path) -> None:
    entry(tmp_path, "")
    shellcheck(tmp_path / "train.sh")
    (tmp_path / "container.sh").write_text(made().files["container.sh"])
    shellcheck(tmp_path / "container.sh")


CALLED = (
    "docker ps --all --quiet --filter label=systolic.launch=0a1b2c3d",
    """docker ps --all --filter name=^/?lm$ --format '{{.Label "systolic.launch"}},{{.State}}'""",
    "docker container inspect --format {{.State.Status}} 0a1b2c3d",
    "docker logs --tail 200 --follow 0a1b2c3d",
    "docker stop 0a1b2c3d",
    "docker rm 0a1b2c3d",
)
"""Commands of ``container.sh``."""


def test_dockers_own_client_takes_the_words(tmp_path: Path) -> None:
    """Without an engine the client fails when it connects, after it has parsed the command."""
    if shutil.which("docker") is None:
        pytest.skip("Docker's client is not installed")
    for on in ("8xcpu", "8xh100", "v5e-8"):
        prepared = made(on)
        commands = [
            *prepared.submit[1:],
            prepared.status,
            prepared.state,
            *(shlex.split(line) for line in CALLED),
        ]
        for words in commands:
            words = [words[0], "--host", f"unix://{tmp_path}/none", *words[1:]]
            done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True)
            assert "unknown" not in done.stderr, done.stderr
            assert "ockerfile" in done.stderr or "connect" in done.stderr, (words, done.stderr)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"on": "v5e-16"}, "v5e-16 has 4 hosts, but docker runs on this machine"),
        ({"on": "16xh100"}, "16xh100 has 2 hosts"),
        ({"run": "gs://bucket/x"}, "docker trains into a folder"),
        ({"purchase": Purchase.spot}, "docker rents no chips"),
        ({"name": "Large"}, "--name large"),
    ],
)
def test_mistakes_are_one_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        made(**fields)
    assert "\n" not in str(caught.value)
