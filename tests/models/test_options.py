"""Every option of a decoder changes its train step, or is refused with the option that it needs."""

import contextlib
import dataclasses
import enum
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.options import Latent, RopeScaling, Router, Score, Stretching
from systolic.steps.tasks import LanguageModel, Unit
from tests.steps import tiny

DENSE = replace(tiny.MODEL, layers=2)
RICH = replace(
    DENSE,
    layers=3,
    experts=4,
    dense_layers=1,
    router=Router(score=Score.sigmoid, bias=True, groups=2, top_groups=2),
    window=8,
    global_every=2,
    ngrams=3,
    ngram_rows=64,
    ngram_dim=8,
)
LATENT = replace(DENSE, latent=Latent(kv_lora_rank=16, q_lora_rank=8))
YARN = replace(
    DENSE,
    rope_scaling=RopeScaling(
        kind=Stretching.yarn,
        factor=4.0,
        original_positions=1024,
        mscale=0.7,
        mscale_all_dim=0.5,
        truncate=False,
    ),
)
LLAMA3 = replace(DENSE, rope_scaling=RopeScaling(kind=Stretching.llama3, factor=8.0))
CHANGED: dict[str, Any] = {
    "vocab": 128,
    "learned_positions": 64,
    "global_every": 3,
    "local_rope_theta": 500.0,
    "heads": 8,
    "kv_heads": 4,
    "layers": 4,
    "ngram_rows": 128,
    "experts": 8,
    "router.top_groups": 1,
    "router.groups": 4,
    "router.score": Score.softmax,
    "dispatch": Dispatch.dropless,
}
"""Values of options that a rule would not find."""
IGNORED = {
    "latent": ("kv_heads", "head_dim"),
    # A plan may change the precision, and with it whether rounding is read.
    "all": ("rounding.backward", "rounding.largest"),
}
"""Options that say nothing, as their text tells: of all models, and of those with latents."""


def options(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def other(name: str, value: Any) -> Any:
    """Another value of an option."""
    if name in CHANGED and CHANGED[name] != value:
        return CHANGED[name]
    if isinstance(value, enum.Enum):
        return next(one for one in type(value) if one is not value)
    if isinstance(value, bool):
        return not value
    return value * 2 if value else (2 if isinstance(value, int) else 0.5)


def changed(config: Any, name: str, value: Any) -> Any:
    part, _, rest = name.partition(".")
    if rest:
        value = changed(getattr(config, part), rest, value)
    return replace(config, **{part: value})


def program(model: Decoder) -> str:
    """What a train step computes before its gradients, traced."""
    # As the recipes make it.
    task = LanguageModel(unit=Unit.byte, router_loss=model.router_loss)
    steps = tiny.steps(tiny.job(model=model, task=task, layout=tiny.ONE_DEVICE))
    forward = partial(steps.sums, train=True)
    network = steps.network
    return str(jax.make_jaxpr(forward)(network.params, network.model_state, steps.abstract_batch()))


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    """Of the unchanged configurations, as they are asked for."""
    return {}


BASES = {"dense": DENSE, "rich": RICH, "latent": LATENT, "yarn": YARN, "llama3": LLAMA3}
PARTS = {"latent": "latent.", "yarn": "rope_scaling.", "llama3": "rope_scaling."}
"""Options that a base is for; all where it is not named."""
CASES = [
    pytest.param(base, name, id=f"{base}-{name}", marks=pytest.mark.slow if base == "rich" else ())
    for base, config in BASES.items()
    for name, _ in options(config)
    if name.startswith(PARTS.get(base, ""))
    if name not in (*IGNORED["all"], *IGNORED.get(base, ()))
]


@pytest.mark.parametrize(("base", "name"), CASES)
def test_an_option_has_an_effect_or_is_refused(
    programs: dict[str, str], base: str, name: str
) -> None:
    config = BASES[base]
    value = other(name, dict(options(config))[name])
    if base not in programs:
        programs[base] = program(config)
    with contextlib.suppress(OptionError):
        assert program(changed(config, name, value)) != programs[base]
        return
    with pytest.raises(OptionError, match=re.escape(f"model.{name.replace('_', '-')} ")):
        changed(config, name, value)
