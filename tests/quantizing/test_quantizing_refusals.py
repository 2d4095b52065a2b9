"""Mistakes with ``systolic quantize``: one line, and nothing is written."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from systolic.cli.main import main
from systolic.core.errors import DataError, OptionError
from systolic.data.image.images import Images
from systolic.inference.latency import TimedCall
from systolic.job import MatrixFormat, WeightFormat
from systolic.quantizing.calibration import check_apart
from systolic.quantizing.rounder import Rounder
from tests.formats import folders
from tests.formats.test_sentences import folder as encoder_folder
from tests.quantizing.test_quantizing import matrices
from tests.runs import bundled


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as a Hugging Face folder."""
    return folders.folder(tmp_path_factory.mktemp("source") / "tiny")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--auto"], "a budget needs data to measure the loss on"),
        (["--budget", "1%"], "--budget has an effect with --auto only"),
        (["--auto", "--budget", "half"], "--budget is 'half'; it takes a share such as 0.5%"),
        (["--group", "0"], "group is 0, and int4 has a scale for each group"),
        (["--group", "7"], "--group is 7, and int4 has a scale for each group of inputs; give 32,"),
        (["--to", "fp8", "--group", "64"], "--group is 64, and fp8 has one scale for each output"),
        (
            ["--to", "w8a8", "--group", "64"],
            "--group is 64, and w8a8 has one scale for each output",
        ),
        (["--keep", "nothing"], "--keep nothing fits none of the matrices"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    more: list[str], said: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--to", "int4", "--out", str(out), *more]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["the file", "a copy", "a copy in a folder"])
def test_calibration_by_what_quality_is_measured_on_is_refused(
    place: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held, other = tmp_path / "held.txt", tmp_path / "others" / "copy.txt"
    held.write_text("the capital of France is Paris\n" * 40)
    other.parent.mkdir()
    shutil.copy(held, other)
    (other.parent / "more.txt").write_text("the capital of Spain is Madrid\n" * 40)
    given = {"the file": held, "a copy": other, "a copy in a folder": other.parent}[place]
    int4 = ["quantize", source, "--to", "int4", "--out", tmp_path / "out"]
    said = refused(capsys, *int4, "--data", held, "--calibrate", given)
    assert f"{'held' if given is held else 'copy'}.txt is in --data {held} too: quality" in said
    assert not (tmp_path / "out").exists()


def test_calibration_by_the_held_out_data_of_a_run_is_refused(tmp_path: Path) -> None:
    job = bundled.job("lm", tmp_path)  # which takes some of its training text for validation
    shutil.copytree(tmp_path / "text", tmp_path / "copy")
    with pytest.raises(OptionError, match="is in the held-out data of the run too"):
        check_apart(job, None, tmp_path / "copy")
    (tmp_path / "other.txt").write_text("some other text")
    check_apart(job, None, tmp_path / "other.txt")
    for split in ("train", "val"):
        for label in "ab":
            (tmp_path / "pictures" / split / label).mkdir(parents=True)
            picture = np.random.default_rng(len(split)).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(picture).save(tmp_path / "pictures" / split / label / "0.png")
    of_pictures = replace(job, data=Images(path=tmp_path / "pictures", side=8))
    check_apart(of_pictures, None, tmp_path / "pictures" / "train")
    with pytest.raises(OptionError, match=r"0\.png is in the held-out data of the run too"):
        check_apart(of_pictures, None, tmp_path / "pictures" / "val" / "a")


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("model.layers.1.mlp.down_proj.weight", "blocks/mlp/down", math.nan),
        ("model.layers.1.mlp.down_proj.weight", "blocks/mlp/down", math.inf),
        ("model.norm.weight", "norm/scale", math.inf),  # which is not quantized
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(
    name: str,
    path: str,
    value: float,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(source, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    arrays = load_file(file)
    arrays[name][..., 5] = value
    save_file(arrays, file, {"format": "pt"})
    given = ["--to", "int8", "--out", str(tmp_path / "out"), "--repeats", "0"]
    assert main(["quantize", str(tmp_path / "damaged"), *given]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{path} has weights that are NaN or infinite" in said
    assert [one.name for one in tmp_path.iterdir()] == ["damaged"]


def test_weights_larger_than_scales_are_refused() -> None:
    known, largest = matrices(a=64), np.full((64, 64), np.finfo(np.float32).max)
    how = MatrixFormat(format=WeightFormat.nf4, group=64)
    with pytest.raises(DataError, match="weights of a are too large for scales in bfloat16"):
        list(Rounder(known).codes("a", how, [largest]))


@pytest.mark.slow
def test_the_title_names_no_format_that_no_matrix_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    folders.folder(tmp_path / "narrow", folders.llama(**sizes, num_attention_heads=2))
    given = ["--to", "int4", "--out", str(tmp_path / "out"), "--repeats", "0"]
    assert main(["quantize", str(tmp_path / "narrow"), *given]) == 0
    assert f"{tmp_path / 'out'}: int8, no matrix in int4, in " in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *given: str | Path) -> str:
    """The one line of a command that is refused."""
    assert main([str(one) for one in given]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "--path" not in line
    return line


def test_messages_name_the_options_of_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, some, empty = bundled.run("cnn", tmp_path), tmp_path / "some", tmp_path / "empty"
    some.write_text("some text")
    empty.touch()
    int8 = ["quantize", run, "--to", "int8", "--repeats", "0", "--out", tmp_path / "out"]
    for option, more in (("--data", []), ("--calibrate", ["--activations"])):
        said = refused(capsys, *int8, *more, option, empty)
        assert f"{option} is {empty}, which is empty" in said
    said = refused(capsys, *int8, "--data", some)
    assert f"--data is {some}, but Digits data can't be read from elsewhere" in said
    said = refused(capsys, "compare", run, run, "--data", some)
    assert f"--data is {some}, but Digits data can't be read from elsewhere" in said
    (tmp_path / "folders" / "a").mkdir(parents=True)
    litert = [
        "export",
        run,
        "--to",
        "litert",
        "--precision",
        "int8",
        "--out",
        tmp_path / "out.tflite",
    ]
    said = refused(capsys, *litert, "--data", tmp_path / "folders")
    assert "but Digits data can't be read from elsewhere; leave --data out" in said
    assert "which is empty" in refused(capsys, *litert, "--data", empty)


def test_an_encoder_is_not_asked_for_data_that_it_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)  # of some drawn weights the least cosine is below 0.9
    encoder_folder(tmp_path / "encoder")
    int8 = ["quantize", tmp_path / "encoder", "--to", "int8", "--out", tmp_path / "out"]
    said = refused(capsys, *int8, "--auto")
    assert "leave the budget out: this kind of model has no measure" in said
    long = ["--to", "stablehlo", "--sequence", "100000", "--out", tmp_path / "programs"]
    assert main(["export", *map(str, [tmp_path / "encoder", *long])]) == 2
    (said,) = capsys.readouterr().err.splitlines()  # before weights are read
    assert "--sequence is 100000, and the model takes " in said
    assert main([*map(str, int8), "--repeats", "0"]) == 0
    said = capsys.readouterr().out
    assert "quality was not measured: this kind of model has no measure of it here" in said
    assert re.search(r"mean [0-9.e-]+, cosine 0\.99\d+ in the mean, 0\.9\d+ at least\n", said)
    both = [str(tmp_path / name) for name in ("encoder", "out")]
    assert main(["compare", *both, "--repeats", "0"]) == 0
    (said,) = [one for one in capsys.readouterr().out.splitlines() if "outputs on" in one]
    assert said.startswith("outputs on 6 lines of text: cosine 0.99")


class Huge(TimedCall):
    """A call whose arrays no machine holds."""

    def seconds(self, clock: Callable[[], float]) -> dict[str, float]:
        jax.block_until_ready(jnp.zeros(1 << 50, jnp.uint8))
        return {"call": clock()}

    def sizes(self) -> dict[str, int]:
        return {"rows": 1, "prompt_tokens": 100_000}


def test_a_timed_call_without_memory_is_one_line(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("systolic.comparing.speeds.server_call", lambda *_: Huge())
    given = "--prompt-tokens", "100000", "--repeats", "1"
    said = refused(capsys, "compare", source, source, *given)
    assert "a timed call (rows 1, prompt tokens 100000) needs more memory" in said
    assert said.endswith("B here; lower --prompt-tokens [option]")
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--to", "int8", "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert "largest difference" in shown.out  # what is known is told
    said = shown.err.splitlines()[-1]
    assert said.endswith("all files are written, and systolic compare times smaller calls [option]")
    assert main(["verify", str(out)]) == 0
