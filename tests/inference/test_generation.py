"""Generation: where a text ends, what padding must not change, and what the command line takes."""

import io
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError, RunError
from systolic.inference import model as opened
from systolic.inference.generation import Generator
from systolic.inference.model import read_prompts, set_up_here
from systolic.inference.results import Finish, Stops
from systolic.job import Layout, Precision, Sampling
from systolic.models.decoder.config import Decoder
from systolic.recipes.jobs.run import rebuild
from systolic.runs import Run
from systolic.runs.weights import Weights, begin_with
from systolic.setup import Setup, set_up
from systolic.steps.decode import Decode
from systolic.steps.machine import LocalDevices
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from tests.cli.tiny import job
from tests.tiers import some
from tests.training.sessions import events, records

SMALL = Decoder(layers=2, d_model=32, d_ff=32, heads=2, kv_heads=1, head_dim=16, vocab=264)
GREEDY = Sampling(temperature=0.0)
F32 = jnp.dtype("float32")


@given(
    text=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_a_text_ends_before_the_stop_that_comes_first_however_it_is_cut(text, stops, cuts):
    def told(pieces: list[str]) -> str:
        ends, out = Stops(stops), ""
        for piece in pieces:
            out += ends.push(piece)
            if ends.met:
                return out
        return out + ends.flush()

    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    # The shortest start of the text that ends with a stop string, less the longest such string.
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            assert told(pieces) == text[: end - max(map(len, found))]
            break
    else:
        assert told(pieces) == text


@pytest.mark.slow
def test_a_mixtures_answer_does_not_depend_on_padding():
    # One slot for each expert and four tokens: most choices find none, so who asks first matters.
    model = replace(SMALL, experts=4, experts_per_token=2, capacity_factor=0.5)
    steps = set_up(job(model=model, batch=2)).steps
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    programs = Decode(steps, GREEDY)
    module = programs._module(params, rest)
    answers = jax.jit(
        lambda tokens, count: module.logits(module.prefill(tokens, count, 64, F32)[0])
    )
    ids = np.random.default_rng(0).integers(0, 256, (2, 11)).astype(np.int32)
    counts = np.array([11, 7], np.int32)

    def logits(rows: list[int], padded: int, fill: int) -> np.ndarray:
        tokens = np.full((len(rows), padded), fill, np.int32)
        for at, row in enumerate(rows):
            tokens[at, : counts[row]] = ids[row, : counts[row]]
        return np.asarray(answers(jnp.asarray(tokens), jnp.asarray(counts[rows])))

    for row, count in enumerate(counts):
        alone = logits([row], int(count), 0)[0]
        for padded, fill in ((16, 0), (32, 5)):
            beside = logits([0, 1], padded, fill)[row, :count]
            np.testing.assert_allclose(beside, alone, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("precision", some([Precision.f32, Precision.f16], [Precision.f16]))
def test_programs_are_compiled_once_for_prompts_of_a_size(precision: Precision):
    made = replace(job(model=SMALL), precision=precision)
    steps = set_up(made).steps
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    generator = Generator(steps, params, rest, GREEDY)
    texts = ["".join(generator.stream(text, tokens=20)) for text in ("a", "some text", "a")]
    assert texts[0] == texts[2] != ""
    assert generator._programs.prefill._cache_size() == generator._programs.step._cache_size() == 1
    assert generator.data.context == 32
    warned: list[str] = []
    generator.stream("x" * 11, tokens=20, warn=warned.append)
    assert warned == [], "11 bytes and the document's token and 20"
    generator.stream("x" * 32, tokens=1, warn=warned.append)
    assert "33 tokens of prompt and up to 1 new" in warned[0]
    stopping = generator.stream("a", tokens=20, stop=[texts[0][3:6]])
    assert stopping.finish is None
    assert "".join(stopping) == texts[0][: texts[0].index(texts[0][3:6])]
    assert stopping.finish is Finish.stop
    whole = generator.stream("a", tokens=20)
    assert ("".join(whole), whole.finish) == (texts[0], Finish.length)


@pytest.mark.parametrize("sampling", some([GREEDY, Sampling()], [Sampling()]))
def test_a_text_over_pages_is_the_same_and_its_programs_are_compiled_once(sampling: Sampling):
    # Prompts of two parts, and lookups that need the tokens before.
    model = replace(SMALL, ngrams=3, ngram_rows=64, ngram_dim=8)
    made = job(model=model, batch=2, layout=Layout(data=1, fsdp=1))
    steps = StepFunctions(made, MeshTarget.of(made, "cpu", jax.devices()[:1]))
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    draw = np.random.default_rng(1)
    params = {p: a + 0.3 * draw.standard_normal(a.shape, np.float32) for p, a in params.items()}
    plain, paged = (Generator(steps, params, rest, sampling, paged=way) for way in (False, True))
    other = Generator(steps, params, rest, Sampling(temperature=2.0), like=paged, paged=True)
    assert other.params is paged.params
    for prompt in ("a", "some text", "some text, and more of it; " * 12):
        texts = [
            "".join(generator.stream(prompt, tokens=20, seed=3)) for generator in (plain, paged)
        ]
        assert texts[0] == texts[1] != ""
    # Of one size of prompts and of the next but one.
    assert paged._programs.prefill._cache_size() == 2
    assert paged._programs.step._cache_size() == 2


@pytest.mark.parametrize(
    "option",
    [
        "--top-p 0",
        "--top-p 7",
        "--temperature nan",
        "--temperature -1",
        "--top-k -3",
        "--seed -1",
        "--tokens 0",
        "--stop=",
    ],
)
def test_values_that_can_not_work_are_one_line(option: str, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "runs/none", "a", *option.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = option.lstrip("-").partition(" ")[0].partition("=")[0]
    assert name in line
    assert "must be" in line or "is empty" in line


def model(sequence: int = 32) -> list[str]:
    sizes = "--model.layers 1 --model.d-model 16 --model.d-ff 16 --model.heads 2 --model.kv-heads 2"
    return f"{sizes} --model.head-dim 8 --sequence {sequence} --batch 4".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text in ``text`` and a byte model of it in ``run``."""
    home = tmp_path_factory.mktemp("trained")
    (home / "text").mkdir()
    for number in range(30):
        (home / "text" / f"{number}.txt").write_text(f"def f{number}(): return {number}\n" * 5)
    args = ["train", "lm", "--path", str(home / "text"), *model(), "--steps", "3", "--json"]
    args += ["--checkpoints.every", "2", "--prompt", "def f"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        assert main([*args, "--run", str(home / "run")]) == 0
    return home


def test_a_language_model_ends_with_a_sample(trained: Path):
    run = trained / "run"
    opened = Run.open(run)
    assert not events(run, "sample"), "which would say why there is none"
    (sample,) = opened.samples()
    assert (sample["step"], sample["prompt"]) == (3, "def f")
    assert sample["text"]
    assert [r["text"] for r in records(run, "sample")] == [sample["text"]]
    summary = opened.read_summary()
    assert summary["next"] == f"systolic generate {run} 'def f'"
    metrics = summary["final"]["metrics"]
    bits = metrics["validation_loss"] / math.log(2)
    # The validation text is one document of 5 lines of 19 or 21 bytes, whose end costs bits as well.
    assert metrics["validation_bits_per_byte"] / bits in (
        pytest.approx(96 / 95, rel=1e-5),
        pytest.approx(106 / 105, rel=1e-5),
    )


def begun(
    trained: Path, run: Path, capsys: pytest.CaptureFixture[str], source: Path, *more: str
) -> float:
    """The validation loss of a run that begins with weights and makes a step of no size."""
    args = ["train", "lm", "--path", str(trained / "text"), *model(), "--optimizer.ema", "0.5"]
    rest = ["--optimizer.learning-rate", "1e-9", "--steps", "1", "--run", str(run), "--json"]
    assert main([*args, "--init-from", str(source), *rest, *more]) == 0
    return json.loads(capsys.readouterr().out)["final"]["metrics"]["validation_loss"]


@pytest.mark.slow
def test_training_in_bf16_begins_with_the_weights_of_a_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    narrow = ["--dtypes.parameters", "bf16", "--dtypes.moments", "bf16"]
    source = trained / "run" / "checkpoints" / "3"
    ended = Run.open(trained / "run").read_summary()["final"]["metrics"]["validation_loss"]
    found = begun(trained, tmp_path / "narrow", capsys, source, *narrow)
    assert found == pytest.approx(ended, rel=5e-3)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.slow
def test_prompts_of_words_a_file_and_standard_input(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def answers(*args: str) -> list[dict]:
        command = ["generate", str(trained / "run"), *args, "--tokens", "8", "--json"]
        assert main(command) == 0
        record = json.loads(capsys.readouterr().out)
        return record.get("answers", [record])

    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two\\nlines"}\n')
    several = answers("one", "two", "--file", str(tmp_path / "lines.txt"))
    alone = {"one": answers("one")[0]["text"], "two": several[1]["text"]}
    assert [a["prompt"] for a in several] == ["one", "two", "one", "two"]
    assert [a["text"] for a in several] == [alone["one"], alone["two"]] * 2
    rows = answers("--file", str(tmp_path / "rows.jsonl"))
    assert [a["prompt"] for a in rows] == ["one", "two\nlines"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert answers("-")[0]["text"] == alone["one"]
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n"))
    assert answers("--file", "-")[0]["text"] == alone["two"]
    assert main(["generate", str(trained / "run"), "x" * 40, "--tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("x" * 40)
    assert "41 tokens of prompt and up to 8 new ones exceed the 32 tokens of a row" in err
    assert main(["generate", str(trained / "run"), "--file", str(tmp_path / "no.txt")]) == 2
    assert "no.txt cannot be read" in capsys.readouterr().err


def test_a_run_is_evaluated_on_other_data(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def measured(path: Path) -> float:
        assert main(["eval", str(trained / "run"), "--path", str(path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["metrics"][str(path)]["loss"]

    (tmp_path / "like.jsonl").write_text(json.dumps({"text": "def f1(): return 1\n" * 9}) + "\n")
    (tmp_path / "unlike.jsonl").write_text(json.dumps({"text": "~}|{QZ^&*" * 9}) + "\n")
    assert measured(tmp_path / "like.jsonl") < measured(tmp_path / "unlike.jsonl")
    command = ["eval", str(trained / "run"), "--path", str(tmp_path / "no.jsonl")]
    assert main(command) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err
    assert main([*command[:3], str(tmp_path / "like.jsonl"), "--split", "train"]) == 2


def test_a_damaged_best_checkpoint_gives_way_to_another(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    largest = max(
        (path for path in (run / "checkpoints" / "3" / "params").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    assert main(["generate", str(run), "one", "--tokens", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 2
    assert "checkpoint 3 is damaged" in err
    assert "; using step 2" in err
    texts = systolic.generate(run, "one", tokens=4)
    measured = systolic.evaluate(run, batches=1)
    (tmp_path / "text.txt").write_text("one two three")
    for result in (texts, measured, systolic.predict(run, tmp_path / "text.txt")):
        (line,) = result.warnings
        assert result.step == 2
        assert line.startswith("checkpoint 3 is damaged")
        assert line.endswith("; using step 2")
    (run / "checkpoints" / "3" / "manifest.json").write_text("")
    with Run.open(run) as opened:
        steps = set_up_here(rebuild(opened)[1], opened).steps
    begun = begin_with(run, steps)
    assert begun.step == 2
    assert begun.skipped == ["checkpoint 3 is damaged (manifest.json is damaged)"]


def test_training_begins_with_the_weights_of_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    ended = Run.open(trained / "run").read_summary()["final"]["metrics"]["validation_loss"]
    assert begun(trained, run, capsys, trained / "run") == pytest.approx(ended, rel=1e-5)
    source = str((trained / "run" / "checkpoints" / "3").absolute())
    assert Run.open(run).read_job()["init_from"] == source
    args = ["train", "lm", "--path", str(trained / "text"), *model()]
    other = [
        *args,
        "--model.d-ff",
        "24",
        "--steps",
        "1",
        "--run",
        str(tmp_path / "b"),
    ]
    assert main([*other, "--init-from", source]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"systolic: {source} can't begin lm: ")
    assert "float32[1,16,16] in the checkpoint and float32[1,24,16] in this job" in line
    based = ["--model.mup.base-width", "8", "--run", str(tmp_path / "b")]
    assert main([*args, *based, "--init-from", source]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "was trained with --model.mup.base-width 0, and with 8 its weights" in line
    assert main([*other, "--init-from", str(trained / "text")]) == 2
    assert "is a folder of another kind; it takes a run (" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("reads", [True, False])
def test_a_template_that_leaves_the_system_message_out_is_noticed(reads: bool) -> None:
    class Template:
        def chat(self, turns: Sequence[Mapping[str, Any]]) -> str:
            return "".join(one["content"] for one in turns if reads or one["role"] == "user")

    generator = object.__new__(Generator)
    generator.data = Template()  # ty: ignore[invalid-assignment]
    user = {"role": "user", "content": "hi"}
    said = [{"role": "system", "content": "be brief"}, user]
    assert generator._leaves_out_system(said) is not reads
    assert not generator._leaves_out_system([user])
    assert not generator._leaves_out_system("hi")


@pytest.mark.parametrize("error", [RunError("the model stopped"), KeyboardInterrupt()])
def test_warnings_are_shown_where_a_later_text_fails(
    error: BaseException, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text's warnings wait for the end of its line, and that may never come."""
    model = systolic.open(trained / "run")

    def stream(prompt: str, **_: object) -> Iterator[str]:
        yield "a"
        model.warn(f"{prompt} is long")
        raise error

    monkeypatch.setattr(model, "stream", stream)
    with pytest.raises(type(error)):
        systolic.generate(model, ["one", "two"])
    assert model.warnings == ["one is long"]


def test_lines_of_prompts_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """U+2028, U+0085, a form feed and a carriage return are parts of a line, in JSON too."""
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_bytes("one\u2028two\r\n\nthree\x0cfour\nfive\x85six\rseven\n".encode())
    assert read_prompts((), text) == ["one\u2028two", "three\x0cfour", "five\x85six\rseven"]
    rows.write_text('{"prompt": "a\u2028b"}\n{"prompt": "c\x85d"}\n')
    assert read_prompts((), rows) == ["a\u2028b", "c\x85d"]


def test_a_text_follows_a_schema(tmp_path: Path) -> None:
    steps = set_up(job(model=SMALL, batch=2)).steps
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    generator = Generator(steps, params, rest, Sampling(temperature=1.0))
    schema = {"type": "array", "items": {"enum": ["é", 12, None]}, "minItems": 2, "maxItems": 4}
    texts = []
    for seed in range(4):
        continuation = generator.stream("hello", tokens=120, seed=seed, schema=schema)
        texts.append("".join(continuation))
        assert continuation.finish is Finish.stop
        values = json.loads(texts[-1])
        assert 2 <= len(values) <= 4
        assert all(value in ("é", 12, None) for value in values)
    assert len(set(texts)) > 1
    cut = generator.stream("hello", tokens=4, schema=schema)
    assert texts[0].startswith("".join(cut))
    assert cut.finish is Finish.length
    with pytest.raises(OptionError, match="the schema has not, which cannot be followed"):
        generator.stream("hello", tokens=4, schema={"not": {}})


def test_a_schema_is_read_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    arguments = ["generate", str(tmp_path / "run"), "x", "--schema", str(file)]
    for content, said in (
        (None, f"--schema {file} cannot be read: No such file or directory"),
        ("{", f"--schema {file} is not JSON"),
        ("[]", "the schema is no JSON object; give a JSON Schema"),
    ):
        if content is not None:
            file.write_text(content)
        assert main(arguments) != 0
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", 1), ("float32", 0)])
def test_weights_of_16_bits_that_are_widened_for_a_text_are_one_line(
    dtype: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "CACHED_BYTES", 0)
    made = job(model=SMALL, batch=2, layout=Layout(data=1, fsdp=1))
    made = replace(made, precision=Precision.bf16 if dtype == "bfloat16" else Precision.f32)
    steps = StepFunctions(made, MeshTarget.of(made, "cpu", jax.devices()[:1]))
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    setup = Setup(job=made, machine=LocalDevices.here(), steps=steps)
    weights = Weights(step=0, params=params, model_state=rest, skipped=[])
    model = opened.TrainedModel(Path("tiny"), setup, weights)
    assert model.generate("a", tokens=2) == model.generate("a", tokens=2)
    assert sum("weights are held as float32" in line for line in model.warnings) == said
    held = model._generator(Sampling()).params
    assert {a.dtype.name for a in jax.tree.leaves(held) if a.ndim > 1} == {"float32"}
