"""Pages of the reference, written from signatures before each build: the command line by verb, and Python's names."""

import ast
import dataclasses
import enum
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.ext.napoleon import GoogleDocstring

import systolic
import systolic.core.errors as errors_module
from systolic.core.errors import SystolicError
from systolic.job import Job

LITERAL = re.compile(r"(``.*?``|:\w+:`.*?`)")
SPECIAL = re.compile(r"\*|(?<=\w)_(?!\w)")
RESULTS = ("Returns:", "Yields:")
HEAD = "<!-- Written by docs/_extensions/reference.py; do not edit. -->\n\n"
RECIPES = ("recipes", "train", "tune", "forecast", "plan", "explain")
"""Verbs that take the options of a recipe."""
SECOND = {"data": ("pack", "inspect", "tokenizer"), "launch": ("serve",), "plan": ("serve",)}
"""Second words of verbs that have a help of their own."""
GUIDES = {
    "doctor": ("start/first-hour",),
    "chips": ("start/choose-hardware",),
    "recipes": ("start/first-hour",),
    "data": ("guides/own-data",),
    "forecast": ("guides/fits", "your-own-program", "start/serve-a-model"),
    "plan": ("start/choose-hardware", "start/cloud-slice", "serving"),
    "explain": ("guides/slow", "guides/does-not-learn"),
    "calibrate": ("guides/slow",),
    "calibrations": ("guides/slow",),
    "train": ("start/first-hour", "guides/several-hosts", "guides/fine-tune"),
    "tune": ("tuning",),
    "launch": ("launching", "start/cloud-slice", "start/team-gke"),
    "runs": ("launching",),
    "status": ("launching",),
    "logs": ("launching",),
    "stop": ("launching",),
    "import": ("guides/fine-tune", "guides/own-model"),
    "eval": ("start/first-hour", "bundles"),
    "generate": ("start/first-hour", "guides/fine-tune"),
    "predict": ("bundles", "guides/own-model"),
    "serve": ("start/serve-a-model", "serving"),
    "batch": ("serving",),
    "quantize": ("quantization",),
    "export": ("exporting",),
    "compare": ("bundles", "quantization"),
    "verify": ("bundles",),
}
"""Pages that show a verb at work."""
AREAS = {
    "Forecast and plan": ("chips", "forecasting", "planning", "explaining"),
    "Train and tune": ("training", "tuning"),
    "Models": ("inference", "formats", "quantizing", "comparing", "job"),
    "Serve": ("serving",),
    "Launch": ("launching",),
    "Errors": ("core",),
}
"""Pages of Python's names, each with the packages whose names it has."""


def write(app: Any) -> None:
    """Writes ``reference/command-line/*.md`` and ``reference/python/*.md`` where their text has changed."""
    from systolic.cli.main import VERBS

    folder = Path(app.srcdir) / "reference"
    commands = [*VERBS, *(f"{verb} {word}" for verb, words in SECOND.items() for word in words)]
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda command: help_of(*command.split()), commands)
        helps = dict(zip(commands, texts, strict=True))
    verbs = folder / "command-line"
    for name, verb in VERBS.items():
        options = "\n\nOptions of recipes: [by recipe](../recipes.md)." if name in RECIPES else ""
        _keep(
            verbs / f"{name}.md",
            f"{HEAD}# systolic {name}\n\n{_sentence(verb)}\n\n{_guides(name)}{options}\n\n```text\n{helps[name]}```\n"
            + "".join(
                f"\n## systolic {name} {word}\n\n```text\n{helps[f'{name} {word}']}```\n"
                for word in SECOND.get(name, ())
            ),
        )
    rows = "\n".join(
        f"| [`systolic {name}`](command-line/{name}.md) | {_sentence(verb)} |"
        for name, verb in VERBS.items()
    )
    toctree = "\n".join(f"command-line/{name}" for name in VERBS)
    _keep(
        folder / "command-line.md",
        f"{HEAD}# Command line\n\n| verb | does |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n",
    )
    for name, text in python_pages(systolic).items():
        _keep(folder / name, HEAD + text)


