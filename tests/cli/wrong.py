"""Command lines that can't work, made from the signatures that options are made from: every option of every verb."""

import dataclasses
import enum
import inspect
import random
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from systolic import recipes
from systolic.cli.main import VERBS
from systolic.core.ranges import LARGEST_INT, Range


class Wrong(NamedTuple):
    """One command line, and what is wrong with it."""

    args: tuple[str, ...]
    why: str


class Option(NamedTuple):
    """One option as it is typed, with the type that it takes."""

    name: str
    hint: Any


class Command(NamedTuple):
    """A verb with arguments that would work, and the options that may follow."""

    args: tuple[str, ...]
    options: tuple[Option, ...]


READ = ("path", "tokenizer", "validation", "plan", "executable", "against", "init_from")
"""Options that name a file or folder to read."""
WRITTEN = ("run", "save", "html", "perfetto", "xprof", "out", "to")
"""Options that name what will be written."""
WORDS = {
    "on": ("", "v5e-17", "zzz-8", "v5e--4", "0xv5e-8", "v5e-0", "1e9xv5e-16", "v5e:3x"),
    "rehearse": ("v5e-99", "-1"),
    "deadline": ("3", "-3d", "nand", "1e400d"),
    "time_limit": ("abc", "-5m", "0m"),
    "free": ("layout", "batch;precision"),
    "flags": ('"--xla_a', "xla_a=1"),
    "checkpoint": ("nope", "-7", "99999"),
    "metric": ("nope",),
}
"""Text that an option does not take, by the last part of its name."""

WITHOUT_EVALUATION = ("forecast", "explain", "plan")
"""Verbs that compile the train step alone."""


def commands(run: Path, text: Path) -> Iterator[Command]:
    """Each verb with a target that exists.

    Args:
        run: A trained language model.
        text: A file of text.
    """
    small = ("--steps", "1")
    targets = {
        "image": ("--path", str(text.parent), "--classes", "3"),
        "sft": ("--from", str(run), "--data", str(text)),
        "lm": ("--model.layers", "1", "--sequence", "64", "--batch", "4"),
    }
    for name in recipes.shipped():
        given = targets.get(name, ())
        own = tuple(_options(recipes.find(name).function))
        yield Command(
            ("train", name, *given, *small), (*own, *_options(VERBS["train"].forms[0].options.read))
        )
        on = ("--on", "v5e-4", "--quick")
        yield Command(
            ("forecast", name, *given, *on),
            (*own, *_options(VERBS["forecast"].forms[0].options.read)),
        )
    yield Command(
        ("plan", "lm", "--on", "v5e-4"), tuple(_options(VERBS["plan"].forms[0].options.read))
    )
    yield Command(
        ("explain", "lm", "--on", "v5e-4"), tuple(_options(VERBS["explain"].forms[0].options.read))
    )
    yield Command(
        ("train", "--resume", str(run)), tuple(_options(VERBS["train"].forms[1].options.read))
    )
    yield Command(("eval", str(run)), tuple(_options(VERBS["eval"].forms[0].options.read)))
    yield Command(
        ("generate", str(run), "ab"), tuple(_options(VERBS["generate"].forms[0].options.read))
    )
    yield Command(
        ("predict", str(run), str(text)), tuple(_options(VERBS["predict"].forms[0].options.read))
    )
    pack, _, inspect_recipe, tokenizer = VERBS["data"].forms
    yield Command(("data", "pack", str(text)), tuple(_options(pack.options.read)))
    words = tuple(_options(tokenizer.options.read))
    yield Command(("data", "tokenizer", str(text)), words)
    yield Command(("data", "inspect", "bytes"), tuple(_options(inspect_recipe.options.read)))
    for name in ("chips", "doctor", "recipes"):
        yield Command((name,), tuple(_options(VERBS[name].forms[0].options.read)))


def wrong_lines(run: Path, text: Path, number: int, seed: int) -> list[Wrong]:
    """``number`` wrong command lines: every verb's, and over all of them every kind of option."""
    rng = random.Random(seed)
    missing, below = str(text.parent / "no such file"), str(text / "below a file")
    by_command = []
    for command in commands(run, text):
        lines = [
            Wrong((*command.args, *words), f"{option.name}: {why}")
            for option in command.options
            for words, why in _mistakes(option, missing, below)
            # What does not evaluate takes a metric of any name.
            if command.args[0] not in WITHOUT_EVALUATION or not option.name.endswith("metric")
        ]
        rng.shuffle(lines)
        by_command.append(lines)
    found: list[Wrong] = []
    while len(found) < number and any(by_command):
        for lines in by_command:
            if lines:
                found.append(lines.pop())
    return found[:number]


def _options(function: Callable[..., Any], prefix: str = "") -> Iterator[Option]:
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, parameter.annotation)
        name = f"{prefix}{parameter.name}"
        plain = _plain(hint)
        if "tyro" in repr(hint):  # a positional
            continue
        if isinstance(plain, type) and dataclasses.is_dataclass(plain):
            yield from _options(plain, f"{name}.")
        else:
            yield Option(name, hint)


def _mistakes(option: Option, missing: str, below: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Words for the command line and what is wrong with them."""
    typed = "--" + option.name.replace("_", "-")
    last = option.name.rpartition(".")[2]
    kinds = set(typing.get_args(_plain(option.hint))) or {_plain(option.hint)}
    yield (f"{typed}z", "1"), "misspelt"
    if bool in kinds:
        yield (f"{typed}=3",), "a switch takes no value"
        return
    if typing.get_origin(_plain(option.hint)) is not tuple:  # an empty tuple is one
        yield (typed,), "no value"
    if kinds & {int, float}:
        for value in _numbers(option.hint, whole=float not in kinds):
            yield (f"{typed}={value}",), f"{value} is no number for it"
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            yield (f"{typed}=zzz",), "no such choice"
    if Path in kinds and last in READ:
        yield (f"{typed}={missing}",), "nothing is there"
    if Path in kinds and last in WRITTEN:
        yield (f"{typed}={below}",), "below a file"
    if str in kinds:
        for word in WORDS.get(last, ()):
            yield (f"{typed}={word}",), f"no {last}"


def _numbers(hint: Any, *, whole: bool) -> Iterator[str]:
    yield from ("many", "", "1,5")
    yield from ("2.5", str(LARGEST_INT * 4), "-2") if whole else ("nan", "inf", "-2.5")
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    for extra in extras:
        if isinstance(extra, Range):
            step = 1 if whole else 0.5
            sides = [(extra.least, -step), (extra.above, 0), (extra.most, step), (extra.below, 0)]
            for side, away in sides:
                if side is not None and side + away not in extra:
                    yield str(int(side + away) if whole else side + away)


def _plain(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
