"""Import: a Bundle holds what the folder held, and is not there unless it is whole and right."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.core.errors import RunError, SystolicError, TakenError
from systolic.core.reporter import Reporter, reporting
from systolic.formats import comparison, importing
from systolic.formats.comparison import Cosine
from systolic.formats.source import Source, open_source
from systolic.job import Sampling
from systolic.runs.bundle.folder import index_of, open_bundle, shards_of
from systolic.runs.bundle.record import FORMAT
from systolic.runs.bundle.tensors import TensorSpec
from tests.formats import folders
from tests.formats.test_source import arrays

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folders.folder(
        tmp_path_factory.mktemp("model") / "small", dtype=torch.bfloat16, shard="20KB"
    )
    (made / "README.md").write_text("---\nlibrary_name: x\nlicense: apache-2.0\n---\n# A model\n")
    return made


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "small"
    systolic.import_model(folder, out, parity=False)
    return out


def test_the_command_compares_and_says_the_error(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    assert main(["import", str(folder), "--out", str(out), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["dtype"] == "bfloat16"
    assert told["parameters"] == sum(p.numel() for p in folders.llama().parameters())
    assert told["bytes"] == 2 * told["parameters"]
    assert 0 < told["parity"]["max_relative"] < 1e-5
    assert told["parity"]["argmax_agreement"] == 1.0
    assert told["parity"]["tokens"] == 256
    record = json.loads((out / "bundle.json").read_text())
    assert record["parity"] == told["parity"]
    assert record["source"] == {
        "kind": "hugging-face",
        "name": "small",
        "digest": open_source(folder).fingerprint(),
        "licence": "apache-2.0",
    }
    origin = json.loads((out / "source" / "config.json").read_text())
    assert origin == json.loads((folder / "config.json").read_text())


def test_figures_of_parity_by_hand() -> None:
    theirs = np.array([[[1.0, -4.0], [2.0, 3.0]]])
    ours = np.array([[[1.5, -4.0, 9.0], [3.5, 3.0, 9.0]]])  # one row of padding in the vocabulary
    found = comparison.compare(ours, theirs, "x 1", 0.3)
    assert (found.max_abs, found.max_relative, found.mean_abs) == (1.5, 0.375, 0.5)
    assert (found.argmax_agreement, found.tokens, found.passed) == (0.5, 2, False)
    assert not comparison.compare(ours * np.nan, theirs, "x 1", 0.3).passed
    assert Cosine.of(np.array([[3.0, 4], [1, 0]]), np.array([[4.0, 3], [2, 0]])) == Cosine(
        mean=0.98, least=0.96
    )


def test_a_bundle_holds_the_same_weights_and_text(folder: Path, bundle: Path) -> None:
    theirs = arrays(open_source(folder), "bfloat16")
    ours = arrays(open_source(bundle), "bfloat16")
    assert set(theirs) == set(ours)
    for path, array in theirs.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(ours[path]))
    texts = [
        systolic.open(path).generate("the capital", tokens=8, sampling=GREEDY, chat=True)
        for path in (folder, bundle)
    ]
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("at_once")
def test_rounding_is_asked_for_and_compared(tmp_path: Path) -> None:
    wide = folders.folder(tmp_path / "wide")
    kept = systolic.import_model(wide, tmp_path / "kept", parity=False)
    assert (kept.dtype, kept.parity, kept.unchecked) == ("float32", None, "not asked for")
    made = systolic.import_model(wide, tmp_path / "narrow", dtype="bf16")
    assert made.dtype == "bfloat16"
    assert made.parity is not None
    assert "with weights rounded to bfloat16" in made.parity.line()
    assert 0 < made.parity.max_relative < comparison.EXACT == made.parity.tolerance


@pytest.mark.usefixtures("at_once")
def test_another_model_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = importing.answers

    def others(source: Source, inputs: Any) -> tuple[np.ndarray, str]:
        outputs, platform = ours(source, inputs)
        return outputs * 1.01, platform

    monkeypatch.setattr(importing, "answers", others)
    for dtype in ("auto", "f32"):
        with pytest.raises(RunError, match="no Bundle was written"):
            systolic.import_model(folder, tmp_path / "out", dtype=dtype)
        assert list(tmp_path.iterdir()) == []
    wide = folders.folder(tmp_path / "wide")
    with pytest.raises(RunError, match="rounded to bfloat16"):
        systolic.import_model(wide, tmp_path / "out", dtype="bf16")


@pytest.mark.usefixtures("at_once")
def test_rows_of_the_probe_pass_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is off by one is seen."""
    config = transformers.MistralConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=90,
    )
    torch.manual_seed(0)
    made = transformers.MistralForCausalLM(config)
    for value in made.parameters():
        torch.nn.init.normal_(value, 0.0, 0.3)
    theirs = folders.folder(tmp_path / "theirs", made)
    found = systolic.import_model(theirs, tmp_path / "bundle").parity
    assert found is not None
    assert found.tokens == 154
    opened: Callable[..., Any] = importing.open_source

    def narrower(path: Path) -> Any:
        source = opened(path)
        return replace(source, model=replace(source.model, window=89))

    monkeypatch.setattr(importing, "open_source", narrower)
    with pytest.raises(RunError, match="no Bundle was written"):
        systolic.import_model(theirs, tmp_path / "other")


