"""Quantized matrices on their way into programs: as codes, or as the floats that these stand for."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from systolic.formats.inference import ExportableModel
from systolic.job import Quantization, WeightFormat
from systolic.models.adapters import CODES, INPUTS, SCALES
from systolic.models.quantized import Quantized

HELD = (WeightFormat.int8, WeightFormat.fp8, WeightFormat.w8a8)
"""Formats whose codes files of tensors hold; those of 4 bits are not a dtype of theirs."""


def with_codes(model: ExportableModel, *, kept: bool) -> tuple[ExportableModel, tuple[str, ...]]:
    """A model as a format holds it, and what became of its quantized matrices, in words.

    Args:
        model: The model.
        kept: Whether the format holds codes of 8 bits.
    """
    formats = model.job.quantization.by_path()
    stay = {path: how for path, how in formats.items() if kept and how.format in HELD}
    floats = [path for path in formats if path not in stay]
    params: dict[str, Any] = dict(model.params)
    for path in floats:
        codes, scales = (jnp.asarray(params.pop(f"{path}/{part}")) for part in (CODES, SCALES))
        inputs = params.pop(f"{path}/{INPUTS}", None)
        if inputs is not None:
            inputs = jnp.asarray(inputs)
        wide = Quantized(codes=codes, scales=scales, inputs=inputs).restored(jnp.float32)
        params[path] = np.asarray(wide)
    notes = []
    whole = [path for path, how in stay.items() if how.format.activations]
    if len(stay) > len(whole):
        notes.append(
            f"quantized matrices that stay in codes, which the program widens: {len(stay) - len(whole)}"
        )
    if whole:
        notes.append(
            f"quantized matrices that are multiplied with activations in int8: {len(whole)}"
        )
    if floats:
        notes.append(
            f"quantized matrices that are written as the floats that their codes stand for: {len(floats)}"
        )
    job = replace(model.job, quantization=Quantization.of(stay))
    return replace(model, job=job, params=params), tuple(notes)
