"""Tokens of the longest text that a language model takes, prompt and answer together."""

from systolic.core.errors import OptionError
from systolic.data.text.documents import Prompts
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import TextData
from systolic.job import Job
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import RopeScaling, Stretching

LEAST_TEXT = 2
"""Tokens of the shortest text: one of the prompt and one of the answer."""


def longest_text(job: Job) -> int | None:
    """The positions of a job's model, or the tokens that a model in files was made for, before it was fine-tuned here too.

    None for a run from random weights with rotary embeddings, which continues texts longer than its rows, and for other models.
    """
    model = job.model
    if not isinstance(model, Decoder):
        return None
    if model.learned_positions:
        return model.learned_positions
    if isinstance(job.data, Prompts):
        return _rotary_context(job.data.context, model.rope_scaling)
    if isinstance(job.data, Instructions) and job.data.positions:
        # Conversations of longer rows were learned at positions that the model had not seen before.
        return max(_rotary_context(job.data.positions, model.rope_scaling), job.data.sequence)
    return None


def longest_by_files(model: Decoder, positions: int) -> int | None:
    """The positions of a model, or the tokens that it was made for; None where nothing says so.

    Args:
        model: The model.
        positions: Tokens that its files say it was made for; 0 where they do not.
    """
    if model.learned_positions or not positions:
        return model.learned_positions or None
    return _rotary_context(positions, model.rope_scaling)


def check_length(model: Decoder, longest: int | None, tokens: int, option: str, give: str) -> None:
    """Refuses a text that is longer than a model takes, here and in what is planned for a server.

    Args:
        model: The model.
        longest: Tokens of its longest text; None for no limit.
        tokens: Of the text, prompt and answer together.
        option: Which options say so, with the verb.
        give: What to give in their place, to follow by the number.

    Raises:
        OptionError: it is longer.
    """
    if longest is not None and tokens > longest:
        has = "has positions for" if model.learned_positions else "was made for texts of"
        raise OptionError(
            f"{option} {tokens} and the model {has} {longest} tokens; give {give} {longest} or less"
        )


def learned_text(job: Job) -> int | None:
    """Tokens of the rows of a model from random weights, beyond which it has learned no position.

    None for a model that was made elsewhere, fine-tuned here or not, and for one that reads no text.
    """
    data = job.data
    if isinstance(data, Prompts) or not isinstance(data, TextData):
        return None
    return None if isinstance(data, Instructions) and data.positions else data.context


def _rotary_context(context: int, scaling: RopeScaling) -> int:
    """Tokens of the longest text by a model's context and by the scaling of its rotary embeddings, whichever covers more."""
    if not scaling:
        return context
    linear = scaling.kind is Stretching.linear
    return max(context, int(scaling.factor * (context if linear else scaling.original_positions)))
