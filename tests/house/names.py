"""Finds public names that nothing uses, classes of one name, attributes that are asked for by luck, and private names of others."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.house.trees import nodes, statements, tree

USERS = ("src", "benchmarks", "examples", "docs", "README.md")
"""Folders and files of a project whose words count as a use; tests alone do not."""

DOCUMENTED = {"_exit", "_getframe", "_replace"}
"""Names of Python's library that are public in spite of their underscore."""

GUESTS = "systolic/capture/hook/"
"""What runs in a program's own environment: it changes the inner functions of several versions of jax, asks what a version has,
and its array has the methods of jax's. Exempt from what is said of the package's own names."""

_WORD = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(r"[a-z]\w*(\.\w+)+")
_PRIVATE = re.compile(r"_(?!_)")
_PATH = re.compile(r"[A-Za-z_][\w.:]*")
_TEMPLATE = re.compile(r"\{[{%].*?[}%]\}", re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)


def dead(root: Path) -> list[str]:
    """Public functions, methods, classes and constants of the package that nothing uses but tests, as ``path:name``.

    A function, class or constant is used where its module reads it outside of its own definition, where another module
    imports it, or as an attribute; a method as an attribute. Texts that are a name, code in Markdown and in templates, count as well.
    An ``__init__`` that hands a name on does not use it; one that reads it does.
    """
    loose: set[str] = set()
    imported: set[str] = set()
    defined: list[tuple[Path, str, str, ast.stmt]] = []
    package = root / "src"
    for path in _files(root):
        text = path.read_text(errors="replace")
        if path.suffix == ".md":
            loose.update(word for code in _CODE.findall(text) for word in _WORD.findall(code))
        if path.suffix == ".html":
            loose.update(word for code in _TEMPLATE.findall(text) for word in _WORD.findall(code))
        if path.suffix != ".py":
            continue
        loose.update(_loose(path))
        names = set(_imported(tree(path)))
        if path.name == "__init__.py":
            names &= {node.id for node in nodes(path) if isinstance(node, ast.Name)}
        imported.update(names)
        if path.is_relative_to(package) and not path.is_relative_to(package / GUESTS):
            for qualified, node in _public(tree(path)):
                defined.append((path, qualified, qualified.rpartition(".")[2], node))
    return sorted(
        f"{path.relative_to(package).as_posix()}:{qualified}"
        for path, qualified, word, node in defined
        if word not in loose
        and ("." in qualified or (word not in imported and not _read_beside(path, node, word)))
    )


def doubles(root: Path) -> dict[str, list[str]]:
    """Names of several classes of the package, and the files of each."""
    places: dict[str, list[str]] = defaultdict(list)
    package = root / "src"
    for path in sorted(package.rglob("*.py")):
        for node in statements(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(package).as_posix())
    return {name: files for name, files in places.items() if len(files) > 1}


def by_luck(root: Path) -> list[str]:
    """Calls of ``hasattr``, and of ``getattr`` with a default, in the package: ``path:function:attribute``."""
    found = []
    package = root / "src"
    for path in _own_files(package):
        text = path.read_text()
        if "hasattr" not in text and "getattr" not in text:
            continue
        for holder in statements(tree(path)):
            if not isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                continue
            for call in _own(holder):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                    continue
                if (call.func.id, len(call.args)) in (("hasattr", 2), ("getattr", 3)):
                    where = "" if isinstance(holder, ast.Module) else holder.name
                    asked = ast.unparse(call.args[1]).strip("'\"")
                    found.append(f"{path.relative_to(package).as_posix()}:{where}:{asked}")
    return sorted(found)


