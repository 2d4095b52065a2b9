"""Text that other programs read: one-line shell commands, YAML that all of its readers agree on, and scripts from templates."""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
import yaml

_SHORT = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = re.compile(r"(--)?[A-Za-z/][-A-Za-z0-9_./=]*(:[-A-Za-z0-9_./=]+)*")
_WORDS = frozenset(
    ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity")
)
"""Words that YAML 1.1 or 1.2 reads as a boolean, null or a number, in any case; some with a dot or sign before them."""


def one_line(words: Iterable[str]) -> str:
    """Shell command on one line; words with control characters are written as bash reads them, ``$'a\\nb'``."""
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_escaped, word))}'"
        for word in words
    )


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_text(documents: Sequence[Any]) -> str:
    """YAML documents in which every string is quoted that any reader could take for something else.

    PyYAML follows YAML 1.1 and writes ``1e-05`` plain, since it is a string there; in YAML 1.2 and for Go's readers, such
    as kubectl, it is a number.
    """
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=sys.maxsize)


class _Dumper(yaml.SafeDumper):
    """Quotes strings, except those that nobody takes for something else."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


_Dumper.add_representer(str, _string)


def rendered(name: str, header: str, fields: Mapping[str, Any]) -> str:
    """Renders a script; the template puts the header after its first line, the interpreter.

    Args:
        name: Name of the script.
        header: Comments with the command that made it.
        fields: Values of the template, quoted for a shell.
    """
    template = _environment().get_template(f"{name}.jinja")
    return template.render({**fields, "header": header.rstrip("\n")})


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("systolic.launching", "files"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
