"""The adapters of a run as a folder that PEFT opens beside the model that the run began with."""

import json
from collections.abc import Callable
from pathlib import Path

from systolic.artifact.bundle import MANIFEST, draft
from systolic.artifact.weights import plain_parameters
from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.formats.comparison import Parity, compare
from systolic.formats.peft import BASE_NAME, STEM, known_base, open_peft, outgoing_adapters
from systolic.formats.probe import probe_of
from systolic.formats.source import ADAPTERS
from systolic.job import AdapterKind
from systolic.models.families import CONFIG
from systolic.session.exporting import PEFT, Exported
from systolic.session.outgoing import (
    TOLERANCES,
    in_files,
    no_room,
    origin_of,
    outputs_of_source,
    text_files,
)
from systolic.session.replaying import answers
from systolic.session.trained import TrainedModel, open_model
from systolic.session.written import written


def export_peft(
    path: Path,
    out: Path,
    *,
    checkpoint: str | int,
    trust: bool,
    say: Callable[[str], None],
) -> Exported:
    """Writes a run's adapters; arguments as :func:`systolic.session.exporting.export_model`.

    Raises:
        OptionError: the path has no adapters, or they stand beside a model that no family of transformers computes.
        RunError: the folder's adapters, or the outputs of the model with them, are others.
    """
    if in_files(path):
        raise OptionError(
            f"{path} is a model in files, which holds no adapters by themselves; give a run of systolic train sft --adapter lora, or --to hf for all of its weights"
        )
    model = open_model(path, checkpoint, trust=trust)
    job = model.job
    if not job.adapter:
        raise OptionError(
            f"{path} trained all weights and has no adapters; give --to hf, which writes them all"
        )
    base = known_base(job.start)
    made = outgoing_adapters(
        job.model, job.adapter, model.weights.params, origin_of(model), base or str(path)
    )
    with draft(out) as folder:
        folder.add(ADAPTERS, json.dumps(made.config, indent=2).encode())
        for name, content in text_files(job.data).items():
            folder.add(name, content)
        size = sum(spec.nbytes for spec in made.specs)
        folder.weights(
            made.specs, lambda name: iter([made.arrays[name]]), written(size, say), stem=STEM
        )
        parity, notes = _compared(folder.folder, Path(base), model, checkpoint, trust, say)
        folder.rename()
    return Exported(
        path=out,
        kind=PEFT,
        parameters=sum(array.size for array in made.arrays.values()),
        bytes=size,
        parity=parity,
        notes=(*notes, *_base_notes(Path(base))),
    )


def _compared(
    folder: Path,
    base: Path,
    model: TrainedModel,
    checkpoint: str | int,
    trust: bool,
    say: Callable[[str], None],
) -> tuple[Parity | None, list[str]]:
    """The outputs of the base with a folder's adapters against those of the run; why they were not compared."""
    try:
        source = open_peft(folder, base)
    except NotFoundError as error:
        return None, [f"not compared with the run: {error}"]
    if model.job.adapter.kind is AdapterKind.qlora:
        return None, [
            f"not compared with the run, whose frozen matrices are rounded to 4 bits (nf4): beside those of {base} as they are, outputs differ by that rounding; load the base in 4 bits (nf4) to have them"
        ]
    if (why := no_room(plain_parameters(model.setup.steps))) is not None:
        return None, [why]
    say("comparing")
    probe = probe_of(source)
    ours, _ = answers(source, probe.ours)
    theirs = outputs_of_source(model.path, checkpoint, trust, probe.ours)
    dtype = {"float32": "f32"}.get(source.dtype, "bf16")
    found = compare(ours, theirs, "the run", TOLERANCES[dtype], probe)
    if not found.passed:
        raise RunError(
            f"the adapters written of {model.path} compute something else: {found.line()}; please report it, nothing was kept"
        )
    return found, []


def _base_notes(base: Path) -> list[str]:
    """What PEFT needs beside the folder."""
    if (base / CONFIG).is_file():
        return []
    what = "a Bundle" if (base / MANIFEST).is_file() else "no folder of transformers"
    return [
        f"its base, {base}, is {what}, which PEFT does not open: write it with systolic export {base} --to hf --out DIR, and give that folder to PEFT or as {BASE_NAME} in {ADAPTERS}"
    ]
