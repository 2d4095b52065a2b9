"""Imports from a recipe's folder write no bytecode there: in a run, it would be code that nobody has trusted."""

import sys
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
from typing import Any


class Unwritten(SourceFileLoader):
    """Python's loader of source files, without its cache of bytecode beside them."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Writes nothing, which importlib allows."""


_found = FileFinder.path_hook(
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (Unwritten, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_folders: set[Path] = set()


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