def _guides(verb: str) -> str:
    pages = GUIDES[verb]
    links = ", ".join(f"[](../../{page}.md)" for page in pages)
    return f"{'Guide' if len(pages) == 1 else 'Guides'}: {links}."


def help_of(*words: str) -> str:
    """What ``systolic VERB --help`` prints in 100 columns."""
    command = [sys.executable, "-m", "systolic", *words, "--help"]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def python_pages(package: Any) -> dict[str, str]:
    """Pages by their path: one with all names, and one for each area, functions before classes."""
    areas = {area: [] for area in AREAS}
    for name in package.__all__:
        value = _public(package, name)
        if callable(value):
            areas[_area(value)].append((name, value))
    pages, rows, shown = {}, [], set()
    for area, members in areas.items():
        file = f"python/{area.lower().replace(' ', '-')}"
        classes = [pair for pair in members if inspect.isclass(pair[1])]
        pages[f"{file}.md"] = _area_page(area, members, classes, shown)
        rows += [
            f"| [`{name}`]({file}.md#systolic-{name.lower().replace('_', '-')}) | {_summary(value)} | {area} |"
            for name, value in members
        ]
    toctree = "\n".join(name.removesuffix(".md") for name in pages)
    pages["python.md"] = (
        "# Python\n\n`import systolic` loads no array library; each name below loads what it needs.\n\n"
        f"| name | is | page |\n|---|---|---|\n{chr(10).join(sorted(rows))}\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n"
    )
    return pages


def _area_page(
    area: str, members: list[tuple[str, Any]], classes: list[tuple[str, Any]], shown: set[type]
) -> str:
    """Sections of an area; ``shown`` are the types that pages before it have."""
    public = {getattr(systolic, name) for name in systolic.__all__ if name != "chips"}
    types = [
        pair for pair in field_types(value for _, value in members) if pair[1] not in public | shown
    ]
    shown.update(kind for _, kind in types)
    functions = [pair for pair in members if not inspect.isclass(pair[1])]
    groups = [
        ("Functions", functions, "autofunction"),
        ("Classes", classes, "autoclass"),
        ("Types of their fields", types, "autoclass"),
    ]
    if area == "Errors":
        groups = [("Every error", [*members, *errors()], "autoexception")]
    parts = [f"# {area}\n"]
    for title, pairs, kind in groups:
        parts += [f"## {title}\n"] if pairs else []
        for name, value in pairs:
            if kind == "autoclass":
                _without_ranges(value)
            parts.append(_section(name, value, kind))
    return "\n".join(parts)


def _section(name: str, value: Any, kind: str) -> str:
    path = f"systolic.{name}" if name in systolic.__all__ else _path(value)
    title = path if name in systolic.__all__ else name
    body = f".. {kind}:: {path}" + ("\n   :members:" if kind == "autoclass" else "")
    if inspect.ismodule(getattr(systolic, name, None)):
        # Automatic documentation would describe the package of this name.
        words = str(GoogleDocstring(inspect.getdoc(value) or "")).replace("\n", "\n   ")
        returns = plain(inspect.signature(value).return_annotation)
        body = f".. py:function:: {path}() -> {returns}\n\n   {words}"
    return f"### {title}\n\n```{{eval-rst}}\n{body}\n```\n"


def _public(package: Any, name: str) -> Any:
    """A public name's value; the function where a package has the same name."""
    value = getattr(package, name)
    return getattr(value, name) if inspect.ismodule(value) else value


def _area(value: Any) -> str:
    package = value.__module__.split(".")[1]
    [area] = [area for area, packages in AREAS.items() if package in packages]
    return area


def _summary(value: Any) -> str:
    words = (inspect.getdoc(value) or "").split("\n\n")[0]
    return " ".join(words.split()).replace("``", "`").replace("|", "\\|")


