"""Fine-tuning from a folder of transformers: trained, resumed, used, and what a run keeps of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.formats.comparison import outputs_of
from systolic.formats.outline import outlined
from systolic.job import (
    AdapterKind,
    Checkpoints,
    Evaluation,
    Layout,
    Optimizer,
    OptimizerChange,
    Schedule,
)
from systolic.job.optimizer import ScheduleKind
from systolic.models.adapters import compact_base
from systolic.models.decoder.config import Decoder
from systolic.recipes.lm import lm
from systolic.recipes.sft import sft
from systolic.runs import Run
from systolic.serving.text.opening import EngineSizes, context_of, plan_engine
from systolic.steps.lengths import learned_text, longest_text
from tests.formats import folders
from tests.models.foreign import relative


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def options(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("data") / "some.jsonl"
    pairs = ({"prompt": f"a question {n}", "completion": f"yes {n}"} for n in range(30))
    file.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return {
        "from_": model,
        "data": file,
        "sequence": 48,
        "batch": 4,
        "layout": Layout(data=1, fsdp=1),
        "optimizer": Optimizer(learning_rate=3e-3),
        "schedule": Schedule(kind=ScheduleKind.constant, warmup=0),
        "evaluation": Evaluation(batches=1),
        "checkpoints": Checkpoints(every=2),
        "sample": None,
    }


LORA = {"adapter": AdapterKind.lora, "rank": 2, "alpha": 4.0}


QLORA = {**LORA, "adapter": AdapterKind.qlora}


@pytest.fixture(scope="module")
def compact(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of adapters beside matrices in 4 bits, from a Bundle."""
    home = tmp_path_factory.mktemp("compact")
    bundle = systolic.import_model(options["from_"], home / "bundle", parity=False).path
    given = {**options, **QLORA, "from_": bundle}
    systolic.train("sft", run=home / "run", steps=2, log_every=1, **given)
    return home / "run"


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA, QLORA], ids=["all weights", "lora", "qlora"])
def test_a_run_resumes_to_the_same_weights(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = shutil.copytree(options["from_"], tmp_path / "model")
    given = {**options, **changes, "from_": model, "log_every": 1}
    systolic.train("sft", run=tmp_path / "whole", steps=4, **given)
    systolic.train("sft", run=tmp_path / "part", steps=2, **given)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")[:2]
    if not changes:  # nothing of the model is needed any more
        shutil.rmtree(model)
    systolic.resume(tmp_path / "part", steps=4)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    whole, part = (systolic.open(tmp_path / name, checkpoint="last") for name in ("whole", "part"))
    for path, value in whole.weights.params.items():
        np.testing.assert_array_equal(part.weights.params[path], value)
    record = json.loads((tmp_path / "part/job.json").read_text())
    assert record["start"]["kind"] == "hugging-face"
    assert len(record["start"]["fingerprint"]) == 16
    assert whole.generate("a question 3", tokens=3, chat=True) == part.generate(
        "a question 3", tokens=3, chat=True
    )
    saved = {path.name for path in (tmp_path / "whole/checkpoints/4").iterdir()}
    assert "rest" not in saved
    names = {path.rpartition("/")[2] for path in whole.weights.params}
    assert ("lora_a" in names) == bool(changes)
    if changes:
        shutil.rmtree(model)
        with pytest.raises(NotFoundError, match="no copy of the frozen weights"):
            systolic.open(tmp_path / "part")
        folders.folder(model, folders.llama(tie_word_embeddings=True))
        with pytest.raises((RunError, OptionError)):
            systolic.open(tmp_path / "part")


@pytest.mark.slow
def test_training_begins_with_the_weights_of_the_folder(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A learning rate of almost nothing: the first loss is that of transformers on the answers."""
    import torch
    import transformers

    still = {**options, "optimizer": Optimizer(learning_rate=1e-12), "steps": 1, "log_every": 1}
    systolic.train("sft", run=tmp_path / "run", **still)
    opened = systolic.open(tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(options["from_"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options["from_"])
    total, count = 0.0, 0
    for line in options["data"].read_text().splitlines():
        pair = json.loads(line)
        asked = [{"role": "user", "content": pair["prompt"]}]
        chat = [*asked, {"role": "assistant", "content": pair["completion"]}]
        before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        labels = torch.tensor(ids)
        labels[: len(before)] = -100
        labels[-1] = -100  # the line break behind the end of the turn
        with torch.no_grad():
            found = theirs(torch.tensor([ids]), labels=labels[None])
        learned = int((labels[1:] >= 0).sum())
        total, count = total + float(found.loss) * learned, count + learned
    mine = opened.evaluate(path=options["data"])
    assert mine[str(options["data"])]["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("kind", ["bundle", pytest.param("folder", marks=pytest.mark.slow)])
def test_matrices_in_4_bits_are_those_of_the_folder(
    options: dict[str, Any], compact: Path, tmp_path: Path, kind: str
) -> None:
    """Packed layer by layer, from a folder or from a Bundle, as the whole stack would be; and trained with."""
    plain = systolic.open(options["from_"]).weights.params
    run = compact
    if kind == "folder":
        run = tmp_path / "run"
        systolic.train("sft", run=run, steps=2, log_every=1, **{**options, **QLORA})
    frozen = systolic.open(run, checkpoint="last").weights.model_state
    for path in ("blocks/query", "blocks/out", "blocks/mlp/down"):
        axes = ("layers", *(("a", "b", "embed") if path == "blocks/out" else ("embed", "b", "c")))
        axes = ("layers", "mlp", "embed") if path == "blocks/mlp/down" else axes
        whole = compact_base(plain[path], axes)
        np.testing.assert_array_equal(
            np.asarray(frozen[f"{path}/codes"], np.uint8), np.asarray(whole.codes, np.uint8)
        )
        np.testing.assert_array_equal(frozen[f"{path}/scales"], whole.scales)
    np.testing.assert_array_equal(frozen["embedding"], plain["embedding"])


@pytest.mark.slow
def test_adapters_beside_a_frozen_model_are_explained(compact: Path) -> None:
    explained = systolic.explain(compact)
    assert explained.notes[0].startswith("2 records are too few"), "no probe failed"
    assert explained.figures["noise_scale"] is not None
    assert explained.figures["update_ratio"] is None, "adapters begin at zero: no ratio is usual"


def test_another_adapter_can_not_resume(
    options: dict[str, Any], compact: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"--rank 3 \(was 2\) can't change"):
        systolic.resume(compact, steps=4, rank=3)
    again = {**options, **LORA, "from_": compact}
    with pytest.raises(OptionError, match="adapters begin with a model in files"):
        systolic.train("sft", run=tmp_path / "other", steps=2, **again)


@pytest.mark.slow
def test_all_weights_of_a_run_are_fine_tuned_again(options: dict[str, Any], tmp_path: Path) -> None:
    first = replace(options["optimizer"], learning_rate=1e-2)
    systolic.train(
        "sft", run=tmp_path / "a", steps=3, log_every=1, **{**options, "optimizer": first}
    )
    given = {**options, "from_": tmp_path / "a"}
    systolic.train("sft", run=tmp_path / "b", steps=1, log_every=1, **given)
    assert losses(tmp_path / "b")[0] < losses(tmp_path / "a")[0] - 0.05


@pytest.mark.slow
def test_exported_adapters_are_merged(
    options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a folder of transformers and as a Bundle, from the command line."""
    fast = {**options, **LORA, "optimizer": Optimizer(learning_rate=5e-2), "steps": 4}
    run, home, bundle = (tmp_path / name for name in ("run", "home", "bundle"))
    systolic.train("sft", run=run, **fast)
    for kind, out in (("hf", home), ("bundle", bundle)):
        words = ["export", str(run), "--to", kind, "--out", str(out), "--checkpoint", "last"]
        assert main([*words, "--json"]) == 0
        told = json.loads(capfd.readouterr().out)
        assert told["parameters"] == folders.llama().num_parameters()
        assert told["parity"]["passed"]
    (started,) = Run.open(run).records("start")
    assert started["total_parameters"] == folders.llama().num_parameters()
    compared = systolic.compare_models(run, bundle, repeats=0)
    assert compared.a.parameters == compared.b.parameters == folders.llama().num_parameters()
    tokens = np.random.default_rng(0).integers(0, 300, (2, 19)).astype(np.int32)
    opened, bundled = systolic.open(run, checkpoint="last"), systolic.open(bundle)
    trained = outputs_of(opened.setup.steps, opened.weights, {"tokens": tokens})
    assert relative(folders.logits(home, tokens), trained) < 1e-4
    assert (
        relative(outputs_of(bundled.setup.steps, bundled.weights, {"tokens": tokens}), trained)
        < 1e-4
    )
    assert relative(folders.logits(options["from_"], tokens), trained) > 1e-2
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (bundle / name).read_bytes() == (options["from_"] / name).read_bytes()
    record = json.loads((bundle / "bundle.json").read_text())
    assert record["source"]["kind"] == "run"
    # Both are what adapters begin with, and a Bundle is what transformers opens after an export.
    systolic.train("sft", run=tmp_path / "again", **{**fast, "from_": bundle, "steps": 1})
    systolic.export(bundle, tmp_path / "round")
    np.testing.assert_array_equal(
        folders.logits(tmp_path / "round", tokens), folders.logits(home, tokens)
    )


def test_what_is_no_run_of_a_language_model_is_no_bundle(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"a model in files already; .*systolic import"):
        systolic.export(options["from_"], tmp_path / "out", to="bundle")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_forecast_needs_no_weights(options: dict[str, Any], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(options["from_"] / name, tmp_path / name)
    given = {**options, "from_": tmp_path}
    held = {}
    for kind in AdapterKind:
        rank = {} if kind is AdapterKind.none else {"rank": 2}
        wanted = sft(**given, adapter=kind, **rank)
        made = systolic.forecast(wanted, on="cpu", quick=True)
        held[kind] = made.memory.by_kind
    # 3 layers of d 32, hidden 48, 4 heads of 8 over 2 of keys and values; 304 tokens twice.
    matrices = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    others = 3 * 2 * 32 + 32 + 2 * 304 * 32
    small = 3 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert held[AdapterKind.none]["parameters"] == 4 * (matrices + others)
    assert held[AdapterKind.lora]["parameters"] == 4 * (matrices + others + small)
    assert held[AdapterKind.none]["optimizer state"] > 2 * 4 * matrices
    assert 2 * 4 * small <= held[AdapterKind.lora]["optimizer state"] < 2 * 4 * small + 100


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, id="all weights"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)],
)
def test_a_fine_tuned_model_keeps_its_ends_and_its_context(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Also where the model that it began with is gone; and a prompt has the tokens that it had."""
    import transformers

    theirs = folders.llama(eos_token_id=[258, 257], max_position_embeddings=8192)
    theirs.generation_config.eos_token_id = [258, 257]
    theirs.generation_config.temperature = 0.6
    theirs.generation_config.do_sample = True
    model = folders.folder(tmp_path / "model", theirs, start=True)
    asked = systolic.open(model).job.data.get_tokenizer().prompt("the capital of France")
    assert asked[0] == 1
    run = tmp_path / "run"
    systolic.train("sft", run=run, steps=1, **{**options, **changes, "from_": model})
    if not changes:
        shutil.rmtree(model)
    opened = systolic.open(run)
    # 0 ends a document by the tokenizer, 3 an answer by the chat template.
    assert opened.job.data.ends == {258, 257, 0, 3}
    assert opened.job.data.get_tokenizer().prompt("the capital of France") == asked
    for kind in ("hf", "bundle"):
        systolic.export(run, tmp_path / kind, to=kind)
    systolic.export(tmp_path / "bundle", tmp_path / "round")
    for name in ("hf", "round"):
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert config.eos_token_id == [258, 257, 0, 3]
        assert config.max_position_embeddings == 8192
        generation = transformers.GenerationConfig.from_pretrained(tmp_path / name)
        assert generation.eos_token_id == [258, 257, 0, 3]
        assert generation.temperature == 0.6
    assert systolic.open(tmp_path / "bundle").job.data.ends == opened.job.data.ends
    # Rows have 48 tokens: what they hold was learned at the first positions, and the others are as they were.
    prompt = "the capital of France is Paris, " * 40
    for name in ("run", "bundle", "hf"):
        other = systolic.open(tmp_path / name)
        steps = other.setup.steps
        assert other.job.data.context == 8192
        assert context_of(steps, other.job.data, EngineSizes()) == 4096  # of any model
        assert context_of(steps, other.job.data, EngineSizes(context=8192)) == 8192
        with pytest.raises(OptionError, match="made for texts of 8192 tokens"):
            context_of(steps, other.job.data, EngineSizes(context=8193))
        assert name != "run" or other.generate(prompt, tokens=2)
        assert other.warnings == []
    plan = plan_engine(opened.setup.steps, EngineSizes())
    assert plan.beyond is None
    assert plan.origin == "made for 8,192, --context for more; fine-tuned in rows of 48"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "context", "longest"),
    [
        ({"rope_scaling": {**YARN, "rope_theta": 1e4}, "max_position_embeddings": 64}, 256, 256),
        # Linear stretching leaves open whether the positions are those before or after it.
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 256, 512),
        ({"max_position_embeddings": 16}, 16, 48),
    ],
    ids=["yarn", "linear", "fewer than a row"],
)
def test_the_context_is_what_the_base_was_made_for(
    options: dict[str, Any], tmp_path: Path, fields: dict[str, Any], context: int, longest: int
) -> None:
    """Longer rows, whose conversations were learned, may be asked for."""
    folders.folder(tmp_path / "model", folders.llama(**fields))
    job = sft(**{**options, "from_": tmp_path / "model"}, steps=1)
    assert (job.data.context, longest_text(job), learned_text(job)) == (context, longest, None)
    beyond = [line for line in job.data.notes() if "the model was made for" in line]
    assert bool(beyond) == (context < 48)


def test_a_run_from_random_weights_has_the_context_of_its_rows(tmp_path: Path) -> None:
    """With rotary embeddings, and with learned positions, of which its rows reach the first ones only."""
    sizes = {"layers": 1, "d_model": 16, "d_ff": 16, "heads": 2, "kv_heads": 2, "head_dim": 8}
    for positions, longest in ((0, None), (512, 512)):
        run = tmp_path / str(positions)
        model = Decoder(**sizes, learned_positions=positions)
        job = lm(model=model, sequence=32, steps=1, batch=2, layout=Layout(data=1, fsdp=1))
        assert (learned_text(job), longest_text(job)) == (32, longest)
        with Run.create(run, {"job": job.to_json(), "options": {}}):
            assert outlined(run).positions == 32


@pytest.mark.slow
def test_a_run_of_a_run_stops_where_the_first_model_did(
    options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = folders.llama(eos_token_id=[258, 257], max_position_embeddings=8192)
    model = folders.folder(tmp_path / "model", theirs)
    systolic.train("sft", run=tmp_path / "a", steps=1, **{**options, "from_": model})
    systolic.train("sft", run=tmp_path / "b", steps=1, **{**options, "from_": tmp_path / "a"})
    assert systolic.open(tmp_path / "b").job.data.ends >= {258, 257}
    systolic.export(tmp_path / "b", tmp_path / "home")
    assert systolic.open(tmp_path / "b").job.data.context == 8192
    config = json.loads((tmp_path / "home" / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    assert set(config["eos_token_id"]) >= {258, 257}


@pytest.mark.slow
@pytest.mark.parametrize("start", [True, False], ids=["post-processor", "none"])
def test_a_prompt_has_the_same_tokens_before_and_after(
    options: dict[str, Any], tmp_path: Path, start: bool
) -> None:
    model = folders.folder(tmp_path / "model", start=start)
    systolic.train("sft", run=tmp_path / "run", steps=1, **{**options, "from_": model})
    prompt = "the capital of France"
    before, after = (
        systolic.open(path).job.data.get_tokenizer().prompt(prompt)
        for path in (model, tmp_path / "run")
    )
    assert after == before
    assert (after[0] == 1) == start


def test_a_model_with_fewer_ids_than_its_tokenizer_is_not_trained_on_others(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = folders.folder(tmp_path / "model", folders.llama(vocab_size=260))
    with pytest.raises(
        DataError, match=r"line \d+ has the token .* and the model has ids below 260"
    ):
        systolic.train("sft", run=tmp_path / "run", steps=1, **{**options, "from_": model})


def test_all_weights_have_a_tenth_of_the_rate_of_adapters(options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if name != "optimizer"}
    assert sft(**plain).optimizer.learning_rate == 1e-5
    assert sft(**plain, **LORA).optimizer.learning_rate == 1e-4
    given = {**plain, "optimizer": OptimizerChange(learning_rate=2e-4)}
    assert sft(**given).optimizer.learning_rate == sft(**given, **LORA).optimizer.learning_rate
    assert sft(**given).optimizer.weight_decay == 0.0
    # All of an optimizer, in Python: what it leaves open is the recipe's own, also when a run reads it back.
    whole = sft(**options).optimizer
    assert (whole.learning_rate, whole.weight_decay) == (3e-3, options["optimizer"].weight_decay)
    assert whole.b2 == 0.999


def test_from_is_named_as_it_is_typed(
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch refuses the relative path of a model, and a recipe names what it needs, by the option that is typed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(options["from_"], "model")
    words = f"launch sft --from model --data {options['data']} --on v5e-4 --via gke --image r/s:1"
    assert main([*words.split(), "--run", "gs://b-b/x"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("systolic: --from is model, a path relative to this folder")
    assert main(["recipes", "sft"]) == 0
    assert "The job depends on --from: add it" in capsys.readouterr().out
