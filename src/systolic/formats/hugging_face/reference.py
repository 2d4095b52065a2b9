"""Parity of an imported model with transformers: both compute the same rows in float32, transformers in a process of its own.

``python -m systolic.formats.hugging_face.reference`` reads one JSON object from stdin: ``path`` of the model, ``inputs``
(an .npz of arguments by name), ``loader`` (class of transformers), ``outputs`` (fields of its answer), ``rounded`` (dtype
that weights are rounded to, or null), ``texts`` for its tokenizer, and ``out``, the .npz to write.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError, RunError, SystolicError
from systolic.core.machine import end_with
from systolic.formats.comparison import EXACT, Parity, compare
from systolic.formats.jobs import job_of
from systolic.formats.probe import PASSAGE, PROBES, ParityInputs, probe_of
from systolic.formats.registry import GGUF, STATE_DICTS, is_ctranslate2
from systolic.formats.source import COPIES, Source, TransformersSource, open_source
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.families import CONFIG


class Reference(NamedTuple):
    """Outputs and tokens of the other library."""

    outputs: np.ndarray
    framework: str
    words: list[tuple[list[int], str]]
    """Ids of each text, and the text of those without special tokens; [] where it has no tokenizer for them."""


def impossible(source: Source) -> str | None:
    """Why there is no parity check, and what would allow one; ``None`` where there is one."""
    if source.kind == "peft":
        return "no parity check for adapters merged here: to check, merge them with PEFT (merge_and_unload, save_pretrained) and import that folder, whose logits are compared"
    if type(source.model) not in PROBES or not isinstance(source, TransformersSource):
        return f"no parity check for a {type(source.model).__name__} from a {source.kind}"
    try:
        job_of(source, texts=False)
    except SystolicError as error:
        return f"no parity check: {error}"
    if source.kind == "gguf" and len(source.weight_files) > 1:
        return "no parity check: transformers reads no GGUF file that is split"
    needed = {
        "torch": importlib.util.find_spec("torch"),
        "transformers": importlib.util.find_spec("transformers"),
    }
    if source.kind == "gguf":
        needed["accelerate"] = importlib.util.find_spec("accelerate")
    lacking = [name for name, spec in needed.items() if spec is None]
    if lacking:
        return f"no parity check without {' and '.join(lacking)}: pip install {' '.join(lacking)}"
    wanted, free = 4 * _elements(source) * 5 // 4, _free_bytes()
    if wanted > free:
        return f"no parity check: float32 weights need {wanted / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB free"
    return None


def reference(
    source: Source,
    probe: ParityInputs,
    rounded: str | None = None,
    texts: Sequence[str] = (),
) -> "Reference":
    """Outputs float32[rows, ..., n] of transformers, computed in a process of its own, and its version.

    Args:
        source: The model.
        probe: What it reads.
        rounded: Numpy name of the dtype that its weights are rounded to before.
        texts: What its tokenizer turns into ids, and those into text.

    Raises:
        RunError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, out = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(inputs, allow_pickle=False, **probe.theirs)
        request = {
            "path": str(source.path),
            "inputs": str(inputs),
            "loader": probe.loader,
            "outputs": probe.outputs,
            "rounded": rounded,
            "texts": list(texts),
            "out": str(out),
        }
        done = subprocess.run(
            [sys.executable, "-m", "systolic.formats.hugging_face.reference"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        if done.returncode or not out.is_file():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RunError(
                f"transformers could not compute {source.path} ({lines[-1]}); import with --no-parity to leave the comparison out"
            )
        with np.load(out) as answer:
            words = json.loads(str(answer["words"]))
            return Reference(answer["found"], str(answer["framework"]), words)


def check(
    source: Source, ours: Callable[[ParityInputs], np.ndarray], *, rounded: str | None
) -> Parity:
    """Compares outputs with those of the source's own library.

    Args:
        source: What was imported, for which :func:`impossible` knows no reason.
        ours: Outputs of the imported model.
        rounded: Numpy name of the dtype that the weights were rounded to; ``None`` where they were not.
    """
    probe = probe_of(source)
    # One after the other: the memory of both is never needed at once.
    texts = _texts(source)
    theirs = reference(source, probe, rounded, texts)
    framework = theirs.framework
    if rounded is not None:
        framework = f"{framework} with weights rounded to {rounded}"
    parity = compare(ours(probe), theirs.outputs, framework, EXACT, probe)
    differs = [said for said in _differences(source, texts, theirs.words) if said]
    return replace(
        parity,
        texts=len(theirs.words),
        texts_alike=len(theirs.words) - len(differs),
        text_differs=differs[0] if differs else None,
    )


def _texts(source: Source) -> list[str]:
    """Texts for both tokenizers: prose, code, spaces, and the special tokens that the files name."""
    if source.kind != "hugging-face" or not isinstance(source.model, Decoder | Encoder):
        return []
    if (file := source.tokenizer) is None:
        return []
    from systolic.data.text.chat import special_tokens

    own = [text for _, text in special_tokens(file.parent)]
    return [
        PASSAGE,
        *PASSAGE.splitlines(),
        " a",
        "a\n  b ",
        *(f"x{token}y {token} z" for token in own),
    ]


def _differences(
    source: Source, texts: Sequence[str], words: Sequence[tuple[list[int], str]]
) -> Iterator[str | None]:
    """Difference of each text in words; ``None`` where both sides agree."""
    from systolic.data.text.tokenizer import Around, Tokenizer

    tokenizer = Tokenizer(path=source.tokenizer, around=Around.own)
    for text, (ids, back) in zip(texts, words, strict=False):
        (own,) = tokenizer.documents([text])
        if own.tolist() != ids:
            place = next((i for i, (a, b) in enumerate(zip(own.tolist(), ids, strict=False)) if a != b), -1)  # fmt: skip
            where = (
                "" if place < 0 else f": token {place} is {own[place]} here and {ids[place]} there"
            )
            yield f"{text[:40]!r} has {len(own)} ids here and {len(ids)} there{where}"
        elif isinstance(source.model, Decoder) and tokenizer.decode(ids) != back:
            yield f"{text[:40]!r} comes back as {tokenizer.decode(ids)[:40]!r} here and {back[:40]!r} there"
        else:
            yield None


def _elements(source: TransformersSource) -> int:
    return sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in source.tensors.values())


def _free_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


DROPPED = (
    "rope_scaling",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "layer_types",
    "final_logit_softcapping",
)
"""Fields of our configuration of a GGUF file that transformers' reader of such files leaves at their defaults."""

UNREAD = ("num_batches_tracked", "proj_out.weight")
"""Ends of names that files may lack: a counter that nothing reads, and logits tied to the embedding."""


def opened(path: Path, loader: Any, rounded: str | None = None) -> Any:
    """The model in float32, its weights rounded to another dtype before where one is given; its own code, if it has any, is not executed."""
    import torch

    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == GGUF:
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        place["config"] = whole_config(path)
    if path.suffix in STATE_DICTS or is_ctranslate2(path) or has_other_names(path):
        model = renamed(path, loader)
    else:
        model = loader.from_pretrained(**place, dtype=torch.float32, trust_remote_code=False)
    if rounded is not None:
        # What files hold: tables of wavelengths, which are computed, stay as they are.
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(getattr(torch, rounded)))
    return model