def _without_ranges(kind: type) -> None:
    """Leaves the plain type of each field, without the range that its annotation carries for the command line."""
    for name, hint in vars(kind).get("__annotations__", {}).items():
        if typing.get_origin(hint) is typing.Annotated:
            kind.__annotations__[name] = typing.get_args(hint)[0]


def field_types(owners: Iterable[Any]) -> list[tuple[str, type]]:
    """Classes of this package that functions take and return, or that the fields and properties of classes have, by name.

    A job's parts are there, too: their fields are options of recipes.
    """
    public = set(owners)
    kinds = {kind for owner in public for hint in _hints(owner) for kind in _classes(hint)}
    if Job in kinds:
        kinds.update(kind for hint in _hints(Job) for kind in _classes(hint))
    documented = public | {getattr(systolic, name) for name in systolic.__all__}
    return sorted(((kind.__name__, kind) for kind in kinds - documented), key=lambda pair: pair[0])


def _hints(owner: Any) -> list[Any]:
    if not inspect.isclass(owner):
        return _resolved(owner)
    names = [name for name in vars(owner) if not name.startswith("_")]
    functions = [value.fget for value in map(vars(owner).get, names) if isinstance(value, property)]
    return [hint for source in (owner, *functions) for hint in _resolved(source)]


@cache
def _imported_for_checkers(module: str) -> dict[str, Any]:
    """Names of this package that a module of it imports for type checkers alone."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    imports = [
        line
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom) and str(line.module).startswith("systolic")
    ]
    return {
        alias.asname or alias.name: getattr(import_module(str(line.module)), alias.name)
        for line in imports
        for alias in line.names
    }


class _Members(type):
    """Members of a module that is not there, such as ``np.ndarray``."""

    def __getattr__(cls, name: str) -> Any:
        return cls


class _Absent(metaclass=_Members):
    """A class or a module that is imported for type checkers alone."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


def _resolved(source: Any) -> list[Any]:
    """Public annotations of a class or a function; names of other packages that are imported for type checkers alone are placeholders."""
    checked = _imported_for_checkers(source.__module__)
    absent: dict[str, Any] = {}
    while True:
        try:
            described = typing.get_type_hints(source, localns=absent)
        except NameError as error:
            absent[str(error.name)] = checked.get(error.name, _Absent)
        else:
            return [hint for name, hint in described.items() if not name.startswith("_")]


def _classes(hint: Any) -> Iterator[type]:
    ours = isinstance(hint, type) and hint.__module__.startswith("systolic.")
    if ours and not issubclass(hint, SystolicError):
        yield hint
    for argument in typing.get_args(hint):
        yield from _classes(argument)


def errors() -> list[tuple[str, type]]:
    """Errors that a user can cause or fix, the base class first."""
    kinds = [
        value
        for value in vars(errors_module).values()
        if isinstance(value, type) and issubclass(value, SystolicError)
    ]
    return [(kind.__name__, kind) for kind in kinds if kind is not SystolicError]


