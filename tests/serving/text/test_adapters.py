"""Adapters by name: texts of several in one batch, each as its merged model answers it."""

import io
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
import safetensors.numpy
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

import systolic
from systolic.core.errors import NotFoundError, OptionError, RunError, SystolicError
from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.model import prepare_model, set_up_here
from systolic.job import AdapterKind, Layout, MatrixFormat, Optimizer, Precision, WeightFormat
from systolic.models.linear import Turned
from systolic.quantizing.quantize import quantize
from systolic.serving import server as serving
from systolic.serving.facts import COMPILED
from systolic.serving.http.keys import HttpLimits
from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
from systolic.serving.http.state import ServerState
from systolic.serving.http.telemetry import EventLog
from systolic.serving.registry import ModelLoad, ModelRegistry, ServedText
from systolic.serving.request import RefusedError
from systolic.serving.server import (
    AdapterSettings,
    ServeSettings,
    ServeTarget,
    _changes,
    adapter_settings,
    open_served,
    targets,
)
from systolic.serving.text.adapters import (
    AdaptedEngine,
    AdapterRoom,
    AdapterSlots,
    adapter_contents,
    fingerprints,
    other_weights,
    read_matrices,
    template_of,
    with_adapters,
    with_room,
)
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.replicas import ReplicaPlacement
from systolic.serving.text.request import Finish, SamplingParams, TextOutput, TextRequest
from systolic.steps.serving_layout import ServingLayout
from tests.cli.tiny import job
from tests.formats import folders
from tests.formats.gguf import test_gguf
from tests.formats.test_peft import base_of
from tests.runs import bundled
from tests.serving.http.echo import EchoEngine
from tests.serving.http.running import Running, running, wait
from tests.serving.test_serving import served
from tests.serving.text.engine import SMALL
from tests.tiers import some

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]
SIZES = EngineSizes(rows=4, context=48, chunk=16, page_size=8, programs=(2, 2, 2), strict=True)
FEW: Any = {"programs": (1, 1, 1)}
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], list(range(40, 59))]
NEW = 6


