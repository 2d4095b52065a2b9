"""Jobs to plan, from the recipe, with nothing to read but its built-in text."""

from dataclasses import replace
from typing import Any

from systolic import recipes
from systolic.job import Batch, Job, Model
from systolic.models.decoder.config import Decoder


def decoder_job(**parts: Any) -> Job:
    """A small decoder with 64 rows of 2,048 tokens a step."""
    experts = parts.pop("experts", 1)
    model = Decoder(
        layers=4,
        d_model=1024,
        d_ff=4096,
        heads=8,
        kv_heads=4,
        head_dim=128,
        vocab=32768,
        experts=experts,
    )
    recipe = recipes.find("lm")
    job = recipe({**recipes.typed(recipe, {"sequence": 2048}), "model": model})
    return replace(job, **{"batch": Batch(total=64), "model": model, **parts})


class Plain(Model):
    """A model that says nothing of itself."""

    def build(self, rngs: Any, target: Any) -> Any:
        from flax import nnx

        return nnx.Linear(8, 8, rngs=rngs)


def plain_job() -> Job:
    """Of a model without axes, policies or outline."""
    return decoder_job(model=Plain())
