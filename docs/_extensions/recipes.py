"""Pages of the recipes' options, written from ``systolic train NAME --help`` before each build."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from reference import HEAD, _keep, help_of

FRAME = re.compile(r"^[╭│╰]|[│╮╯]\s*$")
GROUP = re.compile(r"^[─ ]*([\w.-]+ options|options)[─ ]*$")
OPTION = re.compile(r"^ {1,2}(-[\w-][\w.-]*.*)$")
DEFAULT = re.compile(r" ?\(default: (.*)\)$")
SWITCH = "switch"
"""Stands for the values of an option that takes none."""
SPECIAL = re.compile(r"[|<*\[\]]")


class RecipeOption(NamedTuple):
    """Option of a recipe."""

    name: str
    values: str
    default: str
    text: str


class OptionGroup(NamedTuple):
    """Options with one prefix, such as ``--layout``."""

    title: str
    text: str
    options: list[RecipeOption]


def write(app: Any) -> None:
    """Writes ``reference/recipes.md`` and ``reference/recipes/*.md`` where their text has changed."""
    from systolic import recipes

    folder, names = Path(app.srcdir) / "reference", list(recipes.shipped())
    with ThreadPoolExecutor(2) as pool:
        helps = pool.map(lambda name: help_of("train", name), names)
        for name, text in zip(names, helps, strict=True):
            _keep(folder / "recipes" / f"{name}.md", HEAD + page(name, text))
    rows = "\n".join(f"| [`{n}`](recipes/{n}.md) | {recipes.find(n).summary} |" for n in names)
    toctree = "\n".join(f"recipes/{name}" for name in names)
    _keep(
        folder / "recipes.md",
        f"{HEAD}# Recipes\n\nOptions of each recipe, with their defaults. `train`, `forecast`, `plan`, `explain` and `tune` take them, "
        f"as do recipes of your own that return a `Job`.\n\n| recipe | does |\n|---|---|\n{rows}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{toctree}\n```\n",
    )


def page(name: str, text: str) -> str:
    """A section and a table for each group of options."""
    head, found = groups(text)
    parts = [
        f"# Recipe {name}\n\n{head}\n\n`systolic train {name} --help` prints these options, "
        f"and `systolic recipes {name}` the job that they make.\n"
    ]
    for group in found:
        title = "Options" if group.title == "options" else f"--{group.title.split()[0]}"
        rows = "\n".join(
            f"| `{option.name}` | {_code(option.values)} | {_code(option.default)} | {_plain(option.text)} |"
            for option in group.options
        )
        described = f"{_plain(group.text)}\n\n" if group.text else ""
        parts.append(
            f"## {title}\n\n{described}| option | values | default | |\n|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def groups(text: str) -> tuple[str, list[OptionGroup]]:
    """The recipe's summary, and its groups of options."""
    lines = [FRAME.sub("", line).rstrip() for line in text.splitlines()]
    starts = [at for at, line in enumerate(lines) if GROUP.match(line)]
    head = " ".join(" ".join(lines[1 : starts[0]]).split())
    ends = [*starts[1:], len(lines)]
    return head, [_group(lines[start:end]) for start, end in zip(starts, ends, strict=True)]


def _group(lines: list[str]) -> OptionGroup:
    title = GROUP.match(lines[0])[1]
    lines = [line for line in lines[1:] if line.strip("─- ")]
    first = next(at for at, line in enumerate(lines) if OPTION.match(line))
    options = [option for option in _options(lines[first:]) if option.name != "-h"]
    return OptionGroup(title, " ".join(" ".join(lines[:first]).split()), options)


def _options(lines: list[str]) -> Iterator[RecipeOption]:
    blocks: list[list[str]] = []
    for line in lines:
        if OPTION.match(line):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    for first, *rest in blocks:
        name, _, values = first.strip().partition(" ")
        words = " ".join(" ".join(rest).split())
        default = DEFAULT.search(words)
        yield RecipeOption(
            name=name.rstrip(","),
            values=values.replace("{None}|", "").strip() or SWITCH,
            default={"None": "", "''": "", "False": "off", "True": "on"}.get(default[1], default[1])
            if default
            else "",
            text=DEFAULT.sub("", words),
        )


def _code(text: str) -> str:
    if text == SWITCH:
        return text
    if text.startswith("{"):
        text = text.replace(",", ", ")
    return "`" + text.replace("|", "\\|") + "`" if text else "-"


def _plain(text: str) -> str:
    return SPECIAL.sub(r"\\\g<0>", text.replace("``", "`"))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