def whole_config(path: Path) -> Any:
    """The configuration that transformers reads from a GGUF file, with the fields that it leaves out (5.23)."""
    import transformers

    read = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    fields = open_source(path).config
    more = {name: fields[name] for name in DROPPED if fields.get(name) is not None}
    if not more:
        return read
    config = read.to_dict() | more
    if "layer_types" in more:
        config.pop("sliding_window_pattern", None)
    return transformers.AutoConfig.for_model(config.pop("model_type"), **config)


def has_other_names(path: Path) -> bool:
    """Whether a folder has its tensors under names that transformers may not know."""
    if not (path / CONFIG).is_file():
        return False
    source = open_source(path)
    return isinstance(source, TransformersSource) and source.renamed


def renamed(path: Path, loader: Any) -> Any:
    """A model whose file has the names of another library, with the same tensors under those of transformers.

    Raises:
        DataError: tensors are missing or unknown.
    """
    import torch
    import transformers

    source = open_source(path)
    assert isinstance(source, TransformersSource)
    fields = dict(source.config)
    kind = fields.pop("model_type")
    model = loader.from_config(transformers.AutoConfig.for_model(kind, **fields))
    weights = {
        name: torch.from_numpy(np.array(tensor.read(), np.float32))
        for name, tensor in source.tensors.items()
    }
    lacking, unknown = model.load_state_dict(weights, strict=False)
    unread = (*UNREAD, *COPIES) if fields.get("tie_word_embeddings", True) else UNREAD
    wrong = [*unknown, *(name for name in lacking if not name.endswith(unread))]
    if wrong:
        raise DataError(
            f"{path} and transformers' {kind} do not both have {wrong[0]}; report it with the file"
        )
    model.tie_weights()
    return model


def compute(model: Any, inputs: dict[str, np.ndarray], outputs: list[str]) -> np.ndarray:
    """Outputs float32[rows, ..., n]; several are joined, one position after another."""
    import torch

    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    with torch.no_grad():
        answer = model.eval()(**tensors)
    arrays = [answer[name].float().numpy() for name in outputs]
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(
        [array.reshape(len(array), -1, array.shape[-1]) for array in arrays], axis=1
    )


def words(path: Path, texts: list[str]) -> list[tuple[list[int], str]]:
    """Ids of texts with the special tokens around them, and the texts of those ids without; [] where transformers has no tokenizer for a folder."""
    if not texts:
        return []
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        encoded = [tokenizer(text, padding=False, truncation=False)["input_ids"] for text in texts]
        return [(ids, tokenizer.decode(ids, skip_special_tokens=True)) for ids in encoded]
    except (
        Exception
    ):  # Classes that need other packages or files; the outputs are compared all the same.
        return []


def main() -> None:
    """Computes what stdin asks for."""
    end_with(os.getppid())
    import transformers

    request = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    model = opened(
        Path(request["path"]), getattr(transformers, request["loader"]), request["rounded"]
    )
    with np.load(request["inputs"]) as inputs:
        outputs = compute(model, dict(inputs), request["outputs"])
    np.savez(
        request["out"],
        found=outputs,
        framework=f"transformers {transformers.__version__}",
        words=json.dumps(words(Path(request["path"]), request["texts"])),
    )


if __name__ == "__main__":
    main()
