"""``systolic data pack``, ``systolic data inspect`` and ``systolic data tokenizer``."""

import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from systolic.cli.parse import parse, print_verb_help
from systolic.core.errors import DataError, NotFoundError, OptionError, nearest
from systolic.core.files import nearest_file
from systolic.core.ranges import COUNT, NOT_NEGATIVE, SHARE, Range
from systolic.core.units import gibibytes
from systolic.data.text.tokenizer import SMALLEST_VOCAB
from systolic.job import Data, Split
from systolic.report.figures import plural
from systolic.report.output import print_json, warn

BAD_KINDS = 50
"""Kinds of faults of lines that can't be learned, at most, that are named."""
WIDTH = 100

FORMS = """usage: systolic data pack PATH --to OUT [options]
       systolic data inspect RECIPE_OR_PATH [options]
       systolic data tokenizer PATH --to FOLDER [options]

  pack       writes text (tokenised) or pictures as compressed ArrayRecord, readable at random places
  inspect    shows what a model will see: fields, counts, a decoded row or a contact sheet
  tokenizer  learns a byte-level BPE vocabulary from text and writes its tokenizer.json

systolic data pack --help and the like show each on its own."""
PARTS = ("pack", "inspect", "tokenizer")


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        return print_verb_help(FORMS, PackOptions, InspectOptions, TokenizerOptions)
    if args[0] == "pack":
        return pack(parse(PackOptions, _to(args[1:]), "systolic data pack"))
    if args[0] == "inspect":
        return _inspect(args[1:])
    if args[0] == "tokenizer":
        return tokenizer(parse(TokenizerOptions, _to(args[1:]), "systolic data tokenizer"))
    raise OptionError(
        f"systolic data has no {args[0]!r}{nearest(args[0], PARTS)}; it has {', '.join(PARTS)}, see systolic data --help"
    )


def _to(words: Sequence[str]) -> list[str]:
    """Words with ``--to`` in place of ``--out``, as other verbs call what they write."""
    return [
        "--to" + w.removeprefix("--out") if w.partition("=")[0] == "--out" else w for w in words
    ]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Writes data once in the form that trains fastest: compressed, sharded, readable at random.

    Text is tokenised; pictures are kept as they are. OUT appears when all is written: a pack that
    was killed leaves nothing that looks whole, and starts afresh.

    Args:
        path: Text (a file or folder of text, JSONL, Parquet, ArrayRecord, a datasets folder), or with --images a folder of pictures, one folder a class.
        to: The folder to write; it must not exist. --out is the same.
        tokenizer: A tokenizer.json, or its folder; bytes without one.
        field: The JSONL field or column that holds the text.
        validation: Validation text; without it a share of the documents is for validation.
        validation_share: That share, 0.01 by default; with --images of each class, 0.1 by default.
        shard_mib: Tokens per file, in MiB before compression.
        images: PATH holds pictures.
        json: Print one JSON object.
    """

    path: Annotated[Path, tyro.conf.Positional]
    to: Path
    tokenizer: Path | None = None
    field: str = "text"
    validation: Path | None = None
    validation_share: Annotated[float | None, SHARE] = None
    shard_mib: Annotated[int, COUNT] = 256
    images: bool = False
    json: bool = False


def pack(options: PackOptions) -> int:
    """``systolic data pack``."""
    to = options.to
    made = _pack_images(options) if options.images else _pack_text(options)
    written = sum(file.stat().st_size for file in to.iterdir())
    record: dict[str, Any] = {
        "to": str(to),
        **made,
        "file_bytes": written,
        "next": f"systolic data inspect {to}",
    }
    if options.json:
        print_json(record)
        return 0
    for split, about in record["splits"].items():
        print(
            f"  {split:<10}  "
            + ", ".join(
                plural(about[f"{noun}s"], noun)
                for noun in ("document", "place", "example")
                if f"{noun}s" in about
            )
        )
    print(f"{to}: {gibibytes(written)}")
    print(f"next: {record['next']}")
    return 0


def _pack_text(options: PackOptions) -> dict[str, Any]:
    from systolic.data.text.documents import Documents
    from systolic.data.text.pack import pack_text

    share = options.validation_share
    data = Documents(
        path=options.path,
        tokenizer=options.tokenizer,
        field=options.field,
        validation=options.validation,
        validation_share=0.01 if share is None else share,
    )
    with _progress(options.json) as tell:

        def show(split: Split, done: int, total: int) -> None:
            tell(split.value, done, total)

        try:
            return pack_text(data, options.to, options.shard_mib << 20, show)
        except DataError as error:
            if _holds_pictures(options.path):
                raise OptionError(
                    f"{options.path} holds pictures, not text; add --images"
                ) from error
            raise


def _pack_images(options: PackOptions) -> dict[str, Any]:
    from systolic.data.image.images import Images
    from systolic.data.image.images import pack as pack_pictures
    from systolic.data.text.pack import fresh_folder

    share = options.validation_share
    images = Images(path=options.path, held_out=0.1 if share is None else share)
    with _progress(options.json) as tell, fresh_folder(options.to) as scratch:
        counts = pack_pictures(
            images, scratch, lambda split, done: tell(split, done, images.size(Split(split)))
        )
    return {
        "kind": "images",
        "labels": list(images.labels()),
        "splits": {split: {"examples": count} for split, count in counts.items()},
    }


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Learns a byte-level BPE vocabulary from text, for systolic train lm --tokenizer OUT.

    A hundredth of the documents is held out to measure how many bytes a token stands for.

    Args:
        path: Text: a file or folder of text, JSONL, Parquet, ArrayRecord or a datasets folder.
        to: The folder to write tokenizer.json to; it must not exist. --out is the same.
        vocab: Tokens at most, with the 256 bytes and the start and end of a document among them.
        field: The JSONL field or column that holds the text.
        documents: Documents to learn from, spread over the text; 0 is all.
        json: Print one JSON object.
    """

    path: Annotated[Path, tyro.conf.Positional]
    to: Path
    vocab: Annotated[int, Range(least=SMALLEST_VOCAB)] = 32_768
    field: str = "text"
    documents: Annotated[int, NOT_NEGATIVE] = 0
    json: bool = False


