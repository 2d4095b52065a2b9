"""Notebooks: they match the template and are valid, and one runs from first to last cell on this machine's CPU."""

import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
"""Folder of the notebooks and of the program that makes them."""
made = runpy.run_path(str(FOLDER / "make.py"))
PLACES, RUN, INSTALL = made["PLACES"], made["RUN"], made["INSTALL"]


@pytest.mark.parametrize("place", PLACES)
def test_the_notebooks_are_what_the_template_makes(place: str) -> None:
    text = (FOLDER / f"{place}.ipynb").read_text()
    assert text == made["notebook"](place), "run python examples/notebooks/make.py"
    cells = json.loads(text)["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    commands = [line for cell in cells for line in cell["source"] if line.startswith("!")]
    assert [line.split()[1] for line in commands] == ["doctor", "eval"]


@pytest.mark.parametrize("place", PLACES)
def test_the_notebooks_are_valid(place: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(FOLDER / f"{place}.ipynb", as_version=4))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_notebook_runs_to_its_end(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # Uses the commands of this environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(FOLDER / f"{place}.ipynb", as_version=4)
    notebook.cells = [one for one in notebook.cells if INSTALL not in one.metadata.get("tags", [])]
    resources: Mapping[str, Any] = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(str(out.get("text", "")) for out in cell.outputs) for cell in cells]
    shown = [
        "".join(out.data.get("text/html", "") for out in cell.outputs if "data" in out)
        for cell in cells
    ]
    assert "jax" in printed[0]
    assert all(name in shown[1] for name in made["SLICES"])
    assert (tmp_path / RUN / "report.html").is_file()
    assert "iframe srcdoc" in shown[2]
    assert "problem" in shown[3]
    assert "accuracy" in printed[-1]
