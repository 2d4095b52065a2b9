"""A function for converters, which know convolutions and matmuls and few loops, and for artifacts of all platforms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from systolic.formats.inference import PORTABLE, ExportableModel, Inference
from systolic.models.vision.mobilenet.config import MobileNetV2


def plain_platform(model: ExportableModel) -> str:
    """The platform whose program a converter takes best.

    That of a CPU has the layers one after another in place of a loop. MobileNetV2 has no loop, and on a CPU it has
    sums of shifted pictures in place of convolutions.
    """
    return PORTABLE if isinstance(model.job.model, MobileNetV2) else "cpu"


def each_platform(model: ExportableModel, function: Inference) -> Inference:
    """A function with what is fast on a CPU beside what is fast elsewhere, where these differ much; XLA compiles one of them.

    MobileNetV2 takes an eighth of the time so on a CPU (20 ms in place of 165 for a picture on two cores).
    """
    if not isinstance(model.job.model, MobileNetV2):
        return function
    own = model.functions_on("cpu")[function.name].call

    def call(params: Mapping[str, Any], inputs: dict[str, Any]) -> dict[str, jax.Array]:
        return jax.lax.platform_dependent(dict(params), inputs, cpu=own, default=function.call)

    return replace(function, call=call)