def tokenizer(options: TokenizerOptions) -> int:
    """``systolic data tokenizer``."""
    from systolic.data.text.documents import Documents
    from systolic.data.text.train_tokenizer import train

    to = options.to
    data = Documents(path=options.path, field=options.field)
    with _progress(options.json) as tell:
        made = train(
            data,
            to,
            options.vocab,
            options.documents,
            lambda done, total: tell("documents", done, total),
        )
    following = shlex.join(
        ["systolic", "train", "lm", "--path", str(options.path), "--tokenizer", str(to)]
        + ([] if options.field == "text" else ["--field", options.field])
    )
    record = {"to": str(to), **made, "next": following}
    if options.json:
        print_json(record)
        return 0
    print(f"{to}: {made['vocab']:,} tokens from {plural(made['documents'], 'document')}")
    if made["bytes_per_token"] is not None:
        print(f"  held-out text: {made['bytes_per_token']:.2f} bytes a token")
    print(f"next: {following}")
    return 0


@contextmanager
def _progress(quiet: bool) -> Generator[Any, None, None]:
    """A bar a split on stderr: ``tell(split, done, total)``."""
    from rich.console import Console
    from rich.progress import Progress

    tasks: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bar:

        def tell(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bar.add_task(split, total=total)
            bar.update(tasks[split], completed=done)

        yield tell


@dataclass(frozen=True, kw_only=True)
class InspectRecipeOptions:
    """Shows what a model will see of a recipe's data.

    Args:
        split: Whose examples are shown.
        examples: Examples to look at, in the order of training.
        json: Print one JSON object.
    """

    split: Split = Split.train
    examples: Annotated[int, COUNT] = 256
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Shows what a model will see of some data, or of a recipe's with the recipe's options.

    Args:
        target: Text or a folder of pictures, packed or not; or the name or file of a recipe.
        tokenizer: For text: a tokenizer.json or its folder; bytes without one.
        sequence: For text: tokens per row.
        field: For text: the JSONL field or column.
        split: Whose examples are shown.
        examples: Examples to look at, in the order of training.
        json: Print one JSON object.
    """

    target: Annotated[Path, tyro.conf.Positional]
    tokenizer: Path | None = None
    sequence: Annotated[int, COUNT] = 1024
    field: str = "text"
    split: Split = Split.train
    examples: Annotated[int, COUNT] = 256
    json: bool = False


def _inspect(args: Sequence[str]) -> int:
    if not args or args[0].startswith("-") or _is_path(args[0]):
        options = parse(InspectOptions, args, "systolic data inspect")
        shown = InspectRecipeOptions(
            split=options.split, examples=options.examples, json=options.json
        )
        return _show(str(options.target), _data(options), shown)
    from systolic.cli.target import request

    asked = request(args[0], args[1:], "data inspect", InspectRecipeOptions)
    return _show(args[0], asked.job.data, asked.verb)


def _show(target: str, data: Data, options: InspectRecipeOptions) -> int:
    from systolic.data.inspect import inspect, pictures
    from systolic.data.text.conversations import BadLinesError

    try:
        record = {"target": target, **inspect(data, options.split, options.examples)}
    except BadLinesError as error:
        if len(error.kinds) == 1:  # One line says it all.
            raise
        for line in error.kinds[:BAD_KINDS]:
            warn(line)
        more = len(error.kinds) - BAD_KINDS
        rest = f" ({more:,} more kinds of fault are not shown)" if more > 0 else ""
        raise DataError(
            f"{len(error.lines):,} of {error.total:,} lines of the data can't be learned{rest}; correct them, or take them out"
        ) from error
    if options.json:
        print_json(record)
        return 0
    from rich.console import Console

    from systolic.cli.data_view import sheet, summary

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(summary(record))
    shown = pictures(data, options.split, 12)
    if shown:
        console.print(sheet(shown, data.labels(), colour=console.color_system is not None))
    return 0


def _is_path(target: str) -> bool:
    """Whether a target is data on disk, not the name or file of a recipe."""
    from systolic import recipes

    path = Path(target)
    # A name that is nearly that of a file is meant as one, unless it is a recipe's: qwen2.5 has no suffix.
    file = path.exists() or (path.suffix[1:].isalpha() and nearest_file(path))
    return target not in recipes.shipped() and bool(file) and path.suffix != ".py"


def _data(options: InspectOptions) -> Data:
    """The data that lies at a path."""
    from systolic.data.image.images import INDEX, Images
    from systolic.data.text.documents import Documents

    path = options.target
    if not path.exists():
        from systolic import recipes

        raise NotFoundError(
            f"{path} is neither data nor a recipe{nearest_file(path) or nearest(str(path), recipes.shipped())}; give a path, or a name of systolic recipes"
        )
    if path.is_dir() and ((path / INDEX).is_file() or _holds_pictures(path)):
        return Images(path=path)
    return Documents(
        path=path,
        tokenizer=options.tokenizer,
        sequence=options.sequence,
        field=options.field,
    )


def _holds_pictures(path: Path) -> bool:
    """Whether a folder has class folders of pictures, itself or below a split's folder."""
    from systolic.data.image.images import SUFFIXES

    depths = ("*/*", "*/*/*") if path.is_dir() else ()
    return any(file.suffix.lower() in SUFFIXES for depth in depths for file in path.glob(depth))
