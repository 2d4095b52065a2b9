"""One step of fine-tuning against PEFT and transformers: loss, gradients, and weights after an update."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from systolic.job import (
    Adapter,
    AdapterKind,
    Batch,
    Guard,
    GuardRule,
    Job,
    Layout,
    Optimizer,
    OptimizerKind,
    Schedule,
)
from systolic.job.data import MASK
from systolic.job.optimizer import ScheduleKind
from systolic.models.families import family
from systolic.steps.state import TrainState
from systolic.steps.step_functions import StepFunctions
from tests.models.foreign import converted, held, relative
from tests.steps import tiny

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
THEIRS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
RATE, DECAY = 1e-2, 0.1
FLOOR = 1e-6
"""Least gradient whose weight is compared after AdamW.

A first update is g / (|g| + 1e-8). Both sides' gradients differ by up to 2e-9 in rounding (3e-7 of the largest of
their tensor, those of keys as of others), which changes the update of a gradient of 1e-9 by half of it, and that of
1e-6 by 2e-5. Plain SGD divides by nothing and compares all weights.
"""
PLAIN = Optimizer(kind=OptimizerKind.sgd, learning_rate=RATE, b1=0.0, weight_decay=DECAY, clip=0)
ADAMW = Optimizer(learning_rate=RATE, b1=0.9, b2=0.999, eps=1e-8, weight_decay=DECAY, clip=0)
RULES = pytest.mark.parametrize(
    "rule", [PLAIN, pytest.param(ADAMW, marks=pytest.mark.slow)], ids=["sgd", "adamw"]
)


def steps(adapter: Adapter, config: Mapping[str, Any], rule: Optimizer) -> StepFunctions:
    job: Job = tiny.job(
        model=family(config, "the model").model(config),
        adapter=adapter,
        data=tiny.Tokens(sequence=16),
        batch=Batch(total=3),
        layout=Layout(fsdp=1),
        optimizer=rule,
        schedule=Schedule(kind=ScheduleKind.constant, warmup=0),
        guard=Guard(rule=GuardRule.ignore),
    )
    return tiny.steps(job)


def their_rule(model: Any, rule: Optimizer) -> torch.optim.Optimizer:
    """The same rule of torch; vectors are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    if rule.kind is OptimizerKind.sgd:
        return torch.optim.SGD(groups, lr=RATE)
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)


def check(
    rule: Optimizer,
    name: str,
    gradients: tuple[np.ndarray, np.ndarray],
    weights: tuple[np.ndarray, np.ndarray],
) -> None:
    """Compares a tensor's gradients, and its weights after the update: ours with theirs."""
    assert relative(*gradients) < 1e-5, name
    ours, theirs = (np.asarray(one) for one in weights)
    if rule.kind is OptimizerKind.adamw:
        sizes = np.abs(gradients[1])
        compared = (sizes >= FLOOR) | (sizes == 0)  # tokens that no row has are decayed alone
        assert compared.mean() > 0.95, name
        ours, theirs = ours[compared], theirs[compared]
    assert relative(ours, theirs) < 1e-5, name


def batch(seed: int) -> dict[str, np.ndarray]:
    """Rows of one conversation each; the first half of each is a prompt."""
    tokens = np.random.default_rng(seed).integers(0, 96, (3, 17)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[:, :8] = -1
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "segments": np.ones((3, 16), np.int32),
        "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (3, 16)),
        MASK: np.ones(3, np.float32),
    }


def their_step(model: Any, given: Mapping[str, np.ndarray], rule: Optimizer) -> tuple[float, Any]:
    """Loss and gradients of their model, whose weights an update then changes."""
    update = their_rule(model, rule)
    logits = model(torch.tensor(given["tokens"], dtype=torch.long), use_cache=False).logits
    labels = torch.tensor(given["targets"], dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-1
    )
    loss.backward()
    gradients = {
        name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None
    }
    update.step()
    return loss.item(), gradients


def ours(of: StepFunctions, state: TrainState, given: Any) -> tuple[float, Any, TrainState]:
    """Loss, gradients and the state after a step."""

    def loss(params: Any) -> jax.Array:
        found = of.sums(params, state.model_state, given, train=True)[0]["loss"]
        return found.total / found.weight

    both = jax.jit(lambda state: (jax.grad(loss)(state.params), of.train(state, given)))
    gradients, (after, metrics) = both(state)
    return float(metrics["loss"]), gradients, after


# PEFT calls a name that transformers is about to drop.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@RULES
def test_a_step_of_lora_is_that_of_peft(rule: Optimizer) -> None:
    import peft

    config = transformers.LlamaConfig(**SIZES)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    _, arrays = converted(family(config.to_dict(), "it"), config.to_dict(), held(base))
    wanted = peft.LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights=False
    )
    model = peft.get_peft_model(base, wanted)
    adapter = Adapter(kind=AdapterKind.lora, rank=4, alpha=12.0)
    of = steps(adapter, config.to_dict(), rule)

    def from_peft(tensors: Mapping[str, np.ndarray], like: Mapping[str, Any]) -> Any:
        found = {}
        for path, name in THEIRS.items():
            for last, letter in (("lora_a", "A"), ("lora_b", "B")):
                key = "base_model.model.model.layers.{}." + f"{name}.lora_{letter}.default.weight"
                stacked = np.stack([tensors[key.format(n)].T for n in range(2)])
                full = f"blocks/{path}/{last}"
                found[full] = stacked.reshape(like[full].shape)
        return found

    def named() -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}

    state = jax.jit(of.init)(jax.random.key(0))
    frozen = {}
    for path, value in state.model_state.items():
        frozen[path] = arrays[path.removesuffix("/base")].astype(value.dtype)
    params = {p: jnp.asarray(a) for p, a in from_peft(named(), state.params).items()}
    state = replace(state, params=params, model_state=frozen)
    given = batch(0)
    loss, gradients, after = ours(of, state, given)
    expected, theirs = their_step(model, given, rule)
    assert loss == pytest.approx(expected, rel=1e-5)
    weights = from_peft(named(), state.params)
    for path, gradient in from_peft(theirs, state.params).items():
        check(rule, path, (gradients[path], gradient), (after.params[path], weights[path]))


@pytest.mark.slow
@RULES
def test_a_step_of_all_weights_is_that_of_torch(rule: Optimizer) -> None:
    config = transformers.LlamaConfig(**SIZES)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    known = family(config.to_dict(), "it")
    _, arrays = converted(known, config.to_dict(), held(model))
    of = steps(Adapter(), config.to_dict(), rule)
    state = jax.jit(of.init)(jax.random.key(0))
    state = replace(state, params={path: jnp.asarray(arrays[path]) for path in state.params})
    given = batch(1)
    loss, gradients, after = ours(of, state, given)
    expected, theirs = their_step(model, given, rule)
    assert loss == pytest.approx(expected, rel=1e-5)
    rules, weights = known.conversion(config.to_dict()), held(model)
    updated = dict(rules.tensors(after.params))
    for name, gradient in rules.tensors(gradients):
        check(rule, name, (gradient, theirs[name]), (updated[name], weights[name].array))
