"""Pages that lie outside of ``docs``: results of benchmarks, CONTRIBUTING and CHANGELOG, copied into the site before each build.

Links keep the form that works in a checkout (``../benchmarks/results/NAME.md``) and lead to the copies in the site.
"""

import os
import re
from pathlib import Path
from typing import Any

FOLDER = "measurements"
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\]\(((?:\.\./)+)([\w./-]+\.md)(#[\w-]+)?\)")


def copy(app: Any) -> None:
    """Copies the pages where they have changed."""
    root, docs = Path(app.srcdir).parent, Path(app.srcdir)
    results = sorted((root / "benchmarks" / "results").glob("*.md"))
    pages = {page: docs / FOLDER / page.name for page in results}
    pages |= {root / name: docs / copy for name, copy in PAGES.items()}
    for page, place in pages.items():
        place.parent.mkdir(exist_ok=True)
        text = page.read_text()
        if not place.exists() or place.read_text() != text:
            place.write_text(text)
    names = "\n".join(page.stem for page in results)
    index = docs / FOLDER / "index.md"
    text = f"# Measurements\n\nDated results, with the commands that repeat them.\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"
    if not index.exists() or index.read_text() != text:
        index.write_text(text)


def lead(app: Any, name: str, source: list[str]) -> None:
    """Rewrites links to copied pages."""
    root = Path(app.srcdir).parent
    place = Path(app.srcdir, name).parent
    origin = (
        root
        if f"{name}.md" in PAGES.values()
        else root / "benchmarks" / "results"
        if name.startswith(FOLDER + "/")
        else place
    )

    def moved(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin / (match[1] + match[2])))
        if target.parent == root / "benchmarks" / "results":
            copy = Path(app.srcdir, FOLDER, target.name)
        elif target.parent == root and target.name in PAGES:
            copy = Path(app.srcdir, PAGES[target.name])
        else:
            return match[0]
        return f"]({os.path.relpath(copy, place)}{match[3] or ''})"

    source[0] = LINK.sub(moved, source[0])


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", copy)
    app.connect("source-read", lead)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
