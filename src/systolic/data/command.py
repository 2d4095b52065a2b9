"""``systolic data``: packs data, trains a tokenizer, and shows what a model will see."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from systolic.core.arguments import OptionWords, Wording, command_of
from systolic.core.errors import DataError, NotFoundError, OptionError, nearest
from systolic.core.files import nearest_file
from systolic.core.ranges import COUNT, NOT_NEGATIVE, SHARE, Range
from systolic.core.reporter import reporter, working
from systolic.data.text.tokenizer import SMALLEST_VOCAB
from systolic.job import Data, Job, Split

if TYPE_CHECKING:
    from systolic.recipes.jobs import JobSource

MAX_FAULTS = 50
"""Kinds of faults of lines that can't be learned, at most, that are named."""
NEW_FOLDER = OptionWords(Path, also="out")

USAGE = """usage: systolic data pack PATH --to OUT [options]
       systolic data inspect RECIPE_OR_PATH [options]
       systolic data tokenizer PATH --to FOLDER [options]

  pack       writes text (tokenised) or pictures as compressed ArrayRecord, readable at random places
  inspect    shows what a model will see: fields, counts, a decoded row or a contact sheet
  tokenizer  learns a byte-level BPE vocabulary from text and writes its tokenizer.json

systolic data pack --help shows the options of pack, and so on."""


class ReadingProgress(NamedTuple):
    """Progress of work that reads through data."""

    part: str
    """Split that is read, or ``documents``."""
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """Data that was packed."""

    path: Path
    """The new folder."""
    content: Mapping[str, Any]
    """Kind, tokenizer or labels, and the counts of each split."""
    file_bytes: int
    """Size of its files."""

    @classmethod
    def of(cls, path: Path, content: Mapping[str, Any]) -> "PackedData":
        """The record of a folder that was written."""
        size = sum(file.stat().st_size for file in path.iterdir())
        return cls(path=path, content=content, file_bytes=size)

    @property
    def next(self) -> str:
        """Command that shows it."""
        return f"systolic data inspect {self.path}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "to": str(self.path),
            **self.content,
            "file_bytes": self.file_bytes,
            "next": self.next,
        }


@dataclass(frozen=True, kw_only=True)
class LearnedTokenizer:
    """A tokenizer that was learned and written."""

    path: Path
    """The new folder."""
    vocab: int
    """Number of tokens."""
    documents: int
    """Documents that it was learned from."""
    bytes: int
    """Size of their text."""
    bytes_per_token: float | None
    """Mean over held-out documents; None without any."""
    next: str
    """Command that trains with it."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "to": str(self.path),
            "vocab": self.vocab,
            "documents": self.documents,
            "bytes": self.bytes,
            "bytes_per_token": self.bytes_per_token,
            "next": self.next,
        }


@dataclass(frozen=True, kw_only=True)
class InspectedData:
    """Data, and what a model will see of it."""

    target: str
    """Path or recipe."""
    data: Data
    split: Split
    record: Mapping[str, Any]
    """Result of :func:`systolic.data.inspect.inspect`."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"target": self.target, **self.record}