def _path(value: type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _sentence(verb: Any) -> str:
    text = verb.summary
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def escape(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escapes stars and underscores at the end of words outside of literals: docstrings are help texts, too.

    A field's docstring is all description: without the colon in front, what stands before its first one would be a type.
    """
    if what in ("attribute", "property") and lines:
        lines[0] = f": {lines[0]}"
    for at, line in enumerate(lines):
        parts = LITERAL.split(line)
        lines[at] = "".join(
            part if part.startswith(("`", ":")) else SPECIAL.sub(r"\\\g<0>", part) for part in parts
        )


def untyped(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Puts a colon before the first line of a field and of ``Returns:``: what stands before a colon there is a type to napoleon."""
    if what in ("attribute", "data", "property"):
        places = [at for at, line in enumerate(lines[:1]) if line]
    else:
        places = [at + 1 for at, line in enumerate(lines[:-1]) if line.strip() in RESULTS]
    for at in places:
        words = lines[at].lstrip()
        if not words.startswith(": "):
            lines[at] = f"{lines[at].removesuffix(words)}: {words}"


def signature(
    app: Any, what: str, name: str, value: Any, options: Any, text: str, returns: str
) -> tuple[str, str] | None:
    """A signature without the ranges and words that its annotations carry for the command line, its defaults as a caller writes them."""
    if what not in ("function", "method", "class") or not callable(value):
        return None
    if isinstance(value, enum.EnumType):
        return None
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    fresh = _factories(value)
    parameters = [
        parameter.replace(
            annotation=_shown(parameter.annotation, plain),
            default=_shown(fresh.get(parameter.name, parameter.default), worded),
        )
        for parameter in found.parameters.values()
        if not (what == "method" and parameter.name == "self")
    ]
    shown = str(found.replace(parameters=parameters, return_annotation=found.empty))
    result = "" if found.return_annotation is found.empty else plain(found.return_annotation)
    return shown, "" if what == "class" else result


def _factories(value: Any) -> dict[str, Any]:
    """Defaults that a dataclass makes anew for each instance."""
    if not (inspect.isclass(value) and dataclasses.is_dataclass(value)):
        return {}
    return {
        field.name: field.default_factory()
        for field in dataclasses.fields(value)
        if field.default_factory is not dataclasses.MISSING
    }


def _shown(value: Any, words: Callable[[Any], str]) -> Any:
    return value if value is inspect.Parameter.empty else _Shown(words(value))


def worded(default: Any) -> str:
    """A default as a caller writes it: a choice by its word, settings that are all at their defaults without them."""
    if isinstance(default, enum.Enum):
        return repr(default.value)
    if isinstance(default, types.MappingProxyType):
        return repr(dict(default))
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        try:
            is_plain = type(default)() == default
        except TypeError:
            is_plain = False
        return f"{type(default).__name__}()" if is_plain else repr(default)
    return repr(default)


class _Shown:
    """An annotation that prints as its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def plain(hint: Any) -> str:
    """A type as a reader writes it."""
    if typing.get_origin(hint) is typing.Annotated:
        return plain(typing.get_args(hint)[0])
    if isinstance(hint, str):
        return hint.strip("'\"")
    if isinstance(hint, typing.ForwardRef):
        return hint.__forward_arg__
    if hint is type(None) or hint is None:
        return "None"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(plain, arguments))
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin is not None and arguments:
        name = (
            qualified(origin)
            if isinstance(origin, type) and origin.__module__ != "builtins"
            else origin.__name__
        )
        inner = ", ".join(
            "..." if each is ... else plain(each)
            for each in arguments
            if not isinstance(each, list)
        )
        return f"{name}[{inner}]"
    if isinstance(hint, type) and hint.__module__ != "builtins":
        return qualified(hint)
    return getattr(hint, "__name__", str(hint))


def qualified(kind: type) -> str:
    """The name under which a class is documented; pages show its last part alone."""
    if getattr(systolic, kind.__name__, None) is kind and kind.__name__ in systolic.__all__:
        return f"systolic.{kind.__name__}"
    return f"{kind.__module__.removesuffix('._local')}.{kind.__qualname__}"


def link(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Leads a class's short name, or the module that defines a public one, to the one object that has this name."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rsplit(".", 1)[-1]
    objects = env.domains["py"].objects
    matches = {entry.node_id: entry for path, entry in objects.items() if path.endswith(f".{name}")}
    matches = {
        place: entry
        for place, entry in matches.items()
        if entry.objtype in ("class", "exception", "function")
    }
    if len(matches) != 1:
        return None
    [(place, entry)] = matches.items()
    address = app.builder.get_relative_uri(node.get("refdoc", ""), entry.docname)
    return nodes.reference("", "", content, internal=True, refuri=f"{address}#{place}")


def dash(app: Any, tree: Any) -> None:
    """Sets a dash between a parameter or an error and its description, where Sphinx writes two hyphens."""
    for text in [*tree.findall(nodes.Text)]:
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", write)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", escape, priority=100)
    app.connect("autodoc-process-docstring", untyped, priority=101)
    app.connect("missing-reference", link)
    app.connect("doctree-read", dash)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