def peft_folder(path: Path, base: Path, seed: int, rank: int, targets: Any) -> Path:
    """Adapters that change the model's answers."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    wanted = peft.LoraConfig(
        r=rank,
        lora_alpha=3 * rank,
        init_lora_weights=False,
        target_modules=targets,
        use_rslora=seed == 2,
    )
    peft.get_peft_model(model, wanted).save_pretrained(str(path))
    return path


def engine_of(model: Any, **changed: Any) -> Engine:
    weights = model.read()
    sizes = replace(SIZES, **changed)
    engine = open_engine(model.setup.steps, weights.params, weights.model_state, sizes)
    engine.start()
    return engine


def request(prompt: list[int]) -> TextRequest:
    return TextRequest(tokens=prompt, max_tokens=NEW, sampling=GREEDY, ignore_ends=True, logprobs=0)


def answer(outputs: list[TextOutput]) -> tuple[list[int], list[float]]:
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [score for output in outputs for score, _ in output.logprobs]  # ty: ignore


def answers(engines: list[Any]) -> list[tuple[list[int], list[float]]]:
    """Of each engine to each prompt, all at once."""
    streams = [engine.submit(request(prompt)) for prompt in PROMPTS for engine in engines]
    return [answer(list(stream)) for stream in streams]


FEW_AND_MANY: dict[str, tuple[Any, Any]] = {
    "llama": (["q_proj", "v_proj"], "all-linear"),
    "gemma3": (["q_proj", "down_proj"], "all-linear"),
    "gpt2": (["c_attn"], ["c_attn", "c_proj", "c_fc"]),
    "mixtral": (["k_proj"], ["q_proj", "v_proj", "o_proj"]),
    "deepseek_v2": (["kv_b_proj"], ["q_a_proj", "kv_b_proj", "o_proj"]),
}
"""Matrices that two adapters of a model change."""


@pytest.mark.parametrize("kind", some(list(FEW_AND_MANY), ["gemma3", "mixtral"]))
def test_texts_of_several_adapters_in_one_batch_are_those_of_the_merged_models(
    tmp_path: Path, kind: str
) -> None:
    few, many = FEW_AND_MANY[kind]
    base = base_of(tmp_path / "base", kind)
    paths = [
        peft_folder(tmp_path / "few", base, 1, 2, few),
        peft_folder(tmp_path / "many", base, 2, 4, many),
    ]
    slots = slots_of(base, paths)
    (engine,) = slots.engines
    named = [engine, *slots.taken.values()]
    together = answers(named)
    again = answers(named)  # Now from pages that were read before.
    engine.stop()
    merged = []
    for path in (base, *paths):
        alone = engine_of(prepare_model(path), **FEW)
        assert num_turned(engine) == num_turned(alone) > 0
        merged.append(answers([alone]))
        alone.stop()
    expected = [merged[which][number] for number in range(len(PROMPTS)) for which in range(3)]
    for ours in (together, again):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
        for (_, scores), (_, wanted) in zip(ours, expected, strict=True):
            np.testing.assert_allclose(scores, wanted, atol=2e-4)
    assert len({tuple(tokens) for tokens, _ in expected}) > len(PROMPTS)


def num_turned(engine: Engine) -> int:
    """Matrices that lie as a CPU reads them."""
    turned = [leaf for leaf in leaves(engine) if isinstance(leaf, Turned)]
    return sum(max(len(leaf.parts), 1) for leaf in turned)


def leaves(engine: Engine) -> list[Any]:
    """Weights of the layers."""
    layers = engine.runner._weights.layers
    return jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, Turned))


def test_adapters_stand_beside_matrices_of_16_bits_that_are_held_as_float32(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    path = peft_folder(tmp_path / "many", base, 2, 4, "all-linear")
    slots = slots_of(base, [path], precision=Precision.bf16, **FEW)
    (engine,) = slots.engines
    held = {(isinstance(leaf, Turned), leaf.dtype.name) for leaf in leaves(engine)}
    assert held == {(True, "float32"), (False, "bfloat16")}
    beside = answers([slots.taken[1], engine])
    engine.stop()
    alone = engine_of(prepare_model(path, precision=Precision.bf16), **FEW)
    merged = answers([alone])
    alone.stop()
    for (tokens, scores), (wanted, expected) in zip(beside[::2], merged, strict=True):
        assert (tokens[0], scores[0]) == (wanted[0], pytest.approx(expected[0], abs=0.03))
    assert [tokens[0] for tokens, _ in beside[1::2]] != [tokens[0] for tokens, _ in merged]


def roomy(
    base: Path, paths: list[Path], room: AdapterRoom, precision: Precision = Precision.auto
) -> Any:
    """The base with room for adapters."""
    model = prepare_model(base, precision=precision)
    matrices = [read_matrices(path, base, model.setup.job.model) for path in paths]
    return with_room(model, set_up_here(with_adapters(model.setup.job, matrices, room, "base")))


def slots_of(
    base: Path,
    paths: list[Path],
    room: AdapterRoom | None = None,
    precision: Precision = Precision.auto,
    **changed: Any,
) -> AdapterSlots:
    """A started engine with adapters a, b, ... in its places."""
    room = room or AdapterRoom(len(paths))
    model = roomy(base, paths, room, precision)
    engine = engine_of(model, adapters=room.count, **changed)
    own = model.setup.job.model
    slots = AdapterSlots(engine=engine, engines=[engine], base=base, model=own)
    for name, path in zip("abcdefgh", paths, strict=False):
        slots.place(name, path)
    return slots


def test_pages_of_an_adapter_are_found_by_its_own_texts_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 2, ["k_proj"])
    slots = slots_of(base, [folder], AdapterRoom(1, 3), **FEW)
    (engine,), named, prompt = slots.engines, slots.taken[1], list(range(30, 50))

    def cached(of: Any) -> int:
        return list(of.submit(request(prompt)))[-1].cached_tokens

    # The prompt has two whole pages of 8.
    assert [cached(of) for of in (engine, named, named, engine)] == [0, 0, 16, 16]
    # Key projections of two layers, 32 inputs and 16 outputs, float32.
    assert engine.memory.adapters_bytes == 4 * 2 * 3 * (32 + 16)
    rows = {row.name: row.bytes for row in engine.memory.rows()}
    assert rows["weights"] + rows["adapters"] == engine.memory.weights_bytes
    assert sum(rows.values()) == engine.memory.capacity_bytes
    # Another version of the name has keys and values of its own; the model has those it had.
    assert named.drain(0.0)
    newer = slots.place("a", folder)
    assert newer.number == named.number
    assert [cached(of) for of in (newer, newer, engine)] == [0, 16, 16]
    engine.stop()


def test_what_can_not_stand_side_by_side_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 4, ["v_proj"])
    model = prepare_model(base)
    own = model.setup.job.model
    with pytest.raises(OptionError, match="--adapter-rank is 2 and an adapter has rank 4; give 4"):
        roomy(base, [folder], AdapterRoom(1, 2))
    with pytest.raises(OptionError, match="2,000 adapters of rank 16 have 32,000 columns"):
        roomy(base, [folder], AdapterRoom(2000, 16))
    with pytest.raises(OptionError, match="base has adapters of its own"):
        with_adapters(roomy(base, [folder], AdapterRoom(1)).setup.job, [], AdapterRoom(1), "base")
    with pytest.raises(OptionError, match="is a whole model and holds no adapters"):
        read_matrices(base, base, own)
    weights = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors = {name: np.full_like(array, np.inf) for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(OptionError, match="has numbers that are not finite"):
        read_matrices(folder, base, own)


def _describe(folder: Path, **fields: Any) -> None:
    about = folder / "adapter_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | fields))


def _changed(folder: Path, tensors: Any, **fields: Any) -> None:
    """Changes the description of a folder, and its tensors."""
    _describe(folder, **fields)
    weights = folder / "adapter_model.safetensors"
    arrays = tensors(safetensors.numpy.load_file(weights))
    safetensors.numpy.save_file(arrays, weights, {"format": "pt"})


EMBEDDING = "base_model.model.model.embed_tokens.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "DoRA": (lambda path: _changed(path, dict, use_dora=True), "use_dora True, which is no"),
    "bias": (lambda path: _changed(path, dict, bias="all"), "bias 'all', which is no low-rank"),
    "PiSSA": (
        lambda path: _changed(path, dict, init_lora_weights="pissa_niter_4"),
        "init_lora_weights 'pissa_niter_4', which changes the base's own matrices",
    ),
    "pattern": (
        lambda path: _changed(path, dict, target_modules="q_proj("),
        "'q_proj(', which is no regular expression",
    ),
    "modules": (
        lambda path: _changed(path, dict, modules_to_save=["lm_head"]),
        "modules_to_save ['lm_head'], which is no",
    ),
    "other modules": (
        lambda path: _changed(
            path, lambda all_: {name.replace("v_proj", "w"): a for name, a in all_.items()}
        ),
        "takes none for here",
    ),
    "new rows of an embedding": (
        lambda path: _changed(path, lambda all_: {**all_, EMBEDDING: np.zeros((310, 32), "f4")}),
        f"takes none for here: {EMBEDDING}",
    ),
    "another base": (
        lambda path: _changed(path, lambda all_: {name: a[:, :2] for name, a in all_.items()}),
        "belongs to another model than",
    ),
    "no weights": (
        lambda path: (path / "adapter_model.safetensors").unlink(),
        "has no adapter_model.safetensors",
    ),
    "half of a file": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(
            (path / "adapter_model.safetensors").read_bytes()[:700]
        ),
        "it is cut short, copy it again",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_that_is_no_adapter_of_the_base_is_one_line(tmp_path: Path, kind: str) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 4, ["v_proj"])
    change, message = BROKEN[kind]
    change(folder)
    with pytest.raises(SystolicError, match=re.escape(message)) as error:
        read_matrices(folder, base, prepare_model(base).setup.job.model)
    assert "\n" not in str(error.value)


def test_a_reload_places_adapters_whose_files_are_others(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 4, ["v_proj"])
    tokenizer = Tokenizer(path=None)
    engine = EchoEngine(tokenizer)
    slots = AdapterSlots(engine=engine, engines=[], base=base, model=SMALL)
    own = ServedText(
        name="x", base="base", engine=engine, tokenizer=tokenizer, contents=adapter_contents(folder)
    )
    model = ServedText(
        name="base", engine=engine, tokenizer=tokenizer, slots=slots, adapters=[own], contents="c"
    )
    state = ServerState(registry=ModelRegistry([model]), limits=HttpLimits(), metrics=Metrics())
    state.adapters |= {"x": folder}
    contents = "c"

    def changes(name: str | None = None) -> tuple[list[Any], ...]:
        def pending(target: ServeTarget) -> ModelLoad:
            return ModelLoad(key=(target.name, target.version), open=lambda: model)

        plan = _changes([f"base={base}"], state, pending, lambda _: contents, name)
        return [load.key for load in plan.added], list(plan.unchanged), list(plan.gone)

    assert changes() == ([], [("base", 1), ("x", 1)], [])
    state.adapters["y"], state.failures["y", 1] = tmp_path / "none", "it is not there"
    assert changes() == ([("y", 1)], [("base", 1), ("x", 1)], [])
    assert changes("x") == ([], [("x", 1)], [])
    state.unloaded.add("y")
    _changed(folder, lambda all_: {name: 2 * a for name, a in all_.items()})
    assert changes() == ([("x", 1)], [("base", 1)], [])
    contents = "d"  # The model is opened again, with all of its adapters.
    assert changes() == ([("base", 1)], [], [])
    with pytest.raises(NotFoundError, match="not given a model z; it has base, x, y"):
        changes("z")


def test_an_adapter_of_other_weights_is_told_and_a_base_that_moved_is_not(tmp_path: Path) -> None:
    base, twin = (base_of(tmp_path / name, "llama") for name in ("base", "twin"))
    folder = peft_folder(tmp_path / "peft", base, 1, 4, ["v_proj"])
    own, copied = (fingerprints(path) for path in (base, twin))
    assert other_weights(folder, base, own) == other_weights(folder, twin, copied) == ""
    tensors = safetensors.numpy.load_file(base / "model.safetensors")
    tensors = {name: array + 1 for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    told = other_weights(folder, twin, fingerprints(twin))
    assert f"was trained on {base}, whose files are others than those of {twin}" in told
    shutil.rmtree(base)
    assert other_weights(folder, twin, copied) == ""


def test_the_choice_of_devices_counts_adapters() -> None:
    own = job(model=SMALL, batch=2)

    def held(count: int, rank: int) -> int:
        placement = ReplicaPlacement(
            layout=ServingLayout(),
            sizes=replace(SIZES, adapters=count),
            adapted=lambda job: with_adapters(job, [], AdapterRoom(count, rank), "base"),
        )
        return placement._need(own, "cpu", jax.devices(), 1).bytes

    # Of two layers: query and out, key and value, gate, up and down; float32.
    inputs_and_outputs = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 32))
    assert held(3, 2) - held(2, 2) == 4 * 2 * inputs_and_outputs


def test_an_adapter_has_the_template_that_it_keeps(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "peft", base, 1, 4, ["v_proj"])
    assert template_of(folder) is None
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = template_of(folder)
    assert template is not None
    assert template.text == "{{ messages[0].content }}"


def test_names_of_adapters(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    models = targets([str(tmp_path / "a")])
    assert adapter_settings([f"x={tmp_path / 'b'}"], models).targets == [
        ServeTarget(name="x", path=tmp_path / "b")
    ]
    assert adapter_settings([], targets([str(tmp_path / "a"), str(tmp_path / "b")])).count == 0
    with pytest.raises(OptionError, match="give NAME=DIR, such as support="):
        adapter_settings([str(tmp_path / "b")], models)
    with pytest.raises(OptionError, match="give NAME=DIR, such as support=gone"):
        adapter_settings(["gone"], models)
    with pytest.raises(NotFoundError, match=r"--adapter x is gone, .* or a PEFT folder"):
        adapter_settings(["x=gone"], models)
    with pytest.raises(OptionError, match="--adapter a has the name of a model"):
        adapter_settings([f"a={tmp_path / 'b'}"], models)
    with pytest.raises(OptionError, match="a has several versions"):
        adapter_settings([f"x={tmp_path / 'b'}"], [*models, replace(models[0], version=2)])
    both = adapter_settings([f"x={tmp_path / 'b'}"], [*models, replace(models[0], name="c")])
    assert (both.base, both.count) == ("a", 1)
    with pytest.raises(OptionError, match="--adapter-rank has no effect without --adapter or"):
        adapter_settings([], models, rank=4)
    with pytest.raises(OptionError, match="--adapters is 1 and 2 are given by --adapter; give 2"):
        adapter_settings([f"x={tmp_path / 'b'}", f"y={tmp_path / 'b'}"], models, 1)


def test_adapters_come_and_go_with_their_model() -> None:
    tokenizer = Tokenizer(path=None)
    engine = EchoEngine(tokenizer)
    engine.start()
    slots = AdapterSlots(engine=engine, engines=[], base=Path("base"), model=SMALL)

    def adapted(name: str) -> ServedText:
        own = AdaptedEngine(slots=slots, name=name, number=1)
        return ServedText(name=name, base="base", engine=own, tokenizer=tokenizer)

    def model(*adapters: str) -> ServedText:
        own = [adapted(name) for name in adapters]
        return ServedText(
            name="base", engine=engine, tokenizer=tokenizer, slots=slots, adapters=own
        )

    registry = ModelRegistry([model("x", "y")])
    assert [served.name for served in registry.newest()] == ["base", "x", "y"]
    registry.retire("y", 1, 0.0)
    assert engine.ready
    registry.put(adapted("w"))
    registry.swap(model("x", "z"), 0.0)
    assert [served.name for served in registry.newest()] == ["base", "x", "z"]
    registry.put(ServedText(name="other", engine=engine, tokenizer=tokenizer))
    registry.swap(model("x"), 0.0)
    assert [served.name for served in registry.newest()] == ["base", "x", "other"]
    with registry.use("x"):  # The engine ends after a request that holds an adapter.
        assert not registry.swap(model("x"), 0.0)
    assert registry.retire("base", 1, 0.0)
    assert [served.name for served in registry.newest()] == ["other"]


@contextmanager
def opened(path: Path, control: bool = True, **changed: Any) -> Iterator[Running]:
    """A server of a folder, which clients may load adapters into."""
    count = changed.pop("adapters", 0)
    settings = ServeSettings(adapters=AdapterSettings(room=count, rank=4))
    sizes = EngineSizes(rows=4, context=96, chunk=32, page_size=8, strict=True, **FEW)
    settings = replace(settings, sizes=replace(sizes, adapters=count, **changed))
    metrics = Metrics()
    target, books = (
        ServeTarget(name="base", path=path),
        (TextMetrics(metrics), BatchMetrics(metrics)),
    )
    with running([open_served(target, settings, *books, EventLog(io.StringIO()))]) as server:
        server.state.metrics = metrics
        server.state.control = server.process if control else None
        yield server


BODIES: list[dict[str, Any]] = [
    {"prompt": "the capital of France is", "logprobs": 3},
    {"prompt": ["yes no yes no yes no yes no yes", "a question"], "n": 2},
    {"prompt": "an answer:", "structured_outputs": {"regex": "(yes|no|[a-z]{4}), [0-9]{5}"}},
    {"prompt": "a", "temperature": 1.0, "seed": 5, "max_tokens": 4},
]


def choices(client: httpx.Client, model: str) -> tuple[list[str], list[float]]:
    """Texts that a model answers :data:`BODIES` with, and log-probabilities."""
    texts: list[str] = []
    scores: list[float] = []
    for body in BODIES:
        plain = {"model": model, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        response = client.post("/v1/completions", json=plain | body).raise_for_status()
        for choice in response.json()["choices"]:
            texts.append(choice["text"])
            scores += (choice["logprobs"] or {}).get("token_logprobs", [])
    return texts, scores


def check_names_that_are_not_served(
    state: ServerState, post: Callable[..., str], folder: Path
) -> None:
    """A model that is away keeps its name; an adapter that was left out when its model was opened again is forgotten."""
    state.unloaded.add("gone")
    state.failures["failed", 1] = "its folder is empty"
    for name in ("gone", "failed"):
        assert "is a model that is not loaded now" in post("load", 400, name, folder)
    state.failures.clear()
    state.adapters["lost"], state.failures["lost", 1] = folder.with_name("lost"), "it has gone"
    post("unload", 200, "lost")
    assert state.failures == {}
    assert "there is no model 'lost'" in post("unload", 404, "lost")


def check_metrics(client: httpx.Client, at: list[str], requests: dict[str, float]) -> None:
    """Series by adapter are of those that are loaded, and the label of a router's names them."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    by_name: dict[str, dict[str, float]] = {}
    for sample in samples:
        if "lora_name" in sample.labels:
            own = by_name.setdefault(sample.name.removeprefix("systolic:lora_"), {})
            name = sample.labels["lora_name"]
            own[name] = own.get(name, 0.0) + sample.value
    for gauge in ("num_requests_running", "num_requests_waiting"):
        assert by_name[gauge] == dict.fromkeys(at, 0.0)
    assert by_name.get("request_success_total", {}) == requests
    for tokens in ("prompt_tokens_total", "generation_tokens_total"):
        assert {name for name, value in by_name[tokens].items() if value > 0} == {*requests}
        assert {*by_name[tokens]} == {*at}
    (info,) = [sample for sample in samples if sample.name == "systolic:lora_requests_info"]
    names = {"running_lora_adapters": ",".join(sorted(at)), "waiting_lora_adapters": ""}
    assert info.labels == {"model_name": "base", "version": "1", "max_lora": "2"} | names
    assert info.value == pytest.approx(time.time(), abs=60)


