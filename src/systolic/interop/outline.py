"""What a recipe needs of a model in files: its sizes and its tokenizer, without its weights, which need not be there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from systolic.artifact.job_record import JobRecord
from systolic.artifact.run import JOB, TOKENIZER, Run
from systolic.core.errors import NotFoundError, OptionError
from systolic.data.text.instructions import Instructions
from systolic.data.text.tokenizer import Around
from systolic.job import Model
from systolic.models.decoder.config import Decoder
from systolic.models.families import CONFIG, GENERATION, Config, family, read_config
from systolic.models.published import PublishedModel, find_published

if TYPE_CHECKING:
    from systolic.interop.source import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOutline:
    """A model in files without its weights."""

    model: Model
    tokenizer: Path | None
    """Its tokenizer.json; files of the chat template lie beside it."""
    stops: tuple[int, ...] = ()
    """Ids that end a text, besides the tokenizer's end."""
    around: Around = Around.own
    """Tokens around a text that it was trained on."""


def ends_of(config: Config, generation: Path | None) -> tuple[int, ...]:
    """Ids that end a text, by a generation_config.json, else by a config.json's fields."""
    fields = {**config, **read_config(generation)} if generation else config
    found = fields.get("eos_token_id")
    several = found if isinstance(found, list) else [found]
    return tuple(int(one) for one in several if one is not None)


def outlined(path: Path) -> SourceOutline:
    """The model at a path: a Hugging Face folder (its config.json is enough), a Bundle, a GGUF file or a run; or a published one by name.

    Raises:
        NotFoundError: nothing is there, and no published model has that name.
        OptionError: it is of another kind or family.
        DataError: a file is damaged.
    """
    if not path.exists():
        known = published_at(path)
        if known is None:
            raise NotFoundError(
                f"{path} does not exist, and no published model has that name; check --from"
            )
        return SourceOutline(model=known.model(), tokenizer=None, stops=ends_of(known.config, None))
    if path.is_file() and path.suffix == ".json":
        # A config.json is enough for a forecast, as in its folder.
        config = read_config(path)
        return SourceOutline(
            model=family(config, str(path)).model(config),
            tokenizer=_existing(path.parent / "tokenizer.json"),
            stops=ends_of(config, _existing(path.parent / GENERATION)),
        )
    if (path / JOB).is_file():
        return _of_run(path)
    if (path / CONFIG).is_file():
        config = read_config(path)
        made = family(config, str(path / CONFIG)).model(config)
        return SourceOutline(
            model=made,
            tokenizer=_existing(path / "tokenizer.json"),
            stops=ends_of(config, _existing(path / GENERATION)),
        )
    source = _opened(path)
    return SourceOutline(
        model=source.model,
        tokenizer=source.tokenizer,
        stops=ends_of(source.config, source.files().get(GENERATION)),
    )


def published_at(path: Path) -> PublishedModel | None:
    """The published model that a path which does not exist names; options from Python are absolute paths."""
    names = (str(path), "/".join(path.parts[-2:]), path.name)
    return next((known for name in names if (known := find_published(name)) is not None), None)


def _existing(file: Path) -> Path | None:
    return file if file.is_file() else None


def _opened(path: Path) -> "Source":
    """The source itself; imports NumPy, which a mistyped option is refused without."""
    from systolic.interop.source import open_source

    return open_source(path)


def _of_run(path: Path) -> SourceOutline:
    with Run.open(path) as run:
        job = JobRecord.from_json(run.read_job()).job
    plain, data = job.get("model", {}), job.get("data", {})
    if plain.get("type") != Decoder.__name__:
        raise OptionError(
            f"{path} trained a {plain.get('type')}; fine-tuning begins with a language model"
        )
    fields = {name: value for name, value in plain.items() if name != "type"}
    folder = path / TOKENIZER
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    tuned = data.get("type") == Instructions.__name__
    return SourceOutline(
        model=msgspec.convert(fields, Decoder),
        tokenizer=_existing(folder / "tokenizer.json"),
        stops=ends_of(config, _existing(folder / GENERATION)),
        around=Around(data.get("around", Around.own.value)) if tuned else Around.document,
    )


def kept_files(path: Path) -> dict[str, bytes]:
    """Files of a model that a run keeps, so that its recipe and its export work without the model: config.json and generation_config.json, as far as it has them."""
    if not path.exists():
        return {}
    folder = path / TOKENIZER if (path / JOB).is_file() else path
    if folder == path and not (path / CONFIG).is_file():
        source = _opened(path)
        config, generation = dict(source.config), source.files().get(GENERATION)
        kept = {CONFIG: json.dumps(config, indent=2).encode()} if config else {}
        return kept | ({GENERATION: generation.read_bytes()} if generation else {})
    beside = {name: folder / name for name in (CONFIG, GENERATION)}
    return {name: file.read_bytes() for name, file in beside.items() if file.is_file()}
