"""Measures of a tree, to compare two commits: ``python -m tests.house.measure [TREE] [--json]``.

``TREE`` is a checkout's folder, by default this one: of another commit, that of ``git worktree add ../before COMMIT``.
"""

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from tests.house.budget import ROOT, functions, layers, python_files

LONG_FUNCTION = 40
LONG_FILE = 300


def measures(root: Path) -> dict[str, Any]:
    """Files and lines by package, and the package's functions and files beyond the marks, longest first.

    Lines are those of Python files, with blank ones and comments.
    """
    package = root / "src"
    files, long = {}, {}
    for path in python_files(root):
        if not path.is_relative_to(package):
            continue
        name = path.relative_to(package / "systolic").as_posix()
        text = path.read_text()
        files[name] = text.count("\n")
        for function, node in functions(ast.parse(text)):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > LONG_FUNCTION:
                long[f"{name}:{function}"] = size
    sizes = layers(root)
    return {
        "packages": {
            name: {"files": count, "lines": lines} for name, (count, lines) in sorted(sizes.items())
        },
        "source": {
            "files": len(files),
            "lines": sum(files.values()),
        },
        "functions": _longest(long, LONG_FUNCTION),
        "files": _longest(files, LONG_FILE),
    }


def _longest(sizes: dict[str, int], limit: int) -> dict[str, int]:
    return dict(sorted((item for item in sizes.items() if item[1] > limit), key=lambda i: -i[1]))


def text(found: dict[str, Any]) -> str:
    """Measures as lines to read."""
    lines = [
        f"{name:<12} {size['files']:>4} files {size['lines']:>7,} lines"
        for name, size in found["packages"].items()
    ]
    lines.append(
        f"{'src':<12} {found['source']['files']:>4} files {found['source']['lines']:>7,} lines"
    )
    for what, limit in (("functions", LONG_FUNCTION), ("files", LONG_FILE)):
        lines += ["", f"{len(found[what])} {what} of the package over {limit} lines"]
        lines += [f"{size:>6} {name}" for name, size in found[what].items()]
    return "\n".join(lines)


def main() -> None:
    """Prints the measures of a tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, help="folder of a checkout")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measures(asked.tree.resolve())
    print(json.dumps(found, indent=1) if asked.json else text(found))


if __name__ == "__main__":
    main()
