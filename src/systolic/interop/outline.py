"""What a recipe needs of a model in files: its sizes and its tokenizer, without its weights, which need not be there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from systolic.artifact.job_record import JobRecord
from systolic.artifact.run import JOB, TOKENIZER, Run
from systolic.core.errors import NotFoundError, OptionError
from systolic.job import Model
from systolic.models.decoder.config import Decoder
from systolic.models.families import CONFIG, family, read_config

if TYPE_CHECKING:
    from systolic.interop.source import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOutline:
    """A model in files without its weights."""

    model: Model
    tokenizer: Path | None
    """Its tokenizer.json; files of the chat template lie beside it."""


def outlined(path: Path) -> SourceOutline:
    """The model at a path: a Hugging Face folder (its config.json is enough), a Bundle, a GGUF file or a run.

    Raises:
        NotFoundError: nothing is there.
        OptionError: it is of another kind or family.
        DataError: a file is damaged.
    """
    if not path.exists():
        raise NotFoundError(f"{path} does not exist; check --from")
    if (path / JOB).is_file():
        return _of_run(path)
    if (path / CONFIG).is_file():
        config = read_config(path)
        made = family(config, str(path / CONFIG)).model(config)
        tokenizer = path / "tokenizer.json"
        return SourceOutline(model=made, tokenizer=tokenizer if tokenizer.is_file() else None)
    source = _opened(path)
    return SourceOutline(model=source.model, tokenizer=source.tokenizer)


def _opened(path: Path) -> "Source":
    """The source itself; imports NumPy, which a mistyped option is refused without."""
    from systolic.interop.source import open_source

    return open_source(path)


def _of_run(path: Path) -> SourceOutline:
    with Run.open(path) as run:
        plain = JobRecord.from_json(run.read_job()).job.get("model", {})
    if plain.get("type") != Decoder.__name__:
        raise OptionError(
            f"{path} trained a {plain.get('type')}; fine-tuning begins with a language model"
        )
    fields = {name: value for name, value in plain.items() if name != "type"}
    tokenizer = path / TOKENIZER / "tokenizer.json"
    return SourceOutline(
        model=msgspec.convert(fields, Decoder),
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )


def kept_files(path: Path) -> dict[str, bytes]:
    """Files of a model that a run keeps, so that its recipe works without the model: config.json; {} where it has none."""
    if (path / CONFIG).is_file():
        return {CONFIG: (path / CONFIG).read_bytes()}
    if (path / JOB).is_file() or not path.exists():
        return {}
    config = dict(_opened(path).config)
    return {CONFIG: json.dumps(config, indent=2).encode()} if config else {}
