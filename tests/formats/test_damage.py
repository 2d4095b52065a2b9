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
from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.models.families import family
from systolic.runs.bundle.tensors import read_header
from tests.formats import folders


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
        systolic.export(tmp_path / "sound", tmp_path / "new")
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
        "import pathlib, sys, time; from systolic.runs.bundle.folder import draft\n"
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


@pytest.mark.slow
def test_fields_that_are_not_read_are_named(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(copy, frobnicate=1, logits_scaling=8.0, is_causal=False, sliding_window=4)
    says = "fields that are not read: frobnicate, is_causal, logits_scaling, sliding_window;"
    made = systolic.import_model(copy, tmp_path / "out", parity=False)
    assert [says in line for line in made.notes] == [True]
    assert main(["generate", str(copy), "a", "--tokens", "1"]) == 0
    assert says in capfd.readouterr().err
    sizes = ["--sequence", "64", "--quick", "--json"]
    assert main(["forecast", str(copy / "config.json"), "--on", "cpu", *sizes]) == 0
    told = capfd.readouterr()
    assert says in told.err
    assert "random weights" not in told.err


def test_weights_in_blocks_are_refused(copy: Path) -> None:
    change(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(OptionError, match="weights are in gptq and only plain ones are read"):
        systolic.open(copy)


def test_a_second_matrix_of_tied_weights_is_named(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "tied", folders.llama(tie_word_embeddings=True))
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    systolic.import_model(path, tmp_path / "copy", parity=False)
    tensors["lm_head.weight"][7, 3] += 1
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        DataError, match=r"lm_head\.weight that differs from model\.embed_tokens\.weight"
    ):
        systolic.import_model(path, tmp_path / "out", parity=False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_position_embeddings": 0}, "max_position_embeddings of .* is 0; write the tokens"),
        ({"eos_token_id": 999}, "eos_token_id of .* is 999 and the model has 304 tokens"),
    ],
)
def test_numbers_that_a_model_cannot_have_are_named(
    copy: Path, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    (copy / "generation_config.json").unlink()
    change(copy, **fields)
    with pytest.raises(OptionError, match=says):
        systolic.import_model(copy, tmp_path / "out", parity=False)


def test_the_tokenizer_of_another_model_is_refused(copy: Path, tmp_path: Path) -> None:
    file = copy / "tokenizer.json"
    own = json.loads(file.read_text())
    tokens = own["model"]["vocab"]
    file.write_text(json.dumps(own | {"model": own["model"] | {"vocab": {}, "merges": []}}))
    with pytest.raises(DataError, match="has no tokens"):
        systolic.import_model(copy, tmp_path / "out", parity=False)
    more = tokens | {f"w{number}": number for number in range(len(tokens), 400)}
    file.write_text(json.dumps(own | {"model": own["model"] | {"vocab": more}}))
    with pytest.raises(OptionError, match="has 400 tokens and the model 304"):
        systolic.import_model(copy, tmp_path / "out", parity=False)


@pytest.mark.usefixtures("at_once")
def test_a_model_without_its_tokenizer_is_compared_and_says_what_it_lacks(
    copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (copy / "tokenizer.json").unlink()
    assert main(["import", str(copy), "--out", str(tmp_path / "out")]) == 0
    told = capfd.readouterr()
    assert "parity with transformers" in told.out
    assert "next:" not in told.out
    assert "has no tokenizer.json; copy it" in told.err


def test_a_bundle_inside_its_source_is_refused(copy: Path) -> None:
    with pytest.raises(OptionError, match="lies in the source"):
        systolic.import_model(copy, copy / "sub", parity=False)
    assert not (copy / "sub").exists()


def test_a_name_on_a_hub_says_how_to_download(tmp_path: Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"download it with hf download meta-llama/Llama-3\.1-8B"
    ):
        systolic.import_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(NotFoundError, match="does not exist; check the path"):
        systolic.import_model(tmp_path / "none")
