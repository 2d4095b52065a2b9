"""Files that are damaged, or say something else than they hold, end an import in one line."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import systolic
from systolic.artifact.tensors import read_header
from systolic.cli.main import main
from systolic.core.errors import DataError, OptionError
from systolic.models.families import family
from tests.interop import folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(folder: Path, **fields: Any) -> None:
    """Fields of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_damaged_bundle_is_not_imported_again(folder: Path, tmp_path: Path) -> None:
    systolic.import_model(folder, tmp_path / "sound", parity=False)
    file = tmp_path / "sound" / "weights.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"weights\.safetensors is damaged"):
        systolic.import_model(tmp_path / "sound", tmp_path / "new", parity=False)
    with pytest.raises(DataError, match=r"weights\.safetensors is damaged"):
        systolic.export_model(tmp_path / "sound", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(copy: Path, tmp_path: Path, bad: float) -> None:
    file, name = copy / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = safetensors.numpy.load_file(file)
    tensors[name] = tensors[name].copy()
    tensors[name][3, 2] = bad
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DataError, match=rf"^{name} of .* holds NaN or infinity"):
        systolic.import_model(copy, tmp_path / "out", parity=False)
    assert not (tmp_path / "out").exists()


def longer(header: dict[str, Any], data: bytes) -> bytes:
    return data + b"x"


def shared(header: dict[str, Any], data: bytes) -> bytes:
    header["b"]["data_offsets"] = [0, 12]
    return data


def gap(header: dict[str, Any], data: bytes) -> bytes:
    header["b"]["data_offsets"] = [20, 32]
    return data + b"1234"


@pytest.mark.parametrize("damage", [longer, shared, gap])
def test_files_that_safetensors_refuses_are_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any], bytes], bytes]
) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones(4, np.float32), "b": np.ones(3, np.float32)}, file)
    raw = file.read_bytes()
    assert set(read_header(file)[0]) == {"a", "b"}
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = damage(header, raw[8 + length :])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(file, "np"):
        pass
    with pytest.raises(DataError, match="damaged"):
        read_header(file)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rope_parameters": "x"}, "rope_parameters is 'x'; it takes an object"),
        ({"rope_parameters": None, "rope_scaling": [2]}, r"rope_scaling is \[2\]; it takes an"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta is 0; it takes a number above 0"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'; it takes a number"),
    ],
)
def test_a_wrong_value_of_rotary_embeddings_is_named(
    folder: Path, fields: dict[str, Any], says: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    with pytest.raises(OptionError, match=f"^{says}"):
        family(config, "config.json").model(config)


def test_the_draft_of_a_killed_import_is_removed_by_the_next(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    draft = (
        "import pathlib, sys, time; from systolic.artifact.bundle import draft\n"
        f"with draft(pathlib.Path({str(out)!r})) as made:\n"
        "    made.add('weights', b'1234'); print('ready', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", draft], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        (kept,) = tmp_path.glob(".out.draft-*")
        systolic.import_model(folder, out, parity=False)
        assert kept.is_dir(), "another process still writes it"
        child.kill()
    shutil.rmtree(out)
    systolic.import_model(folder, out, parity=False)
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_the_next_command_can_be_pasted(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my model's"
    assert main(["import", str(folder), "--out", str(out), "--no-parity"]) == 0
    line = capfd.readouterr().out.splitlines()[-1]
    assert line.startswith("next: systolic generate ")

    assert shlex.split(line)[2:4] == ["generate", str(out)]
