"""A run of any kind as a Bundle: it answers as the run did, without the run, and says where it comes from."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import systolic
from systolic import recipes
from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.data.arrays import Arrays
from systolic.data.audio import Recordings
from systolic.job import Adapter, Job, Layout
from systolic.runs.bundle.folder import MANIFEST, model_record
from systolic.runs.bundle.record import BundleRecord, ImportedFrom, read_job, sealed, write_job
from systolic.steps.tasks import Transcription
from tests.formats.outlines import outline
from tests.models import speech
from tests.runs import bundled
from tests.training import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a small network on digits, and its Bundle."""
    folder = tmp_path_factory.mktemp("digits")
    run = bundled.run("cnn", folder)
    systolic.export(run, folder / "bundle", to="bundle")
    return run, folder / "bundle"


@pytest.fixture
def copy(digits: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits[1], tmp_path / "copy"))


def record(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_bytes())


def test_a_bundle_answers_as_its_run_and_needs_it_no_more(
    digits: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    run, bundle = digits
    moved = shutil.copytree(bundle, tmp_path / "moved")
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "three.png")
    told = []
    for path in (run, moved):
        assert main(["eval", str(path), "--json"]) == 0
        assert main(["predict", str(path), str(tmp_path / "three.png"), "--json"]) == 0
        evaluated, predicted = map(json.loads, capsys.readouterr().out.splitlines())
        told.append((evaluated["metrics"], predicted["predictions"]))
    assert told[0] == told[1]
    assert set(told[0][0]) == {"validation", "test"}
    # A picture that can't be read does not keep the others from their answers.
    (tmp_path / "cut.png").write_bytes((tmp_path / "three.png").read_bytes()[:40])
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    files = [str(tmp_path / name) for name in ("loop.png", "cut.png", "three.png")]
    assert main(["predict", str(moved), *files, "--json"]) == 1
    loop, cut, whole = json.loads(capsys.readouterr().out)["predictions"]
    assert "loop.png" in loop["error"]
    assert "cut.png" in cut["error"]
    assert "error" not in whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", bundled.KINDS)
