"""Pages that lie outside of ``docs``: results of benchmarks, CONTRIBUTING and CHANGELOG, copied into the site before each build.

Links keep the form that works in a checkout (``../benchmarks/results/NAME.md``) and lead to the copies in the site; those to
files that the site has not become the file's path.
"""

import os
import re
from pathlib import Path
from typing import Any

FOLDER = "measurements"
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\]\[]+)\]\((?!https?:|mailto:|#)([\w./-]+)(#[\w-]+)?\)")
UNSEARCHED = "---\nnosearch: true\n---\n\n"
"""Start of pages whose words would rank above those of the guides."""
CODE = re.compile(r"(```.*?```)", re.DOTALL)


def copy(app: Any) -> None:
    """Copies the pages where they have changed."""
    root, docs = Path(app.srcdir).parent, Path(app.srcdir)
    results = sorted((root / "benchmarks" / "results").glob("*.md"))
    for page in results:
        text = page.read_text()
        year, month, day, *words = page.stem.split("-")
        title = f"# {' '.join(words).capitalize()}, {year}-{month}-{day}\n\n"
        title = "" if text.startswith("# ") else title
        _keep(docs / FOLDER / page.name, UNSEARCHED + title + text)
    for name, place in PAGES.items():
        _keep(docs / place, (root / name).read_text())
    names = "\n".join(page.stem for page in results)
    _keep(
        docs / FOLDER / "index.md",
        f"# Measurements\n\nDated results, with the commands that repeat them.\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n",
    )


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def lead(app: Any, name: str, source: list[str]) -> None:
    """Rewrites links to files outside of ``docs``, and those of copied pages."""
    root, docs = Path(app.srcdir).parent, Path(app.srcdir)
    place = (docs / name).parent
    origin = place
    if f"{name}.md" in PAGES.values():
        origin = root
    elif name.startswith(f"{FOLDER}/") and name != f"{FOLDER}/index":
        origin = root / "benchmarks" / "results"

    def moved(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin / match[2]))
        if target.suffix == ".md" and target.parent == root / "benchmarks" / "results":
            target = docs / FOLDER / target.name
        elif target.parent == root and target.name in PAGES:
            target = docs / PAGES[target.name]
        elif not target.is_relative_to(docs) and target.exists():
            return f"{match[1]} (`{target.relative_to(root)}`)"
        return f"[{match[1]}]({os.path.relpath(target, place)}{match[3] or ''})"

    parts = CODE.split(source[0])
    source[0] = "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("builder-inited", copy)
    app.connect("source-read", lead)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
