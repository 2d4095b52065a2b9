"""``systolic.export_model``: a run or a Bundle as a folder that another library opens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.bundle import check_free, draft
from systolic.artifact.run import JOB
from systolic.core.errors import OptionError
from systolic.core.units import si
from systolic.data.text.text_data import TextData
from systolic.interop.exporting import Outgoing, outgoing, outgoing_model
from systolic.interop.source import OTHER_FILES, TEXT_FILES, known_source, most_common, open_source
from systolic.models.families import CONFIG
from systolic.session.trained import open_model

FORMATS = ("hf",)
"""Formats of an export: ``hf`` is a folder of Hugging Face transformers."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written."""

    path: Path
    kind: str
    """``model_type`` of its config.json."""
    parameters: int
    """Elements of all tensors."""
    bytes: int
    """Of the tensors."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "model_type": self.kind,
            "parameters": self.parameters,
            "bytes": self.bytes,
        }


def export_model(
    path: Path | str,
    out: Path | str,
    *,
    to: str = "hf",
    checkpoint: str | int = "best",
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Writes a run, a Bundle or another model in files for another library: config.json, safetensors, tokenizer.

    Args:
        path: The run's directory, or the model.
        out: The new folder.
        to: ``hf``, what transformers opens.
        checkpoint: Of a run: ``best``, ``last`` or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later.
        say: Called with each stage.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field.
        TakenError: there is something at ``out``.
        RunError: the disk is full, or the run can't be opened; nothing is left at ``out``.
    """
    if to not in FORMATS:
        raise OptionError(f"to is {to!r}; it takes {' or '.join(FORMATS)}")
    path, out = Path(path), Path(out)
    check_free(out)
    if known_source(path) and not (path / JOB).is_file():
        source = open_source(path)
        files = {name: file.read_bytes() for name, file in source.files().items()}
        return _write(outgoing(source), files, out, say)
    model = open_model(path, checkpoint, trust=trust)
    weights = model.plain_weights
    return _write(
        outgoing_model(model.job.model, weights, {}), _text_files(model.job.data), out, say
    )


def _text_files(data: Any) -> dict[str, bytes]:
    """Files of a job's tokenizer, chat template and preprocessing; a tokenizer of bytes has none."""
    if not isinstance(data, TextData) or (file := data.get_tokenizer().file()) is None:
        return {}
    beside = {name: file.parent / name for name in (*TEXT_FILES, *OTHER_FILES)}
    found = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
    return found | data.get_tokenizer().files()


def _write(
    made: Outgoing, files: dict[str, bytes], out: Path, say: Callable[[str], None]
) -> Exported:
    size = sum(spec.nbytes for spec in made.specs)
    done = 0

    def progress(written: int) -> None:
        nonlocal done
        done += written
        say(f"weights {done * 10 // size * 10} % of {si(size, 'B')}")

    config = {"dtype": most_common(made.specs), **made.config}
    with draft(out) as folder:
        folder.add(CONFIG, json.dumps(config, indent=2).encode())
        for name, content in files.items():
            folder.add(name, content)
        folder.weights(made.specs, made.pieces, progress, stem="model")
        folder.rename()
    return Exported(
        path=out,
        kind=config["model_type"],
        parameters=sum(int(np.prod(spec.shape)) for spec in made.specs),
        bytes=size,
    )