def test_every_kind_opens_without_its_run(kind: str, tmp_path: Path) -> None:
    """In a second process, the run gone."""
    run = bundled.run(kind, tmp_path)
    expected = systolic.open(run).evaluate()
    texts = systolic.open(run).generate("def", tokens=8, seed=3) if kind == "lm" else None
    bundle = systolic.export(run, tmp_path / "bundle", to="bundle").path
    shutil.rmtree(run)
    script = """
import json, sys, systolic
model = systolic.open(sys.argv[1])
found = systolic.verify_bundle(sys.argv[1])
texts = model.generate("def", tokens=8, seed=3) if sys.argv[2] == "lm" else None
print(json.dumps([model.evaluate(), texts, found.replay.passed]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(bundle), kind], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics, made, passed = json.loads(done.stdout.splitlines()[-1])
    assert passed
    assert made == texts
    for split, values in expected.items():
        assert metrics[split] == pytest.approx(values, rel=1e-5)


def test_nothing_is_written_into_a_bundle_or_a_run(
    digits: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, bundle = digits
    for inside, kind in ((bundle, "Bundle"), (run, "run")):
        out = ["--out", str(inside / "deep" / "inner")]
        for verb in (["quantize", str(run), "--to", "int8"], ["export", str(run), "--to", "onnx"]):
            assert main([*verb, *out]) == 2
            said = capsys.readouterr().err.strip().splitlines()[-1]
            assert f"would lie in the {kind} {inside.resolve()}" in said
        assert not (inside / "deep").exists()
    assert main(["verify", str(bundle)]) == 0


def test_the_manifest_says_where_a_bundle_comes_from(digits: tuple[Path, Path]) -> None:
    run, bundle = digits
    made, begun = record(bundle), json.loads((run / "job.json").read_text())
    assert made["format"] == 2
    assert set(made["versions"]) >= {"python", "systolic", "jax", "numpy"}
    assert made["source"] | {"digest": ""} == {
        "kind": "run",
        "name": "run",
        "digest": "",
        "licence": None,
    }
    assert made["recipe"] is None  # made from a Job
    assert {split: one["digest"] for split, one in made["data"].items()} == {
        split: one["digest"] for split, one in begun["data"].items()
    }
    (validation,) = [one for one in made["evaluations"] if one["on"] == "validation"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [one for one in lines if one["kind"] == "eval" and one["split"] == "validation"]
    assert validation["metrics"] == measured[-1]["metrics"]
    assert (validation["step"], validation["batches"]) == (3, measured[-1]["batches"])
    assert made["recorded"]["tolerance"] == 1e-4
    assert load_file(bundle / made["recorded"]["file"])["input:image"].shape == (2, 8, 8, 1)


def test_a_bundle_of_a_bundle_is_used_as_the_first(
    digits: tuple[Path, Path], tmp_path: Path
) -> None:
    systolic.import_model(digits[1], tmp_path / "half", dtype="bf16")
    made, before = record(tmp_path / "half"), record(digits[1])
    assert made["dtype"] == "bfloat16"
    for name in ("job", "types", "recipe", "data"):
        assert made[name] == before[name]
    assert made["evaluations"] == []  # of other weights
    assert systolic.verify_bundle(tmp_path / "half").replay is not None


def jobs(tmp_path: Path) -> dict[str, Callable[[], Job]]:
    options: dict[str, dict[str, Any]] = {
        "image": {"path": tmp_path, "classes": 3},
        "sft": {"from_": tmp_path, "data": tmp_path},
    }

    def shipped(name: str) -> Callable[[], Job]:
        return lambda: recipes.find(name)(options.get(name, {}))

    def heard() -> Job:
        data = Recordings(path=tmp_path / "manifest.jsonl", sequence=24, frames=30, mels=20)
        made = recipes.find("digits")({})
        return replace(made, model=speech.TINY, task=Transcription(), data=data)

    return {**{name: shipped(name) for name in recipes.shipped()}, "speech": heard}


@pytest.mark.parametrize("name", [*recipes.shipped(), "speech"])
def test_the_job_of_every_recipe_is_kept(name: str, tmp_path: Path) -> None:
    outline(tmp_path)
    job = jobs(tmp_path)[name]()
    plain, types = write_job(job, tmp_path)
    assert "model" not in plain
    made = BundleRecord(
        kind="systolic-bundle",
        format=2,
        systolic="0",
        model=model_record(job.model),
        source=ImportedFrom(kind="run", name="run", digest=""),
        dtype="float32",
        files={},
        job=plain,
        types=types,
    )
    again = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(made))), BundleRecord)
    kept = read_job(again, job.model, tmp_path / MANIFEST)
    assert kept == replace(job, layout=Layout(), adapter=Adapter(), start=None)


def test_code_and_data_in_memory_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no code") as raised:
        write_job(tiny.job(), tmp_path)
    assert str(raised.value).startswith(
        f"the model of {tmp_path} is Perceptron, code of its recipe"
    )
    assert f"serve take the run itself, and systolic export {tmp_path} --to" in str(raised.value)
    shipped = recipes.find("digits")({})
    data = Arrays.of(train={"image": np.zeros((4, 8, 8, 1), np.uint8), "label": np.zeros(4)})
    with pytest.raises(OptionError, match=r"Arrays in memory, .* train on files"):
        write_job(replace(shipped, data=data), tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": {"label_smoothing": 0.1}, "steps": "many"}, "can't be read"),
        ({"types": {"task": "os.system", "data": "os.path.join"}}, "a type that Systolic has not"),
        ({"types": {"task": "systolic.job.Batch"}}, "can't be read|no task"),
    ],
)
def test_a_job_that_is_none_is_refused(copy: Path, change: dict[str, Any], says: str) -> None:
    plain = record(copy)
    if "types" in change:
        plain["types"] |= change["types"]
    else:
        plain["job"] |= change
    (copy / MANIFEST).write_text(json.dumps(sealed(plain)))
    with pytest.raises(DataError, match=says) as caught:
        systolic.open(copy)
    assert "\n" not in str(caught.value)


def test_a_whole_bundle_is_verified(
    digits: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(digits[1]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["replay"]["passed"]
    assert told["replay"]["rows"] == 2
    assert told["licence"] is None
    assert main(["verify", str(digits[1]), "--no-replay"]) == 0
    shown = capsys.readouterr().out
    assert "all as they were written" in shown
    assert "only digests were checked" in shown


def flipped(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[-7] ^= 4
        (folder / name).write_bytes(raw)

    return damage


def described(folder: Path) -> None:
    """Another name of the run, of the same length."""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"name": "run"', '"name": "ran"'))


def unsealed(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"digest": "', '"digesu": "'))


def cut(folder: Path) -> None:
    raw = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(raw[:-100])


def missing(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()


def extra(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "more.json").write_text("{}")


def link(folder: Path) -> None:
    file = folder / "weights.safetensors"
    shutil.move(file, folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")


def linked_folder(folder: Path) -> None:
    (folder.parent / "other").mkdir()
    (folder / "more").symlink_to(folder.parent / "other")


def pickled(folder: Path) -> None:
    import hashlib
    import pickle

    raw = pickle.dumps({"a": 1})
    (folder / "state.bin").write_bytes(raw)
    plain = record(folder)
    digest = hashlib.sha256(raw).hexdigest()
    plain["files"]["state.bin"] = {"bytes": len(raw), "sha256": digest}
    (folder / MANIFEST).write_text(json.dumps(sealed(plain)))


def newer(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps(record(folder) | {"format": 99}))


def foreign(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"kind": "other", "files": []}))


def nested(folder: Path) -> None:
    (folder / MANIFEST).write_text("[" * 100_000)


def another_programs(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')


def outside(folder: Path) -> None:
    plain = record(folder)
    plain["files"]["../secret"] = {"bytes": 1, "sha256": "00"}
    (folder / MANIFEST).write_text(json.dumps(sealed(plain)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flipped("weights.safetensors"), r"weights\.safetensors is damaged"),
        (flipped("recorded/outputs.safetensors"), r"outputs\.safetensors is damaged"),
        (flipped(MANIFEST), rf"{MANIFEST} (is damaged|holds)"),
        (described, rf"{MANIFEST} is damaged"),
        (unsealed, rf"{MANIFEST} is damaged"),
        (cut, r"has \d+ bytes and had \d+"),
        (missing, r"lacks weights\.safetensors"),
        (extra, r"holds sub/more\.json, which its bundle\.json does not list"),
        (link, "is a link out of the Bundle"),
        (linked_folder, "is a link out of the Bundle"),
        (pickled, r"state\.bin is a pickle"),
        (newer, "of format 99"),
        (foreign, "was not written by systolic import"),
        (nested, "is damaged"),
        (another_programs, "is no Bundle"),
        (outside, "outside its folder"),
    ],
)
def test_a_damaged_or_foreign_one_is_refused_in_one_line(
    copy: Path,
    damage: Callable[[Path], None],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    damage(copy)
    assert main(["verify", str(copy), "--json"]) != 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1
    assert re.search(says, shown.err), shown.err


def test_every_flipped_byte_of_the_manifest_is_found_or_harmless(copy: Path) -> None:
    """A byte that changes what is read is found; one between the entries may be another space."""
    from systolic.runs.bundle.folder import checked_bundle

    raw = (copy / MANIFEST).read_bytes()
    whole = record(copy)
    unfound = []
    for place in np.random.default_rng(0).integers(0, len(raw), 60):
        changed = bytearray(raw)
        changed[place] ^= 1
        (copy / MANIFEST).write_bytes(changed)
        try:
            checked_bundle(copy)
        except SystolicError:
            continue
        unfound.append(record(copy) == whole)
    assert all(unfound)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(NotFoundError, match="does not exist; give the folder of a Bundle"):
        systolic.verify_bundle("nowhere")


def test_a_bundle_that_computes_something_else_is_refused(copy: Path) -> None:
    """As a version would that computes otherwise: all digests match, and the outputs do not."""
    import hashlib

    plain = record(copy)
    file = copy / plain["recorded"]["file"]
    arrays = load_file(file)
    arrays["output"] = arrays["output"] * np.float32(1.01)
    save_file(arrays, file, {"format": "systolic"})
    raw = file.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    plain["files"][plain["recorded"]["file"]] = {"bytes": len(raw), "sha256": digest}
    (copy / MANIFEST).write_text(json.dumps(sealed(plain)))
    with pytest.raises(SystolicError, match=r"computes something else here: .*relative 9\.9.e-03"):
        systolic.verify_bundle(copy)


def test_an_older_bundle_opens_and_only_its_digests_are_checked(copy: Path) -> None:
    """As the first format was: without versions, job, recorded inputs and a digest of its own."""
    plain = record(copy)
    shutil.rmtree(copy / "recorded")
    new = ("versions", "types", "recipe", "data", "evaluations", "recorded", "digest")
    old = {name: value for name, value in plain.items() if name not in new}
    del old["files"]["recorded/outputs.safetensors"]
    (copy / MANIFEST).write_text(json.dumps(old | {"format": 1, "job": None}))
    found = systolic.verify_bundle(copy)
    assert found.replay is None
    assert found.unreplayed == "the Bundle holds no recorded inputs: only digests were checked"
