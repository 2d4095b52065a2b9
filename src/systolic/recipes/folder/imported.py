"""Python modules that a recipe imports from the folder of its file."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = frozenset(("site-packages", "dist-packages"))


def modules(file: Path) -> dict[str, bytes]:
    """Modules in the folder of a Python file that it needs: relative POSIX path to content.

    Follows the ``import`` statements of the file and of the modules that it imports, also inside of
    functions. A package is included as a whole. A name loaded from elsewhere is left out.

    Args:
        file: A Python file that parses. A module that does not parse is kept and not followed.
    """
    folder = file.resolve().parent
    found: dict[Path, bytes] = {}
    pending = [file.resolve()]
    while pending:
        path = pending.pop()
        source = found[path] if path in found else path.read_bytes()
        for name in sorted(_imports(source)):
            for beside in _files(folder, name):
                if beside not in found and beside != file.resolve():
                    found[beside] = beside.read_bytes()
                    pending.append(beside)
    return {path.relative_to(folder).as_posix(): found[path] for path in sorted(found)}


def is_beside(name: str, folder: Path) -> bool:
    """Whether a loaded module comes from ``folder`` under its own name; packages installed below it don't count."""
    module = sys.modules.get(name)
    file = None if module is None else vars(module).get("__file__")
    if file is None:
        return False
    stem = folder.resolve().joinpath(*name.split("."))
    places = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
    return Path(file).resolve() in places and not _INSTALLED & set(stem.parts)


def _imports(source: bytes) -> set[str]:
    """Dotted names that a source imports; ``from a import b`` may mean the module ``a.b``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _files(folder: Path, name: str) -> Iterator[Path]:
    """The files that importing a dotted name reads from ``folder``, in Python's order: package, module, plain folder."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or _elsewhere(parts[0], folder):
        return
    here = folder
    for part in parts:
        if (here / part / "__init__.py").is_file():
            yield from sorted((here / part).rglob("*.py"))
            return
        if (here / f"{part}.py").is_file():
            yield here / f"{part}.py"
            return
        here = here / part
        if not here.is_dir():
            return


def _elsewhere(top: str, folder: Path) -> bool:
    """Whether a name is loaded from elsewhere than ``folder``."""
    module = sys.modules.get(top)
    if module is None or vars(module).get("__file__") is None:
        return False
    return not is_beside(top, folder)