def test_adapters_come_and_go_while_a_server_answers_and_nothing_compiles(tmp_path: Path) -> None:
    base = folders.folder(tmp_path / "base")
    few = peft_folder(tmp_path / "few", base, 1, 2, ["q_proj", "v_proj"])
    many = peft_folder(tmp_path / "many", base, 2, 4, "all-linear")
    expected = {}
    for path in (base, few, many):
        with opened(path, speculate=2) as merged, merged.client() as client:
            texts, scores = choices(client, "base")
            expected[path.name] = (texts, pytest.approx(scores, abs=2e-4))
    assert len({str(texts) for texts, _ in expected.values()}) == 3
    compiles: list[str] = []
    with opened(base, adapters=2, speculate=2) as server, server.client() as client:

        def post(verb: str, status: int, name: str, path: Path | None = None, **more: Any) -> str:
            body = {"lora_name": name, **more} | ({} if path is None else {"lora_path": str(path)})
            response = client.post(f"/v1/{verb}_lora_adapter", json=body)
            assert response.status_code == status, response.text
            return response.text

        def listed() -> dict[str, str | None]:
            return {m["id"]: m.get("parent") for m in client.get("/v1/models").json()["data"]}

        assert choices(client, "base") == expected["base"]
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, _, **__: compiles.append(event) if event == COMPILED else None
        )
        text = post("load", 200, "x", few)
        assert text == "Success: LoRA adapter 'x' added successfully."
        post("load", 200, "org/y", many)
        assert listed() == {"base": None, "x": "base", "org/y": "base"}
        for name, own in (("x", "few"), ("org/y", "many"), ("base", "base"), ("x", "few")):
            assert choices(client, name) == expected[own]
        texts = len(expected["few"][0])
        check_metrics(client, ["x", "org/y"], {"x": 2.0 * texts, "org/y": texts})
        assert "set load_inplace" in post("load", 400, "x", many)
        assert "room for 2 adapters and serves x, org/y" in post("load", 400, "z", many)
        assert "base is a model that is served" in post("load", 400, "base", many)
        check_names_that_are_not_served(server.state, post, many)
        assert "does not exist" in post("load", 404, "z", tmp_path / "none")
        assert "is no name for a model" in post("load", 400, "a b", many)
        assert "lora_path is missing" in post("load", 400, "z")
        # Pages that were read for the first version of x answer for the second in nothing.
        server.state.failures["x", 1] = "its newer files were damaged"
        post("load", 200, "x", many, load_inplace=True)
        assert server.state.failures == {}
        assert choices(client, "x") == expected["many"]
        post("unload", 200, "x")
        assert listed() == {"base": None, "org/y": "base"}
        assert "there is no model 'x'" in post("unload", 404, "x")
        assert "is a model and no adapter" in post("unload", 400, "base")
        assert client.post("/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
        post("load", 200, "z", few)
        check_metrics(client, ["z", "org/y"], {"org/y": texts})
        assert choices(client, "z") == expected["few"]
        assert choices(client, "base") == expected["base"]
        assert compiles == []
        drafts = re.findall(r"spec_decode_num_drafts_total{.* (\S+)", client.get("/metrics").text)
        assert float(drafts[-1]) > 0
        server.state.control = None
        assert "--model-control" in post("load", 403, "x", few)


def check_beside(base: Path, adapter: Path, error: float) -> None:
    """A server of a base answers by an adapter's name as one of the adapter merged into the model that it names."""
    with opened(adapter) as merged, merged.client() as client:
        texts, scores = choices(client, "base")
    with opened(base, adapters=1) as server, server.client() as client:
        body = {"lora_name": "x", "lora_path": str(adapter)}
        client.post("/v1/load_lora_adapter", json=body).raise_for_status()
        assert choices(client, "x") == (texts, pytest.approx(scores, abs=error))
        assert choices(client, "base")[0] != texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_adapters_beside_a_gguf_file_answer_as_merged_into_what_it_holds(
    tmp_path: Path, kind: str
) -> None:
    model = folders.llama(num_hidden_layers=1, hidden_size=64, intermediate_size=96, head_dim=16)
    file = test_gguf.write(tmp_path / "base.gguf", model, test_gguf.KINDS[kind])
    systolic.export(file, tmp_path / "restored")
    folder = peft_folder(tmp_path / "peft", tmp_path / "restored", 1, 4, "all-linear")
    check_beside(file, folder, 2e-4)


@pytest.mark.parametrize("group", some({"int8": 0, "int4 without memory for floats": 32}, ["int8"]))
def test_adapters_beside_codes_answer_as_merged_into_the_restored_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    # A group of int4 is a head of the output projection.
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32} if group else {}
    base = folders.folder(tmp_path / "base", folders.llama(num_hidden_layers=1, **wide))
    how = WeightFormat.int4 if group else WeightFormat.int8
    quantize(base, tmp_path / "codes", to=MatrixFormat(format=how, group=group))
    systolic.export(tmp_path / "codes", tmp_path / "restored")
    monkeypatch.setattr(serving, "restored_on_cpu", lambda model, *_: model)
    folder = peft_folder(tmp_path / "peft", tmp_path / "restored", 1, 4, "all-linear")
    check_beside(tmp_path / "codes", folder, 1e-3)
    # An adapter of what the codes were made from is none of other weights.
    _describe(folder, base_model_name_or_path=str(base))
    assert other_weights(folder, tmp_path / "codes", fingerprints(tmp_path / "codes")) == ""


