"""The sizes, tokenizer and digests of a model in files or a run, without its weights, which need not be there."""

import json
from dataclasses import dataclass, replace
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.core.files import digest
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import TextData
from systolic.data.text.tokenizer import Around
from systolic.formats.registry import in_files
from systolic.job import Model
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import Stretching
from systolic.models.families import (
    CONFIG,
    GENERATION,
    NESTED,
    Config,
    PublishedModel,
    family,
    find_published,
    near_published,
    read_config,
)
from systolic.runs.job_record import read_record
from systolic.runs.run import JOB, TOKENIZER, Run

if TYPE_CHECKING:
    from systolic.formats.source import Source


ADAPTERS = "adapter_config.json"
"""File of a folder of PEFT; here too, since the module that reads one imports NumPy."""

POSITIONS = ("max_position_embeddings", "n_positions")
"""Fields of a config.json with the tokens that a model takes at once."""
OLDER = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
"""Files of tokenizers of other forms, which transformers makes a tokenizer.json of."""
SAFETENSORS = ".safetensors"
LARGE_BYTES = 1 << 20
"""Size of a file whose time counts where only a sample of all files is compared."""


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
    positions: int = 0
    """Tokens of a text that it was made for; 0 where nothing says so."""


def ends_of(config: Config, generation: Path | None) -> tuple[int, ...]:
    """Ids that end a text, by a generation_config.json, else by a config.json's fields."""
    fields = {**config, **read_config(generation)} if generation else config
    ends = fields.get("eos_token_id")
    several = ends if isinstance(ends, list) else [ends]
    return tuple(int(end) for end in several if end is not None)


def positions_of(config: Config, model: Model, source: str) -> int:
    """Tokens of a text that a model was made for, by its config.json: its positions, with those that stretched rotary embeddings add; 0 where no field says so.

    Linear stretching adds none here: some files give the positions before it, and some those after it.

    Args:
        config: Fields of its config.json.
        model: The model of it.
        source: Its name in messages.

    Raises:
        OptionError: a field is no whole number from 1.
    """
    fields = {**config, **(config.get(NESTED) or {})}
    stated = next(((n, fields[n]) for n in POSITIONS if fields.get(n) is not None), None)
    if stated is None:
        return model.learned_positions if isinstance(model, Decoder) else 0
    name, positions = stated
    if isinstance(positions, bool) or not isinstance(positions, int) or positions < 1:
        raise OptionError(
            f"{name} of {source} is {positions!r}; write the tokens that the model takes at once, a whole number from 1"
        )
    scaling = model.rope_scaling if isinstance(model, Decoder) else None
    if not scaling or scaling.kind is Stretching.linear:
        return positions
    return max(positions, int(scaling.factor * scaling.original_positions))


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
                f"{path} does not exist, and no published model has that name{near_published(path.name)}; check --from"
            )
        model = known.model()
        return SourceOutline(
            model=model,
            tokenizer=None,
            stops=ends_of(known.config, None),
            positions=positions_of(known.config, model, known.name),
        )
    if path.is_file() and path.suffix == ".json":
        # A config.json is enough for a forecast, as in its folder.
        config = read_config(path)
        model = family(config, str(path)).model(config)
        return SourceOutline(
            model=model,
            tokenizer=_existing(path.parent / "tokenizer.json"),
            stops=ends_of(config, _existing(path.parent / GENERATION)),
            positions=positions_of(config, model, str(path)),
        )
    if (path / JOB).is_file():
        return _of_run(path)
    if (path / ADAPTERS).is_file():
        from systolic.formats.peft import base_of
        from systolic.formats.registry import is_peft

        if is_peft(path):
            outline = outlined(base_of(path))
            own = _existing(path / "tokenizer.json")
            return replace(outline, tokenizer=own) if own else outline
    if (path / CONFIG).is_file():
        config = read_config(path)
        model = family(config, str(path / CONFIG)).model(config)
        return SourceOutline(
            model=model,
            tokenizer=_existing(path / "tokenizer.json"),
            stops=ends_of(config, _existing(path / GENERATION)),
            positions=positions_of(config, model, str(path)),
        )
    source = _opened(path)
    return SourceOutline(
        model=source.model,
        tokenizer=source.tokenizer,
        stops=ends_of(source.config, source.files().get(GENERATION)),
        positions=_positions_of_source(source),
    )


def _positions_of_source(source: "Source") -> int:
    """See :attr:`SourceOutline.positions`; of a Bundle that was a run without a config.json those of its rows."""
    positions = positions_of(source.config, source.model, str(source.path))
    if positions or (trained := source.trained_job()) is None:
        return positions
    return trained.data.context if isinstance(trained.data, TextData) else 0


def published_at(path: Path) -> PublishedModel | None:
    """The published model that a path which does not exist names; options from Python are absolute paths."""
    names = (str(path), "/".join(path.parts[-2:]), path.name)
    return next((known for name in names if (known := find_published(name)) is not None), None)


def _existing(file: Path) -> Path | None:
    return file if file.is_file() else None


