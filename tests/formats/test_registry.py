"""Each line of the registry names a function that is there, and each format is known by the same file everywhere."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from systolic.core.errors import OptionError
from systolic.formats.command import export
from systolic.formats.registry import (
    BUNDLE_FILE,
    FRAMEWORKS,
    MODEL_WRITERS,
    MODELS,
    PROGRAM_WRITERS,
    ExportSettings,
    LiteQuantization,
    framework_format,
    function_of,
    in_files,
    known_source,
    model_format,
)
from systolic.formats.source import open_source
from systolic.runs.bundle.folder import MANIFEST


def test_functions_take_what_they_are_called_with() -> None:
    for form in MODELS:
        names = list(inspect.signature(function_of(form.read)).parameters)
        assert names == (["folder", "base"] if form.has_base else names[:1]), form.kind
    for form in FRAMEWORKS:
        assert len(inspect.signature(function_of(form.read)).parameters) == 3, form.kind
    for form in MODEL_WRITERS.values():
        names = list(inspect.signature(function_of(form.write)).parameters)
        assert names == ["source", "out", "options", "say"], form
    for form in PROGRAM_WRITERS.values():
        names = list(inspect.signature(function_of(form.write)).parameters)
        assert names == ["model", "examples", "out", "settings", "say"], form
        if form.check:
            assert list(inspect.signature(function_of(form.check)).parameters) == ["settings"]


def test_the_command_line_has_every_format() -> None:
    choices = typing.get_args(inspect.unwrap(export).__annotations__["to"])
    assert sorted(choices) == sorted([*MODEL_WRITERS, *PROGRAM_WRITERS, "docker"])


def test_names_of_files() -> None:
    assert BUNDLE_FILE == MANIFEST


def kind_of(path: Path) -> str | None:
    form = model_format(path)
    return None if form is None else form.kind


def test_formats_are_told_apart(tmp_path: Path) -> None:
    def kind(name: str, **files: bytes) -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        for file, content in files.items():
            (folder / file.replace("_json", ".json").replace("_bin", ".bin")).write_bytes(content)
        return kind_of(folder)

    assert kind("bundle", bundle_json=b"{}", config_json=b"{}") == "bundle"
    assert kind("peft", adapter_config_json=b"{}", config_json=b"{}") == "peft"
    (tmp_path / "peft" / "model.safetensors").write_bytes(b"")
    assert kind_of(tmp_path / "peft") == "hugging-face", "it has a whole model beside its adapters"
    assert kind("ct2", model_bin=(6).to_bytes(4, "little"), config_json=b"{}") == "ctranslate2"
    assert kind("hf", model_bin=(7).to_bytes(4, "little"), config_json=b"{}") == "hugging-face"
    assert kind("nothing") is None
    for name, wanted in (("a.gguf", "gguf"), ("a.pt", "torchvision"), ("a.pth", "torchvision")):
        (tmp_path / name).write_bytes(b"")
        assert kind_of(tmp_path / name) == wanted
        assert in_files(tmp_path / name)
        (tmp_path / "folder" / name).mkdir(parents=True)
        assert not known_source(tmp_path / "folder" / name)
    (tmp_path / "a.onnx").write_bytes(b"")
    assert known_source(tmp_path / "a.onnx"), "so that opening it says what to do"
    assert not in_files(tmp_path / "gone")
    (tmp_path / "hf" / "job.json").write_bytes(b"")
    assert known_source(tmp_path / "hf")
    assert not in_files(tmp_path / "hf"), "a run"


def test_frameworks_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    found = {
        source: form.kind if (form := framework_format(source)) else None
        for source in ("a.py", "a.py:model", "a.pt2", "a.keras", str(tmp_path), "a.pt", "a")
    }
    assert found == {
        "a.py": "function",
        "a.py:model": "function",
        "a.pt2": "torch-export",
        "a.keras": "keras",
        str(tmp_path): "saved-model",
        "a.pt": None,
        "a": None,
    }


def test_a_path_of_no_format_names_them(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        open_source(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} is no model in a format known here; give a Bundle (with bundle.json), "
        "a PEFT folder (with adapter_config.json), a CTranslate2 folder (with model.bin), "
        "a Hugging Face folder (with config.json), a GGUF file or a state dict of torchvision (.pth, .pt)"
    )
    with pytest.raises(OptionError, match=r"--base is base and .* is no PEFT folder; leave it out"):
        open_source(tmp_path, Path("base"))


def test_settings_of_one_format_are_refused_by_others() -> None:
    ExportSettings(quantization=LiteQuantization.int8).check_format("litert")
    with pytest.raises(OptionError, match="--precision is int8, which only --to litert has"):
        ExportSettings(quantization=LiteQuantization.int8).check_format("onnx")
    with pytest.raises(OptionError, match="--function is encode, and --to stablehlo has all"):
        ExportSettings(function="encode").check_format("stablehlo")
    ExportSettings(function="encode").check_format("onnx")


def test_programs_of_torch_are_read_with_torch_jax_and_numpy_alone() -> None:
    code = "import sys; sys.modules['msgspec'] = sys.modules['flax'] = sys.modules['tyro'] = None;"
    code += "from systolic.formats.torch import exported_program"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