@pytest.mark.slow
def test_adapters_stand_beside_a_run(tmp_path: Path) -> None:
    run = bundled.run("lm", tmp_path)
    systolic.export(run, tmp_path / "folder")
    folder = peft_folder(tmp_path / "peft", tmp_path / "folder", 1, 2, "all-linear")
    systolic.export(run, tmp_path / "bundle", to="bundle")
    _describe(folder, base_model_name_or_path=str(tmp_path / "bundle"))
    check_beside(run, folder, 2e-4)
    assert other_weights(folder, run, fingerprints(run)) == ""


def check_waiting(slots: AdapterSlots, adapted: AdaptedEngine, patch: pytest.MonkeyPatch) -> None:
    """Six texts of an adapter in an engine of four rows, whose step does not end."""
    (engine,), go_on = slots.engines, threading.Event()
    collect = engine.runner.collect
    patch.setattr(engine.runner, "collect", lambda flight: go_on.wait(60) and collect(flight))
    streams = [adapted.submit(request([5, 6])) for _ in range(6)]
    wait(lambda: adapted.num_texts()[0] > 0)
    running, waiting = adapted.num_texts()
    assert running + waiting == 6
    assert waiting >= 2
    model = ServedText(name="base", engine=engine, tokenizer=engine.tokenizer, slots=slots)
    own = replace(model, name=adapted.name, base="base", engine=adapted, slots=None)
    metrics = Metrics()
    metrics.adapters.show([model, own])
    at = {"model_name": "base", "version": "1"}
    read = metrics.registry.get_sample_value
    names = {"running_lora_adapters": "a", "waiting_lora_adapters": "a"}
    assert read("systolic:lora_requests_info", {**at, "max_lora": "1", **names})
    assert read("systolic:lora_num_requests_waiting", {**at, "lora_name": "a"}) >= 2
    go_on.set()
    assert [list(stream)[-1].finish for stream in streams] == [Finish.length] * 6