@command_of
def pack(
    path: Path | str,
    to: Annotated[Path | str, NEW_FOLDER],
    *,
    tokenizer: Path | str | None = None,
    field: str = "text",
    validation: Path | str | None = None,
    validation_share: Annotated[float | None, SHARE] = None,
    shard_mib: Annotated[int, COUNT] = 256,
    images: bool = False,
) -> PackedData:
    """Writes data once in the format that trains fastest: compressed, sharded, with random access.

    Text is tokenised; pictures are kept as they are. OUT appears when everything is written. A pack that
    was killed leaves no folder, and starts again.

    Args:
        path: Text (a file or folder of text, JSONL, Parquet, ArrayRecord, a datasets folder), or with --images a folder of pictures, one folder a class.
        to: The folder to write; it must not exist. --out is the same.
        tokenizer: A tokenizer.json, or its folder; bytes without one.
        field: The JSONL field or column that holds the text.
        validation: Validation text; without it a share of the documents is used.
        validation_share: Share of the documents for validation, 0.01 by default; with --images share of each class, 0.1 by default.
        shard_mib: Tokens per file, in MiB before compression.
        images: PATH holds pictures.

    Raises:
        OptionError: ``to`` exists, or the data is pictures and ``images`` is not given.
        DataError: the data is packed already, empty or damaged.
        RunError: ``to`` can't be written.
    """
    path, to = Path(path), Path(to)
    if images:
        share = 0.1 if validation_share is None else validation_share
        of_text = {
            "tokenizer": tokenizer is not None,
            "field": field != "text",
            "validation": validation is not None,
            "shard-mib": shard_mib != 256,
        }
        for option in (f"--{name}" for name, is_set in of_text.items() if is_set):
            raise OptionError(
                f"{option} is of text, and --images packs pictures; leave {option} out"
            )
        return PackedData.of(to, _pack_pictures(path, to, share))
    from systolic.data.text.documents import Documents
    from systolic.data.text.packed import pack_text

    data = Documents(
        path=path,
        tokenizer=_path(tokenizer),
        field=field,
        validation=_path(validation),
        validation_share=0.01 if validation_share is None else validation_share,
    )

    def update(split: Split, done: int, total: int) -> None:
        reporter().update(ReadingProgress(split.value, done, total))

    with working(f"pack {path.name}"):
        try:
            content = pack_text(data, to, shard_mib << 20, update)
        except DataError as error:
            if _holds_pictures(path):
                raise OptionError(f"{path} holds pictures, not text; add --images") from error
            raise
    return PackedData.of(to, content)


def _pack_pictures(path: Path, to: Path, validation_share: float) -> dict[str, Any]:
    """Kind, labels and counts of the pictures that were packed."""
    from systolic.data.image.images import Images
    from systolic.data.image.images import pack as pack_images
    from systolic.data.text.packed import fresh_folder

    images = Images(path=path, held_out=validation_share)

    def update(split: str, done: int) -> None:
        total = images.size(Split(split))
        reporter().update(ReadingProgress(split, done, total))

    with working(f"pack {path.name}"), fresh_folder(to) as scratch:
        counts = pack_images(images, scratch, update)
    return {
        "kind": "images",
        "labels": list(images.labels()),
        "splits": {split: {"examples": count} for split, count in counts.items()},
    }


@command_of
def train_tokenizer(
    path: Path | str,
    to: Annotated[Path | str, NEW_FOLDER],
    *,
    vocab: Annotated[int, Range(least=SMALLEST_VOCAB)] = 32_768,
    field: str = "text",
    documents: Annotated[int, NOT_NEGATIVE] = 0,
) -> LearnedTokenizer:
    """Learns a byte-level BPE vocabulary from text, for systolic train lm --tokenizer OUT.

    A hundredth of the documents is held out to measure how many bytes a token stands for.

    Args:
        path: Text: a file or folder of text, JSONL, Parquet, ArrayRecord or a datasets folder.
        to: The folder to write tokenizer.json to; it must not exist. --out is the same.
        vocab: Limit of tokens, including the 256 bytes and the start and end of a document.
        field: The JSONL field or column that holds the text.
        documents: Documents to learn from, spread over the text; 0 uses all.

    Raises:
        OptionError: ``to`` exists.
        DataError: there are no documents, or they are packed.
        MissingExtraError: ``tokenizers`` is not installed.
    """
    from systolic.data.text.documents import Documents
    from systolic.data.text.train_tokenizer import train

    path, to = Path(path), Path(to)
    data = Documents(path=path, field=field)

    def update(done: int, total: int) -> None:
        reporter().update(ReadingProgress("documents", done, total))

    with working(f"tokenizer {path.name}"):
        learned = train(data, to, vocab, documents, update)
    words = ["systolic", "train", "lm", "--path", str(path), "--tokenizer", str(to)]
    words += [] if field == "text" else ["--field", field]
    return LearnedTokenizer(path=to, **learned, next=shlex.join(words))


