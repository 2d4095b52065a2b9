"""The notebooks beside this file: ``python examples/notebooks/make.py`` writes one for Colab, Kaggle and a TPU VM each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RUN = "runs/digits"
SLICES = ["v5e-1", "v6e-8"]
INSTALL = "install"
"""Tag of the cell that installs: what runs the notebook elsewhere leaves it out."""
PLACES: Mapping[str, tuple[str, str, str]] = {
    "colab": (
        "Colab",
        "Choose *Runtime*, *Change runtime type*, and a TPU. A session ends when you leave it. Keep results in a "
        "folder of Google Drive: `from google.colab import drive; drive.mount('/content/drive')` mounts it.",
        "Colab has its own JAX. If the versions differ, restart the session after this cell.",
    ),
    "kaggle": (
        "Kaggle",
        "Choose a TPU and switch the internet on under *Session options*. Files under `/kaggle/working` are kept with a version "
        "that you save.",
        "Kaggle has its own JAX. If the versions differ, restart the session after this cell.",
    ),
    "tpu_vm": (
        "a TPU VM",
        "The machines' Python is older than Systolic needs. On the machine: `python3 -m pip install uv`, `python3 -m uv venv "
        "--python 3.11 env`, `python3 -m uv pip install --python env/bin/python pip jupyterlab`, then `. env/bin/activate; jupyter lab "
        "--no-browser`, which `gcloud compute tpus tpu-vm ssh NAME --zone ZONE -- -L 8888:localhost:8888` forwards to your machine. This "
        "is for one machine; `systolic launch --via tpu-vm` trains on slices of several.",
        "The extra brings libtpu, which finds the chips.",
    ),
}
"""File to the place, how to start there, and what installing there needs."""


def cells(place: str) -> list[tuple[str, str]]:
    """Kind and text of each cell."""
    name, start, install = PLACES[place]
    return [
        (
            "markdown",
            f"# Systolic on {name}\n\nInstalls, checks the machine, forecasts, trains, shows the report. {start}",
        ),
        ("markdown", f"## Install\n\n{install} In a checkout, the cell installs the checkout."),
        (
            INSTALL,
            "from pathlib import Path\n\n"
            'package = "../.." if Path("../../pyproject.toml").exists() else "systolic"\n'
            '%pip install --quiet "{package}[tpu]"',
        ),
        (
            "markdown",
            "## Check\n\nLists the devices and the faults of the machine, each with its fix.",
        ),
        ("code", "!systolic doctor"),
        (
            "markdown",
            "## Forecast\n\nForecasts training on slices that this machine does not have. The TPU compiler runs without a TPU.",
        ),
        (
            "code",
            f'import systolic\n\nsystolic.forecast("digits", on={json.dumps(SLICES)}, quick=True)',
        ),
        (
            "markdown",
            "## Train\n\nTrains on all devices of the machine. Run the cell again to continue an interrupted run. "
            "`!systolic recipes` lists the other recipes.",
        ),
        ("code", f'systolic.train("digits", steps=200, run="{RUN}", continue_=True)'),
        ("markdown", "## Explain\n\nShows what limited the run, with settings to try."),
        ("code", f'systolic.explain("{RUN}")'),
        ("markdown", "## Use it"),
        ("code", f"!systolic eval {RUN}"),
    ]


def notebook(place: str) -> str:
    """Content of a notebook: https://nbformat.readthedocs.io/en/latest/format_description.html."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(place)):
        cell: dict[str, Any] = {
            "cell_type": "markdown" if kind == "markdown" else "code",
            "id": f"cell-{number}",
            "metadata": {"tags": [INSTALL]} if kind == INSTALL else {},
            "source": text.splitlines(keepends=True),
        }
        if kind != "markdown":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    for one in PLACES:
        (FOLDER / f"{one}.ipynb").write_text(notebook(one))
