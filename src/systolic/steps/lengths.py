"""Tokens of the longest text that a language model takes, prompt and answer together."""

from systolic.data.text.prompts import Prompts
from systolic.job import Job
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.rotary import RopeScaling, Stretching

LEAST_TEXT = 2
"""Tokens of the shortest text: one of the prompt and one of the answer."""


def longest_text(job: Job) -> int | None:
    """The positions of a job's model, or the tokens that a model in files was made for.

    None for a run with rotary embeddings, which continues texts longer than its rows, and for other models.
    """
    model = job.model
    if not isinstance(model, Decoder):
        return None
    if model.learned_positions:
        return model.learned_positions
    if isinstance(job.data, Prompts):
        return _rotary_context(job.data.context, model.rope_scaling)
    return None


def _rotary_context(context: int, scaling: RopeScaling) -> int:
    """Tokens of the longest text by a model's context and by the scaling of its rotary embeddings, whichever covers more."""
    if not scaling:
        return context
    linear = scaling.kind is Stretching.linear
    return max(context, int(scaling.factor * (context if linear else scaling.original_positions)))