def test_ctrl_c_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    class Interrupting(Reporter):
        def stage(self, text: str) -> None:
            if "50 %" in text:
                raise KeyboardInterrupt

    with reporting(Interrupting()), pytest.raises(KeyboardInterrupt):
        systolic.import_model(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(RunError, match=r"File too large.*nothing was left"):
            systolic.import_model(folder, tmp_path / "out", parity=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(TakenError, match="exists"):
        systolic.import_model(folder, tmp_path / "out")


def flipped(bundle: Path, record: dict) -> str:
    file = bundle / "weights.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.write_bytes(raw)
    return "weights.safetensors is damaged"


def cut(bundle: Path, record: dict) -> str:
    file = bundle / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return "bytes and had"


def gone(bundle: Path, record: dict) -> str:
    (bundle / "tokenizer.json").unlink()
    return "lacks tokenizer.json"


def newer(bundle: Path, record: dict) -> str:
    record["format"] = FORMAT + 1
    return f"reads up to {FORMAT}; upgrade"


def foreign(bundle: Path, record: dict) -> str:
    record["kind"] = "macos"
    return "was not written by systolic import"


def planted(bundle: Path, record: dict) -> str:
    record["model"]["type"] = "os.system"
    return "holds a os.system, known are CNN, Decoder"


def outside(bundle: Path, record: dict) -> str:
    record["files"]["../secret"] = {"bytes": 1, "sha256": ""}
    return "outside its folder"


def misfit(bundle: Path, record: dict) -> str:
    record["model"]["layers"] = "three"
    return "does not read in this version"


@pytest.mark.parametrize("damage", [flipped, cut, gone, newer, foreign, planted, outside, misfit])
def test_a_damaged_bundle_is_refused_in_one_line(
    folder: Path, tmp_path: Path, damage: Callable[[Path, dict], str]
) -> None:
    path = tmp_path / "out"
    systolic.import_model(folder, path, parity=False)
    record = json.loads((path / "bundle.json").read_text())
    says = damage(path, record)
    (path / "bundle.json").write_text(json.dumps(record))
    with pytest.raises(SystolicError) as caught:
        systolic.open(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_are_cut_into_files() -> None:
    sizes = {"a": 30, "b": 30, "c": 90, "d": 10}
    planned = [TensorSpec(name=n, shape=(s,), dtype=np.dtype("uint8")) for n, s in sizes.items()]
    shards = shards_of(planned, 64)
    assert [[t.name for t in shard] for shard in shards] == [["a", "b"], ["c"], ["d"]]
    index = json.loads(index_of(["1", "2", "3"], shards))
    assert index["weight_map"] == {"a": "1", "b": "1", "c": "2", "d": "3"}
    assert index["metadata"] == {"total_size": 160}


def test_several_files_are_read_as_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small = lambda planned: shards_of(planned, 20_000)  # noqa: E731
    monkeypatch.setattr("systolic.runs.bundle.folder.shards_of", cut_small)
    systolic.import_model(folder, tmp_path / "out", parity=False)
    files = sorted(file.name for file in (tmp_path / "out").glob("weights-*"))
    assert len(files) > 1
    assert files[0] == f"weights-00001-of-{len(files):05}.safetensors"
    assert len(open_bundle(tmp_path / "out").tensors) == 12


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    child = [sys.executable, "-m", "tests.formats.memory_child", str(tmp_path)]
    done = subprocess.run(child, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    slack = 16_000_000  # the interpreter's own
    assert told["weights"] > 6 * told["largest"]
    assert told["import_above"] < told["largest"] + slack
    assert told["open_above"] < told["weights"] + told["largest"] + slack
    # Of the matrix that is packed: its pages of the file, a copy in its other order, the array, and two as Qwix
    # searches codes.
    packing = 5 * told["matrix"]
    for source in ("packed_folder", "packed_bundle"):
        packed = told[source]
        assert packed["size"] < told["weights"] / 3
        assert packed["size"] + packing + slack < 0.5 * told["weights"]
        assert packed["above"] < packed["size"] + packing + slack
