"""Folders of PEFT, both ways: PEFT's own logits are those of the model here."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

import systolic
from systolic.cli.main import main
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.formats.comparison import outputs_of
from systolic.formats.hugging_face.reader import impossible
from systolic.formats.jobs import job_of
from systolic.formats.outline import contents_of
from systolic.formats.peft import (
    ADAPTERS,
    WEIGHTS,
    PeftSource,
    _checked,
    open_peft,
    outgoing_adapters,
    same_adapter,
)
from systolic.formats.source import open_source
from systolic.formats.weights import starting_weights
from systolic.inference.model import set_up_here
from systolic.job import Adapter, AdapterKind, Layout, Optimizer
from systolic.runs.weights import Weights
from tests.formats import folders
from tests.models.foreign import relative

# PEFT calls a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

LLAMA = {
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 304, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
    "gemma3": lambda: transformers.Gemma3TextConfig(**LLAMA, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, **MIXTURE),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**(LLAMA | LATENT)),
}
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 17)).astype(np.int32)


def base_of(path: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[kind]())
    return folders.folder(path, model)


def their_logits(folder: Path, base: Path) -> np.ndarray:
    """PEFT's, of a folder on its base."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(model, str(folder)).eval()
        return adapted(torch.tensor(TOKENS, dtype=torch.long), use_cache=False).logits.numpy()


def trained(base: Path, adapter: Adapter) -> tuple[Any, Weights]:
    """Programs and weights of a job with adapters as a training could leave them: none is zero."""
    job = replace(job_of(open_source(base)), adapter=adapter, start=base)
    steps = set_up_here(job).steps
    begun, _ = starting_weights(base, steps)
    rng = np.random.default_rng(1)
    params = {
        path: jax.numpy.asarray(rng.normal(size=like.shape, scale=0.3), np.float32)
        for path, like in steps.abstract_state.params.items()
    }
    return steps, replace(begun, params=params)


def written(path: Path, steps: Any, weights: Weights, base: Path) -> Path:
    config = json.loads((base / "config.json").read_text())
    made = outgoing_adapters(
        steps.job.model, steps.job.adapter, weights.params, config, str(base.resolve())
    )
    path.mkdir()
    (path / ADAPTERS).write_text(json.dumps(made.config))
    safetensors.numpy.save_file(dict(made.arrays), path / WEIGHTS, {"format": "pt"})
    return path


