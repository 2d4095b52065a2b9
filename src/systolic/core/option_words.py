"""Options as words of a command line: printed from values, corrected where they are misspelt, and the command line of the present call, which files name as what made them."""

import difflib
import enum
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

from systolic.core.errors import SystolicError
from systolic.core.ranges import dashed

_BUCKET = re.compile(r"(gs|s3):/+")
_typed_words: tuple[str, ...] = ()
_OTHER_WORD = {"--on": "--rehearse SLICE", "--data": "--path PATH", "--path": "--data PATH"}
"""Options of other commands to what a command that lacks them has instead."""
_COMMAND = re.compile(r"(systolic [a-z]+ [^;,)]*)")
"""A command to type, whose options keep their dashes."""
_TYPED = re.compile(r"(?<![\w-])--([a-z][\w-]*)(?![\w.-])( is )?")
_FILE = r"(?!\S*\.(?:json|safetensors|npz|gguf|py)\b)"
"""No name of a file comes here."""
_CHOICES = re.compile(r"is for --([a-z]+) (\w+) and given with --\1 (\w+)")
"""A choice whose option is given with another choice."""
_VALUE = r"(?!(?:an?|for|in|no|not|of|the)\b)"
"""A value comes here, rather than words of a sentence about something of an option's name, such as a program."""
_ADDED = re.compile(r"\b(add|give|set) --([a-z][\w-]*)[ =]([^\s;,]*[^a-z\s;,][^\s;,]*)")
"""An option to add with its value, which is no word of the sentence."""