def intrusions(root: Path) -> list[str]:
    """Private names of other projects in the package, as ``path:name``: modules, what is imported of them, and attributes.

    Such a name has a part with a leading underscore. A module counts as well where a text names it, as for ``import_module``.
    An attribute is another's if its file defines none of the name.
    """
    found: set[str] = set()
    package = root / "src"
    for path in _own_files(package):
        named = [node for node in nodes(path) if isinstance(node, NAMING)]
        foreign = {
            name
            for node in named
            for name in _foreign(node)
            if any(_PRIVATE.match(part) for part in name.split("."))
        }
        if foreign - DOCUMENTED:
            own = {name for node in named for name in _defined(node)} | DOCUMENTED
            where = path.relative_to(package).as_posix()
            found |= {f"{where}:{name}" for name in foreign - own}
    return sorted(found)


def _own_files(package: Path) -> list[Path]:
    """Files of the package that run in its own environment."""
    return sorted(p for p in package.rglob("*.py") if not p.is_relative_to(package / GUESTS))


NAMING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Attribute),
    *(ast.Import, ast.ImportFrom, ast.Call),
)
"""Nodes with names that they define or that are another's."""


def _defined(node: ast.AST) -> list[str]:
    """Names that a node of a file defines, attributes of ``self`` among them."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return [node.attr]
    return []


def _foreign(node: ast.AST) -> list[str]:
    """Modules, imported names and attributes of a node that may be another project's."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0) if not module.startswith("systolic"):
            return [f"{module}.{alias.name}" for alias in node.names]
        case ast.Call(args=[ast.Constant(value=str(text)), *_]) if _DOTTED.fullmatch(text):
            return [text]
        case ast.Attribute():
            return [node.attr]
    return []


def missing(root: Path) -> list[str]:
    """Imports from the package, of scripts that no type checker reads, whose module or name it does not have."""
    found = []
    for file in sorted(
        path for room in ("benchmarks", "examples", "docs") for path in (root / room).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                not isinstance(node, ast.ImportFrom)
                or (node.module or "").split(".")[0] != "systolic"
            ):
                continue
            place = root.joinpath("src", *str(node.module).split("."))
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            text = module.read_text() if module.is_file() else ""
            found += [
                f"{file.relative_to(root)} imports {node.module}.{alias.name}"
                for alias in node.names
                if not re.search(rf"\b{alias.name}\b", text)
                and not (place / alias.name).is_dir()
                and not (place / f"{alias.name}.py").is_file()
            ]
    return found


def _files(root: Path) -> Iterator[Path]:
    for user in USERS:
        at = root / user
        found = [at] if at.is_file() else sorted(at.rglob("*"))
        yield from (
            path for path in found if path.suffix in (".py", ".md", ".html") and path.is_file()
        )


def _public(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Qualified names and definitions of what a module holds for others."""
    for node in tree.body:
        names: list[tuple[str, ast.stmt]] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names = [(node.name, node)]
            case ast.ClassDef():
                names = [(node.name, node)]
                if not node.name.startswith("_"):
                    names += [
                        (f"{node.name}.{part.name}", part)
                        for part in node.body
                        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                    ]
            case ast.Assign():
                found = [n for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
                names = [(name.id, node) for name in found]
            case ast.AnnAssign(target=ast.Name()):
                names = [(node.target.id, node)]
        yield from (pair for pair in names if not pair[0].rpartition(".")[2].startswith("_"))


def _read_beside(path: Path, node: ast.stmt, name: str) -> bool:
    """Whether a file reads a name outside of its definition."""
    return _read(nodes(path), name) > _read(ast.walk(node), name)


def _read(found: Iterable[ast.AST], name: str) -> int:
    """How often a name is read."""
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in found
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def _loose(path: Path) -> Iterator[str]:
    """Attributes that a module reads, and texts that are a name or a path of names."""
    skipped = {
        id(part)
        for node in statements(tree(path))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
        for part in ast.walk(node)
    }
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str):
            yield from (
                _WORD.findall(text) if id(node) not in skipped and _PATH.fullmatch(text) else ()
            )


def _own(holder: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function or module without those of functions inside."""
    todo = list(ast.iter_child_nodes(holder))
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            todo.extend(ast.iter_child_nodes(node))
