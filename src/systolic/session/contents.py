"""What a run or a model in files holds, without its weights in memory: whether it has changed, and its size."""

from dataclasses import dataclass
from pathlib import Path

from systolic.core.digest import digest
from systolic.core.errors import SystolicError
from systolic.session.trained import in_files

SAFETENSORS = ".safetensors"
LARGE_BYTES = 1 << 20
"""Size of a file whose time counts where only a sample of all files is compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelContents:
    """Digests of a model's files; a copy elsewhere has the same."""

    weights: str
    """Of weights and config."""
    texts: str
    """Of tokenizer, chat template and preprocessing; empty where it has none of them, or for a run."""
    sampled: bool
    """Whether only a sample of the weights was read."""


def model_contents(path: Path, checkpoint: str) -> ModelContents:
    """Digests of a model.

    Raises: as :func:`~systolic.session.trained.prepare_model`.
    """
    if not in_files(path):
        from systolic.artifact.weights import fingerprint

        return ModelContents(weights=fingerprint(path, checkpoint), texts="", sampled=False)
    from systolic.data.fingerprint import SAMPLE_BYTES, of_files
    from systolic.formats.bundle import BundleSource
    from systolic.formats.source import open_source

    source = open_source(path)
    files = sorted(source.files().values())
    root = path if path.is_dir() else path.parent
    contents = of_files(root, files)
    return ModelContents(
        weights=source.fingerprint(),
        texts=contents.digest if contents else "",
        sampled=not isinstance(source, BundleSource) and weight_bytes(path) > SAMPLE_BYTES,
    )


def contents_of(path: Path, checkpoint: str) -> str:
    """Fingerprint of a model here: of its contents, and of the times of large files where these were sampled.

    Raises: as :func:`model_contents`.
    """
    found = model_contents(path, checkpoint)
    times = []
    if found.sampled:
        for file in sorted(_files(path)):
            about = file.stat()
            if about.st_size >= LARGE_BYTES:
                times.append([file.name, about.st_size, about.st_mtime_ns])
    return digest([found.weights, found.texts, times])


def weight_bytes(path: Path, checkpoint: str = "best") -> int:
    """Size of a model's weights by its files, or by its run's checkpoint without the optimizer; 0 where that is not known."""
    try:
        if not in_files(path):
            from systolic.artifact.weights import weight_bytes

            return weight_bytes(path, checkpoint)
        files = _files(path)
        # Folders of hubs may have the same weights for several libraries.
        used = [one for one in files if one.suffix == SAFETENSORS] or files
        return sum(one.stat().st_size for one in used)
    except (OSError, SystolicError):
        return 0  # Opening it says what is wrong.


def _files(path: Path) -> list[Path]:
    return [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
