"""The identity of a model that answers the lines of a file, without its weights in memory."""

from systolic.job import Precision
from systolic.serving.offline.answerer import Answerer
from systolic.session.serving import ServeSettings, ServeTarget
from systolic.session.trained import in_files


def answerer_of(target: ServeTarget, settings: ServeSettings) -> Answerer:
    """What a model's answers depend on.

    Raises: as :func:`~systolic.session.trained.prepare_model`.
    """
    weights, texts, precision = _contents(target, settings)
    return Answerer(
        model=target.name,
        version=target.version,
        weights=weights,
        texts=texts,
        precision=precision,
        context=settings.sizes.context,
    )


def _contents(target: ServeTarget, settings: ServeSettings) -> tuple[str, str, str]:
    """Digest of the weights, of the files for texts, and the precision."""
    if not in_files(target.path):
        from systolic.artifact.weights import fingerprint

        asked = settings.precision
        own = "the run's" if asked is Precision.auto else asked.value
        return fingerprint(target.path, settings.checkpoint), "", own
    from systolic.data.fingerprint import of_files
    from systolic.interop.source import open_source
    from systolic.training.machine import LocalDevices

    source = open_source(target.path)
    files = sorted(source.files().values())
    root = source.path if source.path.is_dir() else source.path.parent
    contents = of_files(root, files)
    precision = settings.precision.resolve(LocalDevices.here().platform)
    return source.fingerprint(), contents.digest if contents else "", precision.value
