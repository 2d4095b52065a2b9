"""Paths in buckets that Python's functions get: as ``Path``, which removes a slash, they are what they are as text."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, SystolicError
from systolic.runs.remote import mirror, store

BUCKET = "gs://buck/m"
FUNCTIONS: dict[str, dict[str, Any]] = {
    "batch": {"model": "m", "source": "x.jsonl", "out": "o.jsonl"},
    "calibrate": {"profiles": "p", "against": ["h.txt"], "name": "n", "on": "v5e-8"},
    "calibrations": {"name": "n"},
    "compare_models": {"a": "a", "b": "b", "data": Path("d.txt")},
    "evaluate": {"model": "m", "path": Path("d.txt")},
    "explain": {"target": "t", "calibration": None, "against": ""},
    "export": {"run": "r", "to": "hf", "out": "o", "inputs": (), "data": None, "python": None},
    "forecast": {"on": "v5e-8", "save": None, "csv": None, "against": None},
    "generate": {"model": "m", "file": Path("f.txt")},
    "import_model": {"source": "s", "out": "o", "base": None, "example": None, "python": None},
    "launch": {"job": "bytes", "via": "slurm", "on": "8xh100", "plan": None, "out": "o", "run": ""},
    "launch_server": {"bundle": "b", "via": "gke", "image": "foo/bar:1", "out": "o"},
    "logs": {"name": "n"},
    "open": {"path": "p"},
    "plan": {"job": "bytes", "on": "v5e-8", "out": "p.json", "calibration": None},
    "predict": {"model": "m", "files": "a.png", "out": None},
    "quantize_model": {"path": "p", "to": "int8", "out": "o", "data": None, "calibrate": None},
    "rehearse": {"job": "bytes", "on": "v5e-8", "plan": None, "executable": None},
    "replay": {"path": "p"},
    "resume": {"path": "p", "executable": None},
    "serve": {
        "models": "m",
        **dict.fromkeys(("tls_cert", "tls_key", "keys", "traffic", "save_traffic")),
    },
    "status": {"name": "n"},
    "stop": {"name": "n"},
    "train": {"job": "bytes", "run": "r", "plan": None, "init_from": None, "executable": None},
    "tune": {"recipe": "bytes", "search": None, "study": None},
    "verify_bundle": {"path": "p"},
}
"""Functions with what they need beside the path, of which nothing is there."""


def _function(name: str) -> Callable[..., Any]:
    function = getattr(systolic, name)
    return partial(function, "bytes") if name == "forecast" else function


def _cases() -> list[tuple[str, str]]:
    return [
        (name, parameter)
        for name in FUNCTIONS
        for parameter, each in inspect.signature(_function(name)).parameters.items()
        if "Path" in str(each.annotation)
    ]


def _outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        written = call(**arguments)
        if inspect.isgenerator(written):
            written = list(written)
    except SystolicError as error:
        return f"{type(error).__name__}: {error}"
    return getattr(written, "launch", written)


class NoObjects:
    """A bucket that has nothing."""

    def __init__(self, folder: store.BucketFolder) -> None:
        raise NotFoundError(f"{folder.url} is empty or does not exist; check the path")


@pytest.mark.parametrize(("name", "parameter"), _cases())
def test_a_path_in_a_bucket_is_what_its_text_is(name, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mirror, "Objects", NoObjects)
    monkeypatch.setattr("systolic.runs.run.Objects", NoObjects)
    outcomes = [
        _outcome(_function(name), {**FUNCTIONS[name], parameter: bucket})
        for bucket in (BUCKET, Path(BUCKET))
    ]
    assert outcomes[0] == outcomes[1]
    assert not (tmp_path / "gs:").exists()


@pytest.mark.parametrize("option", ["--out", "--csv", "--html", "--save"])
def test_a_result_is_not_written_into_a_bucket(option, capsys):
    assert main(["forecast", "bytes", "--on", "v5e-8", option, "gs://buck/m"]) == 2
    assert f"{option} is gs://buck/m, and results are written on this machine" in (
        capsys.readouterr().err
    )
