"""The identity of a model that answers the lines of a file, without its weights in memory."""

from systolic.formats.outline import model_contents
from systolic.formats.registry import in_files
from systolic.job import Precision
from systolic.serving.offline.answerer import Answerer
from systolic.session.serving import ServeSettings, ServeTarget


def answerer_of(target: ServeTarget, settings: ServeSettings) -> Answerer:
    """What a model's answers depend on.

    Raises: as :func:`~systolic.session.trained.prepare_model`.
    """
    contents = model_contents(target.path, settings.checkpoint)
    return Answerer(
        model=target.name,
        version=target.version,
        weights=contents.weights,
        texts=contents.texts,
        precision=_precision(target, settings),
        context=settings.sizes.context,
    )


def _precision(target: ServeTarget, settings: ServeSettings) -> str:
    asked = settings.precision
    if not in_files(target.path):
        return "the run's" if asked is Precision.auto else asked.value
    from systolic.training.machine import LocalDevices

    return asked.resolve(LocalDevices.here().platform).value