def test_requests_of_an_adapter_that_goes_end_or_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 2, ["k_proj"])
    slots = slots_of(base, [folder], **FEW)
    (engine,), named = slots.engines, slots.taken[1]
    stream, other = named.submit(request([5, 6])), engine.submit(request([5, 6]))
    assert named.drain(30.0)
    assert slots.taken == {}
    assert [list(each)[-1].finish for each in (stream, other)] == [Finish.length] * 2
    with pytest.raises(RefusedError, match="a is being replaced"):
        named.submit(request([5, 6]))
    last = slots.place("a", folder)
    long = replace(request([5, 6]), max_tokens=40)
    stream, other = last.submit(long), engine.submit(long)
    assert not last.drain(0.0)
    end = list(stream)[-1]
    assert (end.finish, end.message) == (
        Finish.cancelled,
        "a was unloaded before the text ended; ask another model",
    )
    assert list(other)[-1].finish is Finish.length
    check_waiting(slots, slots.place("a", folder), monkeypatch)
    engine.stop()
    with pytest.raises(RunError, match="the engine has ended"):
        slots.place("a", folder)


def test_what_a_server_has_no_room_for_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    few = peft_folder(tmp_path / "few", base, 1, 2, ["k_proj"])
    many = peft_folder(tmp_path / "many", base, 1, 2, ["k_proj", "v_proj"])
    slots = slots_of(base, [few], AdapterRoom(2), **FEW)
    with pytest.raises(OptionError, match=r"has an adapter of .*value, and .* beside key alone"):
        slots.place("b", many)
    wide = peft_folder(tmp_path / "wide", base, 1, 4, ["k_proj"])
    with pytest.raises(OptionError, match="rank 4 and the server has room for 2; start it with"):
        slots.place("b", wide)
    assert list(slots.taken) == [1]
    slots.engine.stop()


