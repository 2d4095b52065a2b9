"""No module of ``compiling`` imports, at any depth and in any function, one that imports it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import systolic.compiling

FOLDER = Path(systolic.compiling.__file__).parent


def imported(path: Path) -> set[str]:
    """Siblings that a module names, those in functions and for type checkers included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "systolic.compiling":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "systolic.compiling."
        ):
            names.add((node.module or "").removeprefix("systolic.compiling."))
    return names


def test_there_is_no_circle() -> None:
    modules = {path.stem: imported(path) for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert {"tracing", "functions"} <= modules["compile"], "imports in functions count"
    order = list(TopologicalSorter(modules).static_order())
    assert order.index("traced") < order.index("tracing") < order.index("compile")