ATTENTION = ("query", "query_down", "key", "value", "out")


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt2", ()),
        *(
            pytest.param(kind, (), marks=pytest.mark.slow)
            for kind in FAMILIES
            if kind not in ("gpt2", "deepseek_v2")
        ),
        pytest.param("llama", ("query", "out"), marks=pytest.mark.slow),
        pytest.param("gpt2", ("query", "out"), marks=pytest.mark.slow),
        ("deepseek_v2", ATTENTION),
    ],
)
def test_peft_computes_what_a_run_does(tmp_path: Path, kind: str, targets: tuple[str, ...]) -> None:
    base = base_of(tmp_path / "base", kind)
    adapter = Adapter(kind=AdapterKind.lora, rank=3, alpha=5.0, targets=targets)
    steps, weights = trained(base, adapter)
    ours = outputs_of(steps, weights, {"tokens": TOKENS})
    folder = written(tmp_path / "peft", steps, weights, base)
    assert relative(their_logits(folder, base), ours) < 1e-5
    assert relative(folders.logits(base, TOKENS), ours) > 1e-2
    assert contents_of(folder, "best") != contents_of(base, "best")
    # Opened again it is the same model, and the adapters are those that a run trains on.
    source = open_peft(folder)
    plain = set_up_here(job_of(source)).steps
    params = dict(source.each(plain.abstract_state.params))
    again = Weights(step=0, params=params, model_state=weights.model_state, skipped=[])
    rest = {p: a for p, a in again.model_state.items() if p in plain.abstract_state.model_state}
    merged = outputs_of(plain, replace(again, model_state=rest), {"tokens": TOKENS})
    assert relative(merged, ours) < 1e-5
    for path in ("blocks/query", "blocks/out") if kind != "deepseek_v2" else ("blocks/out",):
        pieces = np.concatenate([p.reshape(-1) for p in source.pieces(path)])
        np.testing.assert_allclose(pieces, np.asarray(params[path]).reshape(-1), atol=1e-6)
    assert source.adapter is not None
    assert (source.adapter.rank, source.adapter.alpha) == (3, pytest.approx(5.0))
    assert set(source.adapter.targets) == set(targets)
    for path, pair in source.pairs.items():
        np.testing.assert_array_equal(pair.a, weights.params[f"{path}/lora_a"])
        np.testing.assert_allclose(pair.b, weights.params[f"{path}/lora_b"], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        (
            "llama",
            {
                "target_modules": ["q_proj", "down_proj"],
                "rank_pattern": {"q_proj": 2},
                "alpha_pattern": {"layers.1.mlp.down_proj": 7},
                "layers_to_transform": [1],
            },
        ),
        pytest.param(
            "gpt2",
            {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["rslora", "patterns", "gpt2"],
)
def test_folders_that_peft_saved_are_read(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    import peft

    base = base_of(tmp_path / "base", kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    wanted = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **fields)
    peft.get_peft_model(model, wanted).save_pretrained(str(tmp_path / "peft"))
    theirs = their_logits(tmp_path / "peft", base)
    opened = systolic.open(tmp_path / "peft")
    ours = outputs_of(opened.setup.steps, opened.weights, {"tokens": TOKENS})
    assert relative(ours, theirs) < 1e-5
    assert relative(folders.logits(base, TOKENS), theirs) > 1e-3
    source = open_peft(tmp_path / "peft")
    if "rank_pattern" in fields:
        assert source.adapter is None
        with pytest.raises(OptionError, match="several ranks, or a layer lacks one"):
            same_adapter(source, Adapter(kind=AdapterKind.lora, rank=4, alpha=6.0))
    else:
        scale = 6 / (2 if "use_rslora" in fields else 4)
        assert source.adapter is not None
        assert source.adapter.scale == pytest.approx(scale)
    if "use_rslora" in fields:
        check_what_a_config_leaves_out(tmp_path / "peft", tmp_path / "less")
    # Merged it leaves as any model does.
    systolic.export(tmp_path / "peft", tmp_path / "whole")
    assert relative(folders.logits(tmp_path / "whole", TOKENS), theirs) < 1e-5


def modules_of(source: PeftSource) -> set[str]:
    ends = re.compile(r"base_model\.model\.(.*)\.lora_[AB]\.weight")
    return {ends.sub(r"\1", name) for name in source.adapters}


def check_what_a_config_leaves_out(folder: Path, less: Path) -> None:
    """Adapters are those that PEFT reads, by its fields that choose modules; others are noted."""
    import peft
    from peft.tuners import tuners_utils

    modules = modules_of(open_peft(folder))
    shutil.copytree(folder, less)
    about = json.loads((less / ADAPTERS).read_text())
    assert open_peft(folder).notes == ()
    assert "merge_and_unload, save_pretrained" in (impossible(open_peft(folder)) or "")
    short = {"target_modules": ["q_proj", "v_proj", "model.layers.1.mlp.up_proj"]}
    for change in (
        {**short, "layers_to_transform": [0]},
        {**short, "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["self_attn.q_proj", "up_proj"]},
        {"target_modules": r".*layers\.1.*(k|v)_proj"},
        {"exclude_modules": ["model.layers.0.mlp.up_proj", "q_proj"]},
    ):
        (less / ADAPTERS).write_text(json.dumps(about | change))
        theirs = peft.LoraConfig.from_pretrained(str(less))
        names = {name for name in modules if tuners_utils.check_target_module_exists(theirs, name)}  # fmt: skip
        source = open_peft(less)
        assert modules_of(source) == names, change
        assert re.search(r"leaves out adapters .*; they are not read, as PEFT does not", source.notes[-1])  # fmt: skip
    (less / ADAPTERS).write_text(json.dumps(about | {**short, "layers_to_transform": [7]}))
    assert len(open_peft(less).adapters) == 2
    (less / ADAPTERS).write_text(
        json.dumps(about | {"target_modules": ["q_proj"], "layers_to_transform": [7]})
    )
    with pytest.raises(DataError, match=r"and layers_to_transform: .*, which are all; correct it"):
        open_peft(less)


@pytest.mark.slow
def test_a_run_leaves_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the command line: a run's adapters, compared and read by PEFT, are trained on by another run."""
    base = folders.folder(tmp_path / "base")
    data = tmp_path / "some.jsonl"
    pairs = ({"prompt": f"a question {n}", "completion": f"yes {n}"} for n in range(30))
    data.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    given = {"from_": base, "data": data, "sequence": 48, "batch": 4, "log_every": 1}
    given |= {"layout": Layout(data=1, fsdp=1), "optimizer": Optimizer(learning_rate=5e-2)}
    lora = {"adapter": AdapterKind.lora, "rank": 2, "alpha": 4.0}
    systolic.train("sft", run=tmp_path / "run", steps=3, **given, **lora)
    words = ["export", str(tmp_path / "run"), "--to", "peft", "--out", str(tmp_path / "peft")]
    assert main([*words, "--checkpoint", "last", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["parity"]["passed"]
    run = systolic.open(tmp_path / "run", checkpoint="last")
    assert told["parameters"] == sum(a.size for a in run.weights.params.values())
    ours = outputs_of(run.setup.steps, run.weights, {"tokens": TOKENS})
    assert relative(their_logits(tmp_path / "peft", base), ours) < 1e-5
    # Another run begins where the first ended, and keeps the base that PEFT opens.
    still = {**given, "from_": tmp_path / "peft", "optimizer": Optimizer(learning_rate=1e-12)}
    with pytest.raises(OptionError, match="--rank 2 --alpha 4, or merge it first"):
        systolic.train("sft", run=tmp_path / "no", steps=1, **still, **{**lora, "rank": 3})
    systolic.train("sft", run=tmp_path / "more", steps=1, **still, **lora)
    more = systolic.open(tmp_path / "more", checkpoint="last")
    assert more.job.data.context == 256
    assert relative(outputs_of(more.setup.steps, more.weights, {"tokens": TOKENS}), ours) < 1e-5
    for path in (tmp_path / "base", tmp_path / "peft"):
        with pytest.raises(OptionError, match="is a model in files, which holds no adapters"):
            systolic.export(path, tmp_path / "out", to="peft")


def test_what_peft_takes_for_experts_does_not_leave(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "deepseek_v2")
    steps, weights = trained(base, Adapter(kind=AdapterKind.lora, rank=2, alpha=4.0))
    with pytest.raises(
        OptionError, match=r"adapters of mlp.shared_experts.gate_proj.* takes these"
    ):
        written(tmp_path / "peft", steps, weights, base)


NO_PRODUCTS: list[tuple[dict[str, Any], str]] = [
    ({"bias": "all"}, "has bias 'all', which is no low-rank product"),
    ({"modules_to_save": ["lm_head"]}, r"has modules_to_save \['lm_head'\]"),
    ({"use_dora": True}, "has use_dora True"),
    ({"peft_type": "IA3"}, "has the peft_type 'IA3', and adapters of LORA alone"),
    ({"r": 0}, "r in .* is 0; it is a number above 0"),
    ({"lora_alpha": None}, "lora_alpha in .* is None; it is a number above 0"),
    ({"base_model_name_or_path": "someone/model"}, "hf download someone/model"),
]


def test_what_is_no_low_rank_product_is_one_line(tmp_path: Path) -> None:
    base = folders.folder(tmp_path / "base")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(base)}
    folder = tmp_path / "peft"
    folder.mkdir()
    name = "base_model.model.lm_head.lora_A.weight"
    safetensors.numpy.save_file({name: np.zeros((4, 32), np.float32)}, folder / WEIGHTS)
    for change, message in NO_PRODUCTS:
        (folder / ADAPTERS).write_text(json.dumps(about | change))
        with pytest.raises((OptionError, NotFoundError, DataError), match=message) as told:
            open_source(folder)
        assert "\n" not in str(told.value), change
    lacking = {name: value for name, value in about.items() if name not in ("r", "lora_alpha")}
    (folder / ADAPTERS).write_text(json.dumps(lacking))
    config, notes = _checked(folder)
    assert (config["r"], config["lora_alpha"]) == (8, 8), "as PEFT's LoraConfig has them"
    assert [one.split(" has no ")[1] for one in notes] == [
        f"{name}; PEFT's own is taken, 8" for name in ("r", "lora_alpha")
    ]
    (folder / ADAPTERS).write_text(json.dumps(about))
    assert _checked(folder)[1] == ()
    with pytest.raises(OptionError, match=r"takes none for here: .*lm_head.lora_A"):
        systolic.import_model(folder, tmp_path / "out", base=base)
    with pytest.raises(OptionError, match="is no PEFT folder; leave it out"):
        systolic.import_model(base, tmp_path / "out", base=base)
