"""Outputs of a model in files, in float32."""

from collections.abc import Mapping

import numpy as np

from systolic.formats.source import Source
from systolic.job import Precision


def answers(source: Source, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """Outputs float32[rows, ..., n] of a model as a user opens it, and the platform that computed them.

    Raises: as :func:`systolic.session.trained.open_model`.
    """
    from systolic.formats.probe import outputs_of
    from systolic.session.trained import from_source

    model = from_source(source, Precision.f32, texts=False)
    return outputs_of(model.setup.steps, model.weights, inputs), model.setup.machine.platform
