"""``systolic.export_model``: a run or a Bundle in the format of another library."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from systolic.artifact.bundle import MANIFEST, check_free, draft
from systolic.artifact.tensors import TensorSpec
from systolic.core.arguments import with_types
from systolic.core.errors import OptionError
from systolic.data.text.tokenizer import BYTES_START
from systolic.interop.exporting import Outgoing
from systolic.interop.parity import Parity
from systolic.interop.source import most_common
from systolic.models.families import CONFIG
from systolic.serving.docker.folder import ExportedImage, ImageOptions, export_docker
from systolic.session.exporting_gguf import ExportedGguf, GgufOptions, export_gguf
from systolic.session.outgoing import checked, floats_line, in_files, leaving, origin_of, text_files
from systolic.session.trained import open_model
from systolic.session.written import written

DTYPES = ("dtype", "torch_dtype")
"""Names of the weights' dtype in a config.json, of transformers 5 and before."""
HF, PEFT, BUNDLE, GGUF, DOCKER = "hf", "peft", "bundle", "gguf", "docker"
FORMATS = (HF, PEFT, BUNDLE, GGUF, DOCKER)
"""Formats of an export: ``hf`` is a folder of Hugging Face transformers, ``peft`` a run's adapters alone, ``bundle`` a Bundle, ``gguf`` a file of llama.cpp, ``docker`` an image's build folder."""


Check = Callable[[Path, list[TensorSpec]], dict[str, Any]]
"""Compares what is in a folder, with its tensors, with its source; fields of :class:`Exported`."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written."""

    path: Path
    kind: str
    """``model_type`` of its config.json; ``bundle`` for a Bundle."""
    parameters: int
    """Elements of all tensors."""
    bytes: int
    """Of the tensors."""
    restored: tuple[str, ...] = ()
    """Dtypes of the matrices that were quantized, now floats."""
    reads_bytes: bool = False
    """Whether a token is a byte, so that no tokenizer was written."""
    parity: Parity | None = None
    """Differences between the outputs of what was written and those of its source."""
    notes: tuple[str, ...] = ()
    """Why there is no parity, and what the folder does not hold."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "model_type": self.kind,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "restored": len(self.restored),
            "parity": None if self.parity is None else self.parity.to_json(),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """The comparison, notes, and what became of quantized matrices and of bytes."""
        made = [*([self.parity.line()] if self.parity else []), *self.notes]
        made += floats_line(self.restored)
        if self.reads_bytes:
            made.append(
                f"no tokenizer is in it: the model reads bytes, a token is the value of a byte of UTF-8, and {BYTES_START} begins and ends a text"
            )
        return made


@with_types
def export_model(
    path: Path | str,
    out: Path | str,
    *,
    to: str = "hf",
    gguf: GgufOptions = GgufOptions(),  # noqa: B008
    image: ImageOptions = ImageOptions(),  # noqa: B008
    checkpoint: str | int = "best",
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Exported | ExportedGguf | ExportedImage:
    """Writes a run, a Bundle or another model in files for another library, or a run as a Bundle; adapters are merged, but for ``peft``.

    What is written is opened again and its outputs are compared with those of its source before it gets its name.

    Args:
        path: The run's directory, or the model.
        out: The new folder, or for ``gguf`` the new file.
        to: ``hf``, what transformers opens: config.json, safetensors, tokenizer; ``peft``, the adapters of a
            run alone, which PEFT opens beside the model that the run began with; ``bundle``, which this
            library opens without the run; ``gguf``, what llama.cpp
            opens: of a language model; or ``docker``, the build folder of an image that serves a Bundle.
        gguf: For ``gguf``: the precision of the matrices.
        image: For ``docker``: what the image runs on, and whether the Bundle is in it.
        checkpoint: Of a run: ``best``, ``last`` or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later.
        say: Called with each stage.

    Raises:
        OptionError: no family of transformers computes what the model does; names the field. For a Bundle:
            the path is a model in files already, or a part of the run is code of its recipe. For ``gguf``:
            no architecture of llama.cpp computes it, or there is no tokenizer that GGUF has. For ``docker``: the
            path is no Bundle.
        TakenError: there is something at ``out``.
        RunError: the disk is full, the run can't be opened, or what was written computes something else;
            nothing is left at ``out``.
    """
    if to not in FORMATS:
        raise OptionError(f"to is {to!r}; it takes {' or '.join(FORMATS)}")
    path, out = Path(path), Path(out)
    _check_used(to, gguf, image)
    if to == GGUF:
        return export_gguf(path, out, gguf, checkpoint=checkpoint, trust=trust, say=say)
    if to == DOCKER:
        return export_docker(path, out, image, say=say)
    check_free(out)
    if to == PEFT:
        from systolic.session.exporting_peft import export_peft

        return export_peft(path, out, checkpoint=checkpoint, trust=trust, say=say)
    check = partial(checked, path, checkpoint, trust=trust, say=say)
    if to == BUNDLE:
        return _bundle(path, out, checkpoint, trust, say, check)
    found = leaving(path, checkpoint, trust=trust)
    made = _write(found.made, found.files, out, say, check)
    return replace(made, restored=found.restored, reads_bytes=found.reads_bytes)


def _bundle(
    path: Path,
    out: Path,
    checkpoint: str | int,
    trust: bool,
    say: Callable[[str], None],
    check: Check,
) -> Exported:
    """A run as a Bundle; errors as :func:`export_model`."""
    if (path / MANIFEST).is_file():
        raise OptionError(f"{path} is a Bundle already; copy its folder to {out}")
    if in_files(path):
        raise OptionError(
            f"{path} is a model in files already; write it as a Bundle with systolic import {path} --out {out}"
        )
    model = open_model(path, checkpoint, trust=trust)
    from systolic.session.exporting_bundle import write_bundle

    files = text_files(model.job.data)
    specs, about = write_bundle(model, files, origin_of(model), out, say, check)
    return replace(_exported(out, BUNDLE, specs), **about)


def _check_used(to: str, gguf: GgufOptions, image: ImageOptions) -> None:
    """Refuses options that a format does not have.

    Raises:
        OptionError: one is given.
    """
    for given, of in ((gguf, GGUF), (image, DOCKER)):
        if given != type(given)() and to != of:
            names = ", ".join(
                f"{n} {v}" for n, v in vars(given).items() if v != vars(type(given)())[n]
            )
            raise OptionError(f"{names} is for --to {of} and given with --to {to}; leave it out")


def _write(
    made: Outgoing,
    files: dict[str, bytes],
    out: Path,
    say: Callable[[str], None],
    check: Check,
) -> Exported:
    stored = next((name for name in DTYPES if name in made.config), DTYPES[0])
    # What came with another dtype, such as a run's frozen weights, is said to be what it is now.
    config = {stored: None, **made.config} | {stored: most_common(made.specs)}
    with draft(out) as folder:
        folder.add(CONFIG, json.dumps(config, indent=2).encode())
        for name, content in files.items():
            folder.add(name, content)
        size = sum(spec.nbytes for spec in made.specs)
        folder.weights(made.specs, made.pieces, written(size, say), stem="model")
        about = check(folder.folder, made.specs)
        folder.rename()
    return replace(_exported(out, made.config["model_type"], made.specs), **about)


def _exported(out: Path, kind: str, specs: list[TensorSpec]) -> Exported:
    return Exported(
        path=out,
        kind=kind,
        parameters=sum(int(np.prod(spec.shape)) for spec in specs),
        bytes=sum(spec.nbytes for spec in specs),
    )
