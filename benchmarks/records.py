"""Files that a user names: records to judge, and lines that an earlier run wrote.

What can't be read ends the benchmark with one line on stderr, which names the place, and exit code 2.
"""

import argparse
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from systolic.core.errors import SystolicError

T = TypeVar("T")
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What code that reads a value of another form raises."""


RESULTS = Path(__file__).parent / "results"


def newest(name: str) -> Path:
    """The latest dated lines of a benchmark among the results: ``2026-11-28-reach.jsonl`` of ``reach``."""
    return max(RESULTS.glob(f"????-??-??-{name}.jsonl"))


class Kind(enum.Enum):
    """What a field holds, in words; null is an absent field."""

    number = "a finite number"
    positive = "a finite number above 0"
    text = "text"
    object = "an object"
    any = "any value"

    def takes(self, value: Any) -> bool:
        """Whether a value is of this kind."""
        match self:
            case Kind.number:
                return _finite(value)
            case Kind.positive:
                return _finite(value) and value > 0
            case Kind.text:
                return isinstance(value, str)
            case Kind.object:
                return isinstance(value, dict)
            case Kind.any:
                return True


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number above what a float holds
        return False


class Record(dict[str, Any]):
    """A record that knows which of its fields was read last."""

    last = ""

    def __getitem__(self, name: str) -> Any:
        self.last = name
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict has it."""
        self.last = name
        return super().get(name, default)


def refuse(text: str) -> NoReturn:
    """Ends the process with one line and exit code 2."""
    print(" ".join(text.split()), file=sys.stderr)
    raise SystemExit(2)


def records(path: Path, needed: Mapping[str, Kind], other: Mapping[str, Kind]) -> list[Record]:
    """The records of a file: a JSON list of objects, or JSON lines.

    Args:
        path: The file.
        needed: Fields that each record has, by kind.
        other: Fields that a record may lack, by kind.
    """
    found = []
    for number, value in enumerate(_values(path), 1):
        if not isinstance(value, dict):
            refuse(f"{path}: record {number} is {_shown(value)}, not an object with fields")
        record = Record(value)
        place = (
            f"{path}: record {number} ({record['id']})"
            if "id" in value
            else f"{path}: record {number}"
        )
        for name, kind in (needed | other).items():
            if value.get(name) is None:
                if name in needed:
                    refuse(f"{place} has no field {name!r}; it takes {kind.value}")
            elif not kind.takes(value[name]):
                refuse(f"{place}: {name} is {_shown(value[name])}; it takes {kind.value}")
        found.append(record)
    if not found:
        refuse(f"{path} has no record; give a JSON list of objects, or JSON lines")
    return found


def used(path: Path, record: Record, rule: Callable[[Record], T]) -> T:
    """What a rule makes of a record; one that it can't read is named with the field that was read last."""
    try:
        return rule(record)
    except SystolicError as error:
        refuse(f"{path}: {record['id']}: {error}")
    except UNREADABLE as error:
        name = record.last
        refuse(
            f"{path}: {record['id']}: {name} is {_shown(dict.get(record, name))}, which can't be read ({type(error).__name__}: {error})"
        )


def lines(path: Path, *fields: str) -> list[dict[str, Any]]:
    """Lines that an earlier run wrote, each with ``fields``; a cut last one is left out."""
    found, texts = [], _text(path).splitlines()
    for number, line in enumerate(texts, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            if number < len(texts):
                refuse(f"{path}: line {number} is not JSON ({error}); correct or remove it")
            continue
        lacking = [name for name in fields if not isinstance(value, dict) or name not in value]
        if lacking:
            refuse(
                f"{path}: line {number} has no {lacking[0]!r}, so that no run of this benchmark wrote it; name another file"
            )
        found.append(value)
    return found


def tabled(
    path: Path, found: Sequence[dict[str, Any]], table: Callable[[Sequence[dict[str, Any]]], str]
) -> str:
    """The table of the lines of a file, which has some, all of this benchmark."""
    if not found:
        refuse(f"{path} holds no rows; name a file that a run of this benchmark wrote")
    try:
        return table(found)
    except UNREADABLE as error:
        refuse(
            f"{path} has lines that no run of this benchmark wrote ({type(error).__name__}: {error}); name another file"
        )


def left_stale(priced: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """What to say after rows were priced anew: how many, and which had no program in ``folder``."""
    stale = [row["id"] for row in priced if row.get("stale")]
    if not stale:
        return f"all {len(priced)} rows have today's prices"
    return f"{len(stale)} of {len(priced)} rows keep their earlier prices (stale), as {folder} lacks their program; compile them again: {' '.join(stale)}"


def none_chosen(path: Path, parts: Sequence[str], half: str | None) -> str:
    """What to say where names and half choose none of the rows of a file."""
    asked = [f"named {' or '.join(parts)}"] if parts else []
    asked += [f"of the half {half}"] if half else []
    return f"{path} has no row {' and '.join(asked)}; ask for others"


def check_out(path: Path | None) -> None:
    """Prepares a file for lines that are appended: ends its last line, or drops one that a kill cut short.

    Ends the process where the file can't be written.
    """
    if path is None:
        return
    # Permissions do not tell all: root may write in /proc, which takes no files.
    try:
        there = path.exists() or path.is_symlink()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
        elif path.is_file():
            _end_last_line(path)
    except OSError as error:
        refuse(f"{path} cannot be written ({error.strerror}); name another file with --out")


def _end_last_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    last = content[whole:]
    # Anything but the start of an object is no line of a benchmark; who reads the file says so.
    if not last.startswith(b"{"):
        return
    try:
        json.loads(last)
    except ValueError:
        with path.open("r+b") as file:
            file.truncate(whole)
    else:
        with path.open("ab") as file:
            file.write(b"\n")


def count(text: str) -> int:
    """The type of an option that takes 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        refuse(f"{path} cannot be read ({error.strerror}); check the path")
    except UnicodeDecodeError as error:
        refuse(f"{path} is not text ({error.reason} at byte {error.start})")


def _values(path: Path) -> list[Any]:
    text = _text(path)
    if not text.lstrip().startswith("["):
        return [
            _value(path, line, number)
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"{path} is not JSON ({error}); it may be cut short")


def _value(path: Path, line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        refuse(
            f"{path}: line {number} is not JSON ({error}); give a JSON list of objects, or one object a line"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