def _opened(path: Path) -> "Source":
    """The source itself; imports NumPy, which a mistyped option is refused without."""
    from systolic.formats.source import open_source

    return open_source(path)


def _of_run(path: Path) -> SourceOutline:
    with Run.open(path) as run:
        job = read_record(run).job
    plain, data = job.get("model", {}), job.get("data", {})
    if plain.get("type") != Decoder.__name__:
        raise OptionError(
            f"{path} trained a {plain.get('type')}; fine-tuning begins with a language model"
        )
    fields = {name: value for name, value in plain.items() if name != "type"}
    folder = path / TOKENIZER
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    tuned = data.get("type") == Instructions.__name__
    model = msgspec.convert(fields, Decoder)
    made_for = data.get("positions") or positions_of(config, model, str(folder))
    row = data.get("sequence", 0)
    if not config and not tuned and model.learned_positions:
        made_for = min(made_for, row)  # The positions behind its rows have never been learned.
    return SourceOutline(
        model=model,
        positions=made_for or row,
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


def tokenizer_of(source: "Source", vocab: int, *, texts: bool) -> Path | None:
    """The tokenizer.json of a source.

    Args:
        source: The model in files.
        vocab: Tokens of the model.
        texts: Whether one is needed; without, ``None`` stands for a source that has none.

    Raises:
        OptionError: there is none, or it is of a model with more tokens.
        DataError: it has no tokens.
    """
    file = source.tokenizer
    if file is None:
        if texts:
            raise OptionError(_lacking(source.path))
        return None
    number = _own_tokens(file)
    if number == 0:
        raise DataError(f"{file} has no tokens; copy it again from where the model came from")
    if number is not None and number > vocab:
        raise OptionError(
            f"{file} has {number} tokens and the model {vocab}; copy the tokenizer that belongs to the model"
        )
    return file


def _lacking(path: Path) -> str:
    older = next((name for name in OLDER if (path / name).is_file()), None)
    if older is not None:
        return f"{path} has no tokenizer.json and its tokenizer in {older}; write it with transformers: AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    return (
        f"{path} has no tokenizer.json; copy it from where the model came from, beside config.json"
    )


def _own_tokens(file: Path) -> int | None:
    """One more than the largest id of a vocabulary, tokens added to it left out; ``None`` where the file is no tokenizer, which its reader reports.

    Added tokens may lie beyond a model's: Gemma 3's text models have one for images.
    """
    try:
        described = json.loads(file.read_bytes())
        added = {token["content"] for token in described.get("added_tokens", ())}
        vocab = described["model"]["vocab"]
        if isinstance(vocab, list):
            return len(vocab)
        ids = [int(number) for token, number in vocab.items() if token not in added]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return max(ids, default=-1) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelContents:
    """Digests of a model's files; a copy elsewhere has the same."""

    weights: str
    """Digest of weights and config."""
    texts: str
    """Digest of tokenizer, chat template and preprocessing; empty for a model without them, and for a run."""
    sampled: bool
    """Whether only a sample of the weights was read."""


def model_contents(path: Path, checkpoint: str) -> ModelContents:
    """Digests of a model.

    Raises: as opening the model.
    """
    if not in_files(path):
        from systolic.runs.weights import fingerprint

        return ModelContents(weights=fingerprint(path, checkpoint), texts="", sampled=False)
    from systolic.data.fingerprint import SAMPLE_BYTES, of_files
    from systolic.formats.bundle import BundleSource

    source = _opened(path)
    files = sorted(source.files().values())
    # Not all may lie in the model's folder: a GGUF file's are written to the cache, an adapter's base has its own.
    contents = of_files(Path(commonpath(file.parent for file in files)), files) if files else None
    return ModelContents(
        weights=source.fingerprint(),
        texts=contents.digest if contents else "",
        sampled=not isinstance(source, BundleSource) and weight_bytes(path) > SAMPLE_BYTES,
    )


def contents_of(path: Path, checkpoint: str) -> str:
    """Fingerprint of a model here: of its contents, and of the times of large files where these were sampled.

    Raises: as :func:`model_contents`.
    """
    contents = model_contents(path, checkpoint)
    times = []
    if contents.sampled:
        for file in sorted(_weight_files(path)):
            about = file.stat()
            if about.st_size >= LARGE_BYTES:
                times.append([file.name, about.st_size, about.st_mtime_ns])
    return digest([contents.weights, contents.texts, times])


def weight_bytes(path: Path, checkpoint: str = "best") -> int:
    """Size of a model's weights by its files, or by its run's checkpoint without the optimizer; 0 where that is not known."""
    try:
        if not in_files(path):
            from systolic.runs import weights

            return weights.weight_bytes(path, checkpoint)
        files = _weight_files(path)
        # Folders of hubs may have the same weights for several libraries.
        used = [file for file in files if file.suffix == SAFETENSORS] or files
        return sum(file.stat().st_size for file in used)
    except (OSError, SystolicError):
        return 0  # Opening it says what is wrong.


def _weight_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
