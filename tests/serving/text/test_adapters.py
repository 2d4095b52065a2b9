"""Adapters by name: texts of several in one batch, each as its merged model answers it."""

import json
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

import systolic
from systolic.core.errors import OptionError
from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.model import prepare_model, set_up_here
from systolic.job import AdapterKind, Layout, Optimizer, Precision
from systolic.models.linear import Turned
from systolic.serving.registry import ModelRegistry, ServedText
from systolic.serving.server import ServeTarget, adapter_targets, targets
from systolic.serving.text.adapters import AdaptedEngine, read_matrices, with_adapters
from systolic.serving.text.engine import Engine
from systolic.serving.text.opening import EngineSizes, open_engine
from systolic.serving.text.request import SamplingParams, TextOutput, TextRequest
from tests.formats import folders
from tests.formats.test_peft import base_of
from tests.serving.http.echo import EchoEngine
from tests.serving.test_serving import served

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
        r=rank, lora_alpha=3 * rank, init_lora_weights=False, target_modules=targets
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


@pytest.mark.parametrize(
    ("kind", "few", "many"),
    [
        ("llama", ["q_proj", "v_proj"], "all-linear"),
        ("gemma3", ["q_proj", "down_proj"], "all-linear"),
        ("gpt2", ["c_attn"], ["c_attn", "c_proj", "c_fc"]),
        ("mixtral", ["k_proj"], ["q_proj", "v_proj", "o_proj"]),
        ("deepseek_v2", ["kv_b_proj"], ["q_a_proj", "kv_b_proj", "o_proj"]),
    ],
)
def test_texts_of_several_adapters_in_one_batch_are_those_of_the_merged_models(
    tmp_path: Path, kind: str, few: Any, many: Any
) -> None:
    base = base_of(tmp_path / "base", kind)
    paths = [
        peft_folder(tmp_path / "few", base, 1, 2, few),
        peft_folder(tmp_path / "many", base, 2, 4, many),
    ]
    engine = engine_of(side_by_side(base, paths), adapters=2)
    named = [engine, *(AdaptedEngine(engine=engine, number=number) for number in (1, 2))]
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
    return sum(isinstance(leaf, Turned) for leaf in leaves(engine))


def leaves(engine: Engine) -> list[Any]:
    """Weights of the layers."""
    layers = engine.runner._weights.layers
    return jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, Turned))


def test_adapters_stand_beside_matrices_of_16_bits_that_are_held_as_float32(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    path = peft_folder(tmp_path / "many", base, 2, 4, "all-linear")
    engine = engine_of(side_by_side(base, [path], precision=Precision.bf16), adapters=1, **FEW)
    held = {(isinstance(leaf, Turned), leaf.dtype.name) for leaf in leaves(engine)}
    assert held == {(True, "float32"), (False, "bfloat16")}
    beside = answers([AdaptedEngine(engine=engine, number=1), engine])
    engine.stop()
    alone = engine_of(prepare_model(path, precision=Precision.bf16), **FEW)
    merged = answers([alone])
    alone.stop()
    for (tokens, scores), (wanted, expected) in zip(beside[::2], merged, strict=True):
        assert (tokens[0], scores[0]) == (wanted[0], pytest.approx(expected[0], abs=0.03))
    assert [tokens[0] for tokens, _ in beside[1::2]] != [tokens[0] for tokens, _ in merged]


def side_by_side(
    base: Path, paths: list[Path], rank: int = 0, precision: Precision = Precision.auto
) -> Any:
    model = prepare_model(base, precision=precision)
    matrices = [read_matrices(path, base, model.setup.job.model) for path in paths]
    return with_adapters(model, matrices, rank, set_up_here, "base")


def test_pages_of_an_adapter_are_found_by_its_own_texts_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 2, ["k_proj"])
    engine = engine_of(side_by_side(base, [folder], rank=3), adapters=1)
    named, prompt = AdaptedEngine(engine=engine, number=1), list(range(30, 50))

    def cached(of: Any) -> int:
        return list(of.submit(request(prompt)))[-1].cached_tokens

    # The prompt has two whole pages of 8.
    assert [cached(of) for of in (engine, named, named, engine)] == [0, 0, 16, 16]
    engine.stop()


def test_what_can_not_stand_side_by_side_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = peft_folder(tmp_path / "few", base, 1, 4, ["v_proj"])
    model = prepare_model(base)
    own = model.setup.job.model
    with pytest.raises(OptionError, match="--adapter-rank is 2 and an adapter has rank 4; give 4"):
        side_by_side(base, [folder], rank=2)
    with pytest.raises(OptionError, match="base has adapters of its own"):
        with_adapters(side_by_side(base, [folder]), [{}], 0, set_up_here, "base")
    with pytest.raises(OptionError, match="is a whole model and holds no adapters"):
        read_matrices(base, base, own)
    weights = folder / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors = {name: np.full_like(array, np.inf) for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(OptionError, match="has numbers that are not finite"):
        read_matrices(folder, base, own)


def test_names_of_adapters(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    models = targets([str(tmp_path / "a")])
    assert adapter_targets([f"x={tmp_path / 'b'}"], models) == [
        ServeTarget(name="x", path=tmp_path / "b")
    ]
    assert adapter_targets([], targets([str(tmp_path / "a"), str(tmp_path / "b")])) == []
    with pytest.raises(OptionError, match="give NAME=DIR, such as support="):
        adapter_targets([str(tmp_path / "b")], models)
    with pytest.raises(OptionError, match="--adapter a has the name of a model"):
        adapter_targets([f"a={tmp_path / 'b'}"], models)
    with pytest.raises(OptionError, match="belongs to one model, and 2 are given"):
        adapter_targets([f"x={tmp_path / 'b'}"], [*models, replace(models[0], name="c")])


def test_adapters_come_and_go_with_their_model() -> None:
    tokenizer = Tokenizer(path=None)
    engine = EchoEngine(tokenizer)
    engine.start()

    def model(*adapters: str) -> ServedText:
        plain = ServedText(name="base", engine=engine, tokenizer=tokenizer)
        own = [
            replace(plain, name=name, base="base", engine=AdaptedEngine(engine=engine, number=1))
            for name in adapters
        ]
        return replace(plain, adapters=own)

    registry = ModelRegistry([model("x", "y")])
    assert [served.name for served in registry.newest()] == ["base", "x", "y"]
    registry.retire("y", 1, 0.0)
    assert engine.ready
    registry.swap(model("x", "z"), 0.0)
    assert [served.name for served in registry.newest()] == ["base", "x", "z"]
    registry.retire("base", 1, 0.0)
    assert registry.newest() == []


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
    named = ("--adapter", f"support={run}", "--adapter", f"legal={folder}")
    sampling = systolic.Sampling(temperature=0.0)
    expected = {
        name: systolic.open(path).generate("a question 3", tokens=8, sampling=sampling)
        for name, path in (("base", base), ("support", run), ("legal", folder))
    }
    with served(str(base), *small, *named) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
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
