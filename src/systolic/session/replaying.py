"""What a model in files answers to few inputs, in float32."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from systolic.artifact.bundle import BundleDraft
from systolic.artifact.bundle_record import Recorded
from systolic.formats.bundle import few, record
from systolic.formats.probe import PROBES, probe_of
from systolic.formats.source import Source, open_source
from systolic.job import Precision


def probe_inputs(source: Source) -> dict[str, np.ndarray] | None:
    """Few inputs for a source's model; ``None`` for a class of models that has none."""
    return few(probe_of(source).ours) if type(source.model) in PROBES else None


def answers(source: Source, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """Outputs float32[rows, ..., n] of a model as a user opens it, and the platform that computed them.

    Raises: as :func:`systolic.session.trained.open_model`.
    """
    from systolic.formats.probe import outputs_of
    from systolic.session.trained import from_source

    model = from_source(source, Precision.f32, texts=False)
    return outputs_of(model.setup.steps, model.weights, inputs), model.setup.machine.platform


def record_answers(made: BundleDraft, about: Mapping[str, Any]) -> Recorded | None:
    """Records what a written Bundle answers, opened as its user opens it; ``None`` for a class of models without probe inputs.

    Args:
        made: The Bundle, its weights and other files written.
        about: Fields of its bundle.json.
    """
    made.describe(**about)
    source = open_source(made.folder)
    inputs = probe_inputs(source)
    return None if inputs is None else record(made, inputs, *answers(source, inputs))
