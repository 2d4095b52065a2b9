"""Identity of the model that answered an output, in a file beside it: other weights or options do not continue it unseen."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from systolic.core.errors import DataError
from systolic.core.files import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Answerer:
    """Everything that answers depend on, beside the lines that ask for them."""

    model: str
    """Its name, which answers hold."""
    version: int
    weights: str
    """Digest of weights and config; a copy elsewhere has the same."""
    texts: str
    """Digest of tokenizer, chat template and preprocessing; empty where it has none of them."""
    precision: str
    """Precision of the computation."""
    context: int
    """Tokens of a text; 0 for the model's own limit."""

    def begin(self, out: Path) -> None:
        """Writes the file of an output that has no result yet.

        Raises:
            RunError: it can't be written.
        """
        write_json(answerer_file(out), asdict(self))

    def check(self, out: Path) -> None:
        """Compares the file of an output that has results.

        Raises:
            DataError: something else gave them, or the file is gone or damaged.
        """
        file = answerer_file(out)
        try:
            before = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{out} has results, and {file} that says which model gave them can't be read; put it back, or name another output"
            ) from error
        known = before if isinstance(before, dict) else {}
        differ = [
            f"{name} {known.get(name)!s:.40}, now {value}"
            for name, value in asdict(self).items()
            if known.get(name) != value
        ]
        if differ:
            raise DataError(
                f"{out} has results of another model or other options ({'; '.join(differ)}); use those again, or name another output"
            )


def answerer_file(out: Path) -> Path:
    """The file beside an output."""
    return out.with_name(f"{out.name}.model.json")
