"""Scripts rendered from templates: ``files/NAME.jinja`` with the values of a launch."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2


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
