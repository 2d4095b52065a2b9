"""Files of a recipe's folder that it uses: modules that it imports and files that it opens, for the copies in a run.

Such imports write no bytecode, which would be code that nobody has trusted.
"""

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import FrameType
from typing import Any

from systolic.core.units import gibibytes

_folders: set[Path] = set()
_INSTALLED = frozenset(("site-packages", "dist-packages"))
KEPT_BYTES = 1 << 26
"""Limit for all files together, so that data sets are not copied into every run."""
_CODE = frozenset((".py", ".pyc", ".so"))


class Unwritten(SourceFileLoader):
    """Python's loader of source files, without its cache of bytecode beside them."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Writes nothing, which importlib allows."""


_found = FileFinder.path_hook(
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (Unwritten, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


def write_none(folder: Path) -> None:
    """From now on, modules in ``folder`` and below are imported without writing, also inside functions.

    Args:
        folder: Absolute path, as on ``sys.path``.
    """
    if not _folders:
        sys.path_hooks.insert(0, _finder)
    _folders.add(folder)
    for name in [name for name in sys.path_importer_cache if Path(name).is_relative_to(folder)]:
        del sys.path_importer_cache[name]


def _finder(name: str) -> FileFinder:
    """Finder of a folder's modules; ImportError tells importlib to ask the next one."""
    if _folders.isdisjoint((Path(name), *Path(name).parents)):
        raise ImportError(f"{name} is outside the folders of recipes")
    finder = _found(name)
    assert isinstance(finder, FileFinder)
    return finder


def modules(file: Path) -> dict[str, bytes]:
    """Modules in the folder of a Python file that it needs: relative POSIX path to content.

    Follows the ``import`` statements of the file and of the modules that it imports, also inside of
    functions. A package is included as a whole. A name loaded from elsewhere is left out.

    Args:
        file: A Python file that parses. A module that does not parse is kept and not followed.
    """
    folder = file.resolve().parent
    sources: dict[Path, bytes] = {}
    pending = [file.resolve()]
    while pending:
        path = pending.pop()
        source = sources[path] if path in sources else path.read_bytes()
        for name in sorted(_imports(source)):
            for beside in _files(folder, name):
                if beside not in sources and beside != file.resolve():
                    sources[beside] = beside.read_bytes()
                    pending.append(beside)
    return {path.relative_to(folder).as_posix(): sources[path] for path in sorted(sources)}


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


class OpenedFiles:
    """Files below a folder that code in the same folder opens, until :meth:`close`.

    Files that other code opens, such as a corpus that Systolic reads, do not count.
    """

    def __init__(self, folder: Path) -> None:
        self._prefix = str(folder) + os.sep
        self._opened: dict[str, None] = {}
        self._open = True
        if not _watching:
            _watching.append(self)
            # Audit hooks can't be removed, so there is only one.
            sys.addaudithook(_hook)
        _watching[0] = self

    def close(self) -> None:
        """Ends the watch."""
        self._open = False

    def kept(self, others: Sequence[Path]) -> tuple[dict[str, bytes], list[str]]:
        """Relative POSIX path to content, and a line for each file that is too large to keep.

        Args:
            others: Files and folders named by options, which are not copied.
        """
        contents: dict[str, bytes] = {}
        too_large: list[str] = []
        room = KEPT_BYTES
        for name in self._opened:
            path = Path(name)
            if not path.is_file() or any(path.is_relative_to(other) for other in others):
                continue
            size = path.stat().st_size
            if size > room:
                too_large.append(
                    f"the recipe reads {path} ({gibibytes(size)}), and a run copies up to {gibibytes(KEPT_BYTES)} in all; keep the file where it is"
                )
                continue
            room -= size
            contents[name.removeprefix(self._prefix).replace(os.sep, "/")] = path.read_bytes()
        return contents, too_large

    def see(self, path: Any, mode: Any) -> None:
        """Records an ``open`` of this process."""
        if not self._open or not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        if not name.startswith(self._prefix) or Path(name).suffix in _CODE:
            return
        if isinstance(mode, str) and not mode.startswith("r"):
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if os.path.abspath(frame.f_code.co_filename).startswith(self._prefix):
                self._opened[name] = None
                return
            frame = frame.f_back


_watching: list[OpenedFiles] = []
"""List with the newest watch only."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _watching[0].see(arguments[0], arguments[1])
