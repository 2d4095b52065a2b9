"""``llms.txt``: titles, first sentences and addresses of all pages, for programs that read the site."""

from pathlib import Path
from typing import Any

from docutils import nodes


def write(app: Any, error: Exception | None) -> None:
    """Writes ``llms.txt`` beside ``index.html``."""
    if error is not None or app.builder.name != "html":
        return
    environment = app.env
    lines = [
        f"# {app.config.project}",
        "",
        "> " + _first(environment.get_doctree("index")),
        "",
        "## Pages",
        "",
    ]
    for name in sorted(environment.found_docs):
        title = environment.titles[name].astext()
        lines.append(f"- [{title}]({name}.html): {_first(environment.get_doctree(name))}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


def _first(tree: nodes.document) -> str:
    paragraph = next((each for each in tree.findall(nodes.paragraph) if not _in_table(each)), None)
    return "" if paragraph is None else " ".join(paragraph.astext().split())


def _in_table(node: nodes.Node | None) -> bool:
    while node is not None and not isinstance(node, nodes.table):
        node = node.parent
    return node is not None


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