@pytest.mark.slow
def test_a_server_answers_for_a_run_and_a_peft_folder_by_name(tmp_path: Path) -> None:
    base = folders.folder(tmp_path / "base")
    data = tmp_path / "some.jsonl"
    pairs = ({"prompt": f"a question {n}", "completion": f"yes {n}"} for n in range(30))
    data.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    lora: Any = {"adapter": AdapterKind.lora, "rank": 2, "alpha": 4.0}
    lora |= {"layout": Layout(data=1, fsdp=1), "optimizer": Optimizer(learning_rate=5e-2)}
    run, folder = tmp_path / "run", tmp_path / "peft"
    systolic.train("sft", run=run, steps=3, from_=base, data=data, sequence=48, batch=4, **lora)
    peft_folder(folder, base, 1, 4, ["q_proj", "down_proj"])
    small = ("--rows", "4", "--context", "96", "--chunk", "64", "--strict")
    named = ("--adapter", f"legal={folder}", "--adapters", "2", "--model-control")
    sampling = systolic.Sampling(temperature=0.0)
    expected = {
        name: systolic.open(path).generate("a question 3", tokens=8, sampling=sampling)
        for name, path in (("base", base), ("support", run), ("legal", folder))
    }
    with served(str(base), *small, *named) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        body = {"lora_name": "support", "lora_path": str(run)}
        httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
        listed = {model.id: model.model_dump()["parent"] for model in client.models.list()}
        assert listed == {"base": None, "support": "base", "legal": "base"}
        for name, texts in expected.items():
            answered = client.completions.create(
                model=name, prompt="a question 3", max_tokens=8, temperature=0
            )
            assert [choice.text for choice in answered.choices] == texts
        unnamed = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": "a question 3", "max_tokens": 8, "temperature": 0},
        )
        assert unnamed.json()["model"] == "base"
    assert len({tuple(texts) for texts in expected.values()}) == 3