@command_of
def inspect(
    target: Path | str,
    *,
    tokenizer: Path | str | None = None,
    sequence: Annotated[int, COUNT] = 1024,
    field: str = "text",
    split: Split = Split.train,
    examples: Annotated[int, COUNT] = 256,
) -> InspectedData:
    """Shows the examples that a model will see, of data or of a recipe with the recipe's options.

    Args:
        target: Text or a folder of pictures, packed or not; or the name or file of a recipe.
        tokenizer: For text: a tokenizer.json or its folder; bytes without one.
        sequence: For text: tokens per row.
        field: For text: the JSONL field or column.
        split: Split to show examples of.
        examples: Examples to look at, in the order of training.

    Raises:
        NotFoundError: there is no such path.
        DataError: no examples in the split, or damaged data.
    """
    from systolic.data.image.images import INDEX, Images
    from systolic.data.text.documents import Documents

    path = Path(target)
    if not path.exists():
        raise _neither(str(target))
    if path.is_dir() and ((path / INDEX).is_file() or _holds_pictures(path)):
        return _inspected(str(path), Images(path=path), split, examples)
    data = Documents(path=path, tokenizer=_path(tokenizer), sequence=sequence, field=field)
    return _inspected(str(path), data, split, examples)


@command_of
def inspect_recipe(
    job: Annotated["Job | JobSource | str", Wording("a Job or the name of a recipe")],
    *,
    split: Split = Split.train,
    examples: Annotated[int, COUNT] = 256,
    **options: Any,
) -> InspectedData:
    """Shows what a model will see of a recipe's data.

    Args:
        job: A Job, or a recipe by its name or file.
        split: Split to show examples of.
        examples: Examples to look at, in the order of training.
        options: Options of the recipe that ``job`` names.

    Raises:
        NotFoundError: there is no such recipe.
        DataError: no examples in the split, or damaged data.
    """
    from systolic.recipes.jobs import source_of

    source = source_of(job, options)
    return _inspected(source.recipe.target, source.job.data, split, examples)


def _inspected(target: str, data: Data, split: Split, examples: int) -> InspectedData:
    """Data with what a model will see of it.

    Raises:
        DataError: no examples in the split, or damaged data; lines that can't be learned are warned of, one for each kind of fault.
    """
    from systolic.data.inspect import inspect
    from systolic.data.text.conversations import BadLinesError

    try:
        record = inspect(data, split, examples)
    except BadLinesError as error:
        if len(error.kinds) == 1:  # One line says it all.
            raise
        for line in error.kinds[:MAX_FAULTS]:
            reporter().warn(line)
        more = len(error.kinds) - MAX_FAULTS
        rest = f" ({more:,} more kinds of fault are not shown)" if more > 0 else ""
        raise DataError(
            f"{len(error.lines):,} of {error.total:,} lines of the data can't be learned{rest}; correct them, or take them out"
        ) from error
    return InspectedData(target=target, data=data, split=split, record=record)


def is_data(target: str) -> bool:
    """Whether a target is data on disk, not the name or file of a recipe.

    Raises:
        NotFoundError: it is neither.
    """
    from systolic import recipes

    path = Path(target)
    if target in recipes.shipped() or ".py:" in target or path.suffix == ".py":
        return False
    if path.exists():
        return True
    if recipes.is_named(target):
        return False
    raise _neither(target)


def _neither(target: str) -> NotFoundError:
    from systolic import recipes

    near = nearest_file(Path(target)) or nearest(target, recipes.shipped())
    return NotFoundError(
        f"{target} is neither data nor a recipe{near}; give a path that exists, or a name of systolic recipes"
    )


def _holds_pictures(path: Path) -> bool:
    """Whether a folder has class folders of pictures, itself or below a split's folder."""
    from systolic.data.image.images import SUFFIXES

    depths = ("*/*", "*/*/*") if path.is_dir() else ()
    return any(file.suffix.lower() in SUFFIXES for depth in depths for file in path.glob(depth))


def _path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)
