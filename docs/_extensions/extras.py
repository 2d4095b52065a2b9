"""Tables of the page on installing, made from ``pyproject.toml`` before each build, where it has ``<!-- install: NAME -->``."""

import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
PAGE = "start/install"
MARK = re.compile(r"<!-- install: (\w+) -->")
FOR = {
    "tpu": "forecasts, plans and explanations on any Linux machine; training and serving on TPUs",
    "cuda": "training and serving on NVIDIA GPUs, with CUDA 12 from pip",
    "gpu-forecast": "forecasts of NVIDIA GPUs by their own compiler, on a machine without one",
    "text": "tokenizers, Parquet files, datasets folders; language models in general",
    "image": "pictures",
    "audio": "sound files, speech to text",
    "quant": "int8, int4, fp8 and nf4",
    "torch": "PyTorch modules, models of transformers, comparison with their library",
    "keras": "Keras models",
    "tf": "SavedModels of TensorFlow",
    "gguf": "GGUF files",
    "serve": "the HTTP server",
    "traces": "OpenTelemetry traces of the server",
    "harness": "`systolic eval --harness`",
    "tune": "searches by Optuna",
    "postgresql": "studies that several machines share",
    "docs": "this site",
    "dev": "tests and checks of the repository",
}
"""What each extra is for."""


def extras_table() -> str:
    """A line for each extra, with the packages that it requires."""
    extras = _project()["optional-dependencies"]
    lines = [
        f"| `{name}` | {FOR[name]} | {_names(packages) if name != 'dev' else 'all but `cuda` and `tf`, and tools'} |"
        for name, packages in extras.items()
    ]
    return "\n".join(["| extra | for | brings |", "|---|---|---|", *lines])


def versions_table() -> str:
    """Versions of Python and of the packages that every installation has."""
    project = _project()
    packages = [re.match(r"[\w.-]+", text)[0] for text in project["dependencies"]]
    lines = [f"| Python | {project['requires-python']} |"]
    lines += [
        f"| `{name}` | {text.removeprefix(name)} |"
        for name, text in zip(packages, project["dependencies"], strict=True)
    ]
    return "\n".join(["| package | version |", "|---|---|", *lines])


def _names(packages: list[str]) -> str:
    return ", ".join(f"`{text}`" for text in packages)


def _project() -> dict[str, Any]:
    return tomllib.loads(PROJECT.read_text())["project"]


TABLES = {"extras": extras_table, "versions": versions_table}


def fill(app: Any, name: str, source: list[str]) -> None:
    """Puts the tables into the page."""
    if name == PAGE:
        app.env.note_dependency(str(PROJECT), docname=name)
        source[0] = MARK.sub(lambda match: TABLES[match[1]](), source[0])


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
