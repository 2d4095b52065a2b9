"""``systolic data pack``, ``systolic data inspect`` and ``systolic data tokenizer``."""

import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import tyro

from systolic.cli.output import print_json
from systolic.cli.parse import parse
from systolic.core.errors import DataError, NotFoundError, OptionError, nearest
from systolic.core.ranges import COUNT, NOT_NEGATIVE, SHARE, Range
from systolic.core.units import gibibytes
from systolic.data.text.tokenizer import SMALLEST_VOCAB
from systolic.job import Data, Split

WIDTH = 100

USAGE = """usage: systolic data pack PATH --to OUT [options]
       systolic data inspect RECIPE_OR_PATH [options]
       systolic data tokenizer PATH --to FOLDER [options]

  pack       writes text (tokenised) or pictures as compressed ArrayRecord, readable at random places
  inspect    shows what a model will see: fields, counts, a decoded row or a contact sheet
  tokenizer  learns a byte-level BPE vocabulary from text and writes its tokenizer.json

systolic data pack --help and the like show the options of each."""
PARTS = ("pack", "inspect", "tokenizer")


def run(args: Sequence[str]) -> int:
    """The verb."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if args[0] == "pack":
        return parse(pack, args[1:], "systolic data pack")
    if args[0] == "inspect":
        return _inspect(args[1:])
    if args[0] == "tokenizer":
        return parse(tokenizer, args[1:], "systolic data tokenizer")
    raise OptionError(
        f"systolic data has no {args[0]!r}{nearest(args[0], PARTS)}; it has {', '.join(PARTS)}, see systolic data --help"
    )


def pack(
    path: Annotated[Path, tyro.conf.Positional],
    to: Path,
    tokenizer: Path | None = None,
    field: str = "text",
    validation: Path | None = None,
    validation_share: Annotated[float | None, SHARE] = None,
    shard_mib: Annotated[int, COUNT] = 256,
    images: bool = False,
    json: bool = False,
) -> int:
    """Writes data once in the form that trains fastest: compressed, sharded, readable at random.

    Text is tokenised; pictures are kept as they are. OUT appears when all is written: a pack that
    was killed leaves nothing that looks whole, and starts afresh.

    Args:
        path: Text (a file or folder of text, JSONL, Parquet, ArrayRecord, a datasets folder), or with --images a folder of pictures, one folder a class.
        to: The folder to write; it must not exist.
        tokenizer: A tokenizer.json, or its folder; bytes without one.
        field: The JSONL field or column that holds the text.
        validation: Validation text; without it a share of the documents is for validation.
        validation_share: That share, 0.01 by default; with --images of each class, 0.1 by default.
        shard_mib: Tokens per file, in MiB before compression.
        images: PATH holds pictures.
        json: Print one JSON object.
    """
    if images:
        made = _pack_images(path, to, 0.1 if validation_share is None else validation_share, json)
    else:
        made = _pack_text(
            path,
            to,
            tokenizer,
            field,
            validation,
            0.01 if validation_share is None else validation_share,
            shard_mib,
            json,
        )
    written = sum(file.stat().st_size for file in to.iterdir())
    record: dict[str, Any] = {
        "to": str(to),
        **made,
        "file_bytes": written,
        "next": f"systolic data inspect {to}",
    }
    if json:
        print_json(record)
        return 0
    for split, about in record["splits"].items():
        print(
            f"  {split:<10}  "
            + ", ".join(
                f"{about[name]:,} {name}"
                for name in ("documents", "places", "examples")
                if name in about
            )
        )
    print(f"{to}: {gibibytes(written)}")
    print(f"next: {record['next']}")
    return 0


def _pack_text(
    path: Path,
    to: Path,
    tokenizer: Path | None,
    field: str,
    validation: Path | None,
    share: float,
    shard_mib: int,
    quiet: bool,
) -> dict[str, Any]:
    from systolic.data.text.documents import Documents
    from systolic.data.text.pack import pack_text

    if shard_mib < 1:
        raise OptionError(f"--shard-mib {shard_mib}; a file holds 1 MiB or more")
    data = Documents(
        path=path, tokenizer=tokenizer, field=field, validation=validation, validation_share=share
    )
    with _progress(quiet) as tell:
        try:
            return pack_text(
                data, to, shard_mib << 20, lambda split, done, total: tell(split.value, done, total)
            )
        except DataError as error:
            if _holds_pictures(path):
                raise OptionError(f"{path} holds pictures, not text; add --images") from error
            raise


def _pack_images(path: Path, to: Path, share: float, quiet: bool) -> dict[str, Any]:
    from systolic.data.image.images import Images
    from systolic.data.image.images import pack as pack_pictures
    from systolic.data.text.pack import fresh_folder

    images = Images(path=path, held_out=share)
    with _progress(quiet) as tell, fresh_folder(to) as scratch:
        counts = pack_pictures(
            images, scratch, lambda split, done: tell(split, done, images.size(Split(split)))
        )
    return {
        "kind": "images",
        "labels": list(images.labels()),
        "splits": {split: {"examples": count} for split, count in counts.items()},
    }


def tokenizer(
    path: Annotated[Path, tyro.conf.Positional],
    to: Path,
    vocab: Annotated[int, Range(least=SMALLEST_VOCAB)] = 32_768,
    field: str = "text",
    documents: Annotated[int, NOT_NEGATIVE] = 0,
    json: bool = False,
) -> int:
    """Learns a byte-level BPE vocabulary from text, for systolic train lm --tokenizer OUT.

    A hundredth of the documents is held out, and what a token stands for is measured on them.

    Args:
        path: Text: a file or folder of text, JSONL, Parquet, ArrayRecord or a datasets folder.
        to: The folder to write tokenizer.json to; it must not exist.
        vocab: Tokens at most, with the 256 bytes and the start and end of a document among them.
        field: The JSONL field or column that holds the text.
        documents: Learn from only so many, spread over the text; 0 is all.
        json: Print one JSON object.
    """
    from systolic.data.text.documents import Documents
    from systolic.data.text.learned import train

    data = Documents(path=path, field=field)
    with _progress(json) as tell:
        made = train(data, to, vocab, documents, lambda done, total: tell("documents", done, total))
    following = shlex.join(
        ["systolic", "train", "lm", "--path", str(path), "--tokenizer", str(to)]
        + ([] if field == "text" else ["--field", field])
    )
    record = {"to": str(to), **made, "next": following}
    if json:
        print_json(record)
        return 0
    print(f"{to}: {made['vocab']:,} tokens from {made['documents']:,} documents")
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


def options(
    split: Split = Split.train, examples: Annotated[int, COUNT] = 256, json: bool = False
) -> None:
    """The verb's own options.

    Args:
        split: Whose examples are shown.
        examples: How many are looked at, in the order of training.
        json: Print one JSON object.
    """


def path_options(
    target: Annotated[Path, tyro.conf.Positional],
    tokenizer: Path | None = None,
    sequence: int = 1024,
    field: str = "text",
    split: Split = Split.train,
    examples: Annotated[int, COUNT] = 256,
    json: bool = False,
) -> dict[str, Any]:
    """Shows what a model will see of some data, or of a recipe's with the recipe's options.

    Args:
        target: Text or a folder of pictures, packed or not; or the name or file of a recipe.
        tokenizer: For text: a tokenizer.json or its folder; bytes without one.
        sequence: For text: tokens per row.
        field: For text: the JSONL field or column.
        split: Whose examples are shown.
        examples: How many are looked at, in the order of training.
        json: Print one JSON object.
    """
    return {
        "data": _data(target, tokenizer, sequence, field),
        "split": split,
        "examples": examples,
        "json": json,
    }


def _inspect(args: Sequence[str]) -> int:
    if not args or args[0].startswith("-") or _is_path(args[0]):
        found = parse(path_options, args, "systolic data inspect")
        data, verb = found["data"], found
    else:
        from systolic.cli.target import request

        asked = request(args[0], args[1:], "data inspect", options)
        defaults: dict[str, Any] = {"split": Split.train, "examples": 256, "json": False}
        data, verb = asked.job.data, defaults | dict(asked.verb)
    return _show(args[0], data, verb["split"], verb["examples"], verb["json"])


def _show(target: str, data: Data, split: Split, examples: int, json: bool) -> int:
    from systolic.data.inspect import inspect, pictures

    record = {"target": target, **inspect(data, split, examples)}
    if json:
        print_json(record)
        return 0
    from rich.console import Console

    from systolic.cli.data_view import sheet, summary

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(summary(record))
    shown = pictures(data, split, 12)
    if shown:
        console.print(sheet(shown, data.labels(), colour=console.color_system is not None))
    return 0


def _is_path(target: str) -> bool:
    """Whether a target is data on disk, not the name or file of a recipe."""
    from systolic import recipes

    path = Path(target)
    return target not in recipes.shipped() and path.exists() and path.suffix != ".py"


def _data(path: Path, tokenizer: Path | None, sequence: int, field: str) -> Data:
    """The data that lies at a path."""
    from systolic.data.image.images import INDEX, Images
    from systolic.data.text.documents import Documents

    if not path.exists():
        from systolic import recipes

        raise NotFoundError(
            f"{path} is neither data nor a recipe{nearest(str(path), recipes.shipped())}; give a path, or a name of systolic recipes"
        )
    if path.is_dir() and ((path / INDEX).is_file() or _holds_pictures(path)):
        return Images(path=path)
    return Documents(path=path, tokenizer=tokenizer, sequence=sequence, field=field)


def _holds_pictures(path: Path) -> bool:
    """Whether a folder has class folders of pictures, itself or below a split's folder."""
    from systolic.data.image.images import SUFFIXES

    depths = ("*/*", "*/*/*") if path.is_dir() else ()
    return any(file.suffix.lower() in SUFFIXES for depth in depths for file in path.glob(depth))