def option_words(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    typed: Collection[str] = (),
    without: Collection[str] = (),
) -> list[str]:
    """Words that give a recipe, or a verb's class of options, these values: what was typed or differs from the defaults.

    Args:
        function: Its parameters, and the fields of the dataclasses among them, are the options.
        values: Arguments of ``function``; those that are left out have their defaults.
        settings: Values by dotted name (``layout.fsdp``) that take the place of those in ``values``; a
            ``batch`` takes the place of a batch per device, too.
        typed: Options as they were typed, without dashes before them (``model.no-tie-embeddings``): these are
            given even at their defaults, which a run that continues may not have.
        without: Options to leave out, by dotted name as typed.
    """
    parameters = inspect.signature(function).parameters
    defaults = flat({n: p.default for n, p in parameters.items() if p.default is not p.empty})
    options = flat(values)
    for name, value in (settings or {}).items():
        options[name.replace("-", "_")] = value
        if name == "batch":
            options.pop("batch_per_device", None)
    words: list[str] = []
    for name, value in options.items():
        if dashed(name) in without:
            continue
        is_typed = not {dashed(name), negated(name)}.isdisjoint(typed)
        if is_typed or name not in defaults or _words(value) != _words(defaults[name]):
            words += _option(name, value)
    return words


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name: the fields of a dataclass each on their own."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if is_dataclass(value) and not isinstance(value, type):
            inner = {field.name: getattr(value, field.name) for field in fields(value)}
            flattened |= flat(inner, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened


def _option(name: str, value: Any) -> list[str]:
    """An option as one or more words; a text that begins with a dash follows an equals sign."""
    option = f"--{dashed(name)}"
    if isinstance(value, bool):
        return [option if value else f"--{negated(name)}"]
    words = _words(value)
    if (isinstance(value, str) and value.startswith("-")) or value == "":
        return [f"{option}={value}"]
    return [option, *words]


def negated(name: str) -> str:
    """Name that switches an option off: ``model.no-tie-embeddings``."""
    part, dot, last = dashed(name).rpartition(".")
    return f"{part}{dot}no-{last}"


def typed(name: str, value: Any) -> str:
    """An option as it is typed: ``--layout.remat-names query key``, ``--model.no-qk-norm``."""
    part, dot, last = dashed(name).rpartition(".")
    if isinstance(value, bool):
        return f"--{part}{dot}{'' if value else 'no-'}{last}"
    words = plain_words(value)
    return f"--{part}{dot}{last}{words and ' '}{words}"


def plain_words(value: Any) -> str:
    """A value of an option as it is typed; of a switch yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shlex.join(_words(value))


def _words(value: Any) -> list[str]:
    if isinstance(value, enum.Enum):
        return [value.value]
    if isinstance(value, Mapping):
        return [word for pair in value.items() for part in pair for word in _words(part)]
    if isinstance(value, (tuple, list)):
        return [word for part in value for word in _words(part)]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return [f"{value:.0f}"]
    return [path_text(value) if isinstance(value, PurePath) else str(value)]


def path_text(path: PurePath | str) -> str:
    """Text of a path; where it is of a bucket with both slashes, of which ``Path`` removes one."""
    return _BUCKET.sub(r"\1://", str(path)) if is_in_bucket(path) else str(path)


def is_in_bucket(path: PurePath | str) -> bool:
    """Whether a path has the scheme of a bucket, ``gs://`` or ``s3://``."""
    return _BUCKET.match(str(path)) is not None


def command_line() -> tuple[str, ...]:
    """Words as they were typed, from ``systolic`` on; empty in Python."""
    return _typed_words


@contextmanager
def typed_as(words: Sequence[str]) -> Generator[None]:
    """Sets the command line within."""
    global _typed_words
    before, _typed_words = _typed_words, tuple(words)
    try:
        yield
    finally:
        _typed_words = before


def nearest_option(option: str, names: Collection[str]) -> str:
    """``"; did you mean --model.layers?"`` for a misspelt ``--model.layer`` or ``--layers``, else ``""``."""
    other = _OTHER_WORD.get(option, "")
    if other and option not in names and other.partition(" ")[0] in names:
        return f"; did you mean {other}?"
    full = {name.removeprefix("--"): name for name in sorted(names)}
    if option == "--data":
        # An axis of the mesh, which is no path.
        full.pop("layout.data", None)
    last = {short.rpartition(".")[2]: name for short, name in full.items()}
    typed = {**last, **full}
    word = option.removeprefix("--")
    head, dot, last_word = word.rpartition(".")
    # --optimizer.lr is short for --optimizer.learning-rate, and nearer to --optimizer.clip.
    long = [
        name
        for short, name in full.items()
        if _initials(short.rpartition(".")[2]) == last_word and (not dot or short.startswith(head))
    ]
    if len(long) == 1:
        return f"; did you mean {long[0]}?"
    # Without the dashes, which all have in common, --on is not near --json nor --plan near --flags.
    close = difflib.get_close_matches(word, list(typed), n=1, cutoff=0.7)
    # Other programs write more words: --vocab-size, --batch-size.
    starts = [short for short in typed if word.startswith(f"{short}-")]
    near = close[0] if close else max(starts, key=len, default=None)
    return "" if near is None else f"; did you mean {typed[near]}?"


def _initials(name: str) -> str:
    """``lr`` of ``learning-rate``; nothing of a name of one word."""
    parts = name.split("-")
    return "".join(part[:1] for part in parts) if len(parts) > 1 else ""


def as_parameters(text: str, names: Iterable[str]) -> str:
    """A message whose options of these parameters have the names that Python gives them; commands in it stay."""
    known = {dashed(name): name for name in (*names, "init_from")}

    def parameter(option: re.Match[str]) -> str:
        name = known.get(option[1]) or (option[2] and option[1].replace("-", "_"))
        return f"{name}{option[2] or ''}" if name else option[0]

    def argument(option: re.Match[str]) -> str:
        verb, name, text = option.groups()
        value = text if text.isupper() else repr(text)
        return f"{verb} {known[name]}={value}" if name in known else option[0]

    def choices(said: re.Match[str]) -> str:
        name, its, typed = said.groups()
        return f"is for {name}={its!r} and given with {name}={typed!r}"

    parts = _COMMAND.split(_CHOICES.sub(choices, text))
    parts[::2] = [_TYPED.sub(parameter, _ADDED.sub(argument, part)) for part in parts[::2]]
    return "".join(parts)


def as_options(text: str, names: Collection[str]) -> str:
    """A message in which these options, ``--top-p``, have their dashes: where a clause begins with one, and everywhere if its name is no word."""
    bare = {name.removeprefix("--") for name in names}
    listed = "|".join(re.escape(name) for name in sorted(bare, key=len, reverse=True))
    if not listed:
        return text
    begins = rf"(?:(?<=^)|(?<=; ))(?:{listed})(?= is {_VALUE})"
    records = {name.partition(".")[0] for name in bare if "." in name}
    # A message may name other fields of the same record.
    compound = [rf"{re.escape(record)}\.[a-z][\w.-]*\w" for record in sorted(records)]
    compound += [re.escape(name) for name in sorted(bare, reverse=True) if "-" in name]
    anywhere = (
        rf"|(?<![\w./'\"=-]){_FILE}(?:{'|'.join(compound)})(?![\w/'\"=-])" if compound else ""
    )
    parts = _COMMAND.split(text)
    parts[::2] = [re.sub(begins + anywhere, r"--\g<0>", part) for part in parts[::2]]
    return "".join(parts)


@contextmanager
def spelled(spell: Callable[[str], str]) -> Generator[None]:
    """Errors of the block have the message that ``spell`` makes of theirs."""
    try:
        yield
    except SystolicError as error:
        error.args = (spell(str(error)), *error.args[1:])
        raise
