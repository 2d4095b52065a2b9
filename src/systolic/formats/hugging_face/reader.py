"""Folders of Hugging Face: config.json, safetensors in one file or in shards, tokenizer.

Parity of an imported model with transformers: both compute the same rows in float32, transformers in a process of its own.

``python -m systolic.formats.hugging_face.reader`` reads one JSON object from stdin: ``path`` of the model, ``inputs``
(an .npz of arguments by name), ``loader`` (class of transformers), ``outputs`` (fields of its answer), ``rounded`` (dtype
that weights are rounded to, or null), ``texts`` for its tokenizer, and ``out``, the .npz to write.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from systolic.core.errors import DataError, NotFoundError, RunError, SystolicError
from systolic.core.files import refuse_pointer
from systolic.core.machine import end_with
from systolic.formats.comparison import (
    EXACT,
    PASSAGE,
    PROBES,
    Parity,
    ParityInputs,
    compare,
    probe_of,
)
from systolic.formats.jobs import job_of
from systolic.formats.registry import GGUF, STATE_DICTS, is_ctranslate2
from systolic.formats.source import COPIES, Source, TransformersSource, gguf_inside, open_source
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.families.fields import refuse_quantized
from systolic.models.encoder.config import Encoder
from systolic.models.families import CONFIG, family, notes_of, read_config
from systolic.models.mapping import Conversion, Rule, Tensor, Tensors
from systolic.runs.bundle.tensors import MappedTensor, read_header

One = TypeVar("One", bound=Tensor)

WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)
"""Parts of names of modules that DataParallel, torch.compile, FSDP, activation checkpoints and Lightning wrap others in."""

ANCHORS = 3
"""Tensors by whose names a prefix is looked for."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
)
"""Weights in formats that are not read, with pickles among them."""
PACKED = ("gpt_oss",)
"""Families that read weights in a format of blocks with scales, and refuse others themselves."""
SHARD = re.compile(r"model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
"""Name of a part of the weights."""
PICKLES = re.compile(
    r"(pytorch_model|model|consolidated|flax_model|tf_model).*\.(bin|pth|pt|ckpt|msgpack|h5)"
)
"""Names of weights in other formats, in one file or in parts."""
LICENCE = re.compile(r"\A---\n(?:.*\n)*?license: *[\"']?([\w.+-]+)", re.MULTILINE)
"""Licence in the front matter of a model card."""
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


def as_expected(tensors: Mapping[str, One], conversion: Conversion) -> dict[str, One]:
    """Tensors under the names that a conversion reads, where files have them with a wrapper's parts or another prefix.

    transformers opens such folders: saved by AutoModel (``layers.0…`` for ``model.layers.0…``), as a part of a
    larger model (``model.language_model.…``), or with the embedding under the name of the last matrix that it is
    tied to. Unknown names stay as they are, for the conversion's check to name.
    """
    wanted = _wanted(conversion.rules)
    if wanted <= set(tensors):
        return dict(tensors)
    unwrapped = {_unwrapped(name): tensor for name, tensor in tensors.items()}
    if len(unwrapped) < len(tensors):
        unwrapped = dict(tensors)
    best = max(
        (
            _renamed(unwrapped, old, new, wanted)
            for old, new in {("", ""), *_prefixes(unwrapped, wanted)}
        ),
        key=lambda renamed: len(wanted & set(renamed)),
    )
    # The embedding of tied weights that a file has as the last matrix alone.
    rule = next((rule for rule in conversion.rules if "embedding" in rule.ours), None)
    if rule is None or len(rule.theirs) != 1 or rule.theirs[0] in best:
        return best
    copies = (
        name
        for name in best
        if name not in wanted
        and any(name == ending or name.endswith(f".{ending}") for ending in COPIES)
    )
    if (copy := next(copies, None)) is None:
        return best
    renamed = dict(best)
    renamed[rule.theirs[0]] = renamed.pop(copy)
    return renamed


def _wanted(rules: Sequence[Rule]) -> set[str]:
    return {name for rule in rules for place in rule.places() for name in rule.names(place)}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _prefixes(tensors: Mapping[str, One], wanted: set[str]) -> Iterator[tuple[str, str]]:
    """Prefixes in files, and what stands in their place in wanted names: those of some missing tensors' longest common ends."""
    for name in sorted(wanted - set(tensors), key=lambda other: (-other.count("."), other))[
        :ANCHORS
    ]:
        parts = name.split(".")
        for cut in range(len(parts)):
            end = ".".join(parts[cut:])
            matches = [other for other in tensors if other == end or other.endswith(f".{end}")]
            if matches:
                yield from ((match.removesuffix(end), name.removesuffix(end)) for match in matches)
                break


def _renamed(tensors: Mapping[str, One], old: str, new: str, wanted: set[str]) -> dict[str, One]:
    renamed: dict[str, One] = {}
    for name, tensor in tensors.items():
        other = new + name.removeprefix(old)
        moved = name not in wanted and name.startswith(old) and other in wanted
        renamed[other if moved and other not in tensors else name] = tensor
    return renamed


def open_folder(folder: Path) -> TransformersSource:
    """A folder with config.json and weights; reads descriptions only.

    Raises:
        NotFoundError: it has no weights in safetensors, or a shard is missing.
        OptionError: its family, or a field of its config.json, is not known.
        DataError: a file is damaged, or tensors are missing or unknown.
    """
    config = read_config(folder)
    known = family(config, str(folder / CONFIG))
    stored, files = tensors_of(folder)
    settled, tensors = known.canonical(config, stored)
    model, conversion = known.model(settled), known.conversion(settled)
    if config["model_type"] not in PACKED:
        refuse_quantized(config)
    before = set(tensors)
    tensors = as_expected(tensors, conversion)
    if said := _headless(folder, tensors, conversion):
        raise DataError(said)
    conversion.check(tensors, str(folder))
    return TransformersSource(
        path=folder,
        model=model,
        config=config,
        kind="hugging-face",
        tensors=tensors,
        conversion=conversion,
        weight_files=files,
        folder=folder,
        renamed=before != set(tensors),
        licence=_licence(folder),
        notes=notes_of(settled, str(folder / CONFIG)),
    )


def tensors_of(folder: Path) -> tuple[dict[str, MappedTensor], tuple[Path, ...]]:
    """Tensors of a folder by name, and the files that hold them.

    Raises:
        NotFoundError: no safetensors there, or a shard is missing.
        DataError: a file is damaged, or lacks a tensor that the index says it has.
    """
    index = folder / INDEX
    if not index.is_file():
        if (folder / WEIGHTS).is_file():
            return read_header(folder / WEIGHTS)[0], (folder / WEIGHTS,)
        return _without_index(folder)
    refuse_pointer(index)
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index} is damaged ({error}); copy it again") from error
    names = sorted(set(wanted.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise NotFoundError(
            f"{folder} lacks {len(missing)} of {len(names)} shards, first {missing[0]}; copy the whole folder"
        )
    shards = {name: read_header(folder / name)[0] for name in names}
    gone = [name for name, file in wanted.items() if name not in shards[file]]
    if gone:
        raise DataError(
            f"{folder / wanted[gone[0]]} lacks {gone[0]}, which {index.name} says it has; copy the folder again"
        )
    tensors = {name: shards[file][name] for name, file in wanted.items()}
    return tensors, tuple(folder / name for name in names)


def _without_index(folder: Path) -> tuple[dict[str, MappedTensor], tuple[Path, ...]]:
    """Tensors of shards that no index lists.

    Raises:
        NotFoundError: there is no shard, or one is missing.
        DataError: two have the same tensor.
    """
    parts = {file: named for file in folder.iterdir() if (named := SHARD.fullmatch(file.name))}
    if not parts:
        raise NotFoundError(_no_weights(folder))
    counts = sorted({int(named["count"]) for named in parts.values()})
    names = [
        f"model-{number:05}-of-{counts[0]:05}.safetensors" for number in range(1, counts[0] + 1)
    ]
    missing = [name for name in names if not (folder / name).is_file()]
    if len(counts) > 1 or missing:
        missed = f"first {missing[0]}" if missing else f"of {' and '.join(map(str, counts))} shards"
        raise NotFoundError(
            f"{folder} has {len(parts)} shards, no {INDEX}, and lacks {len(missing)}, {missed}; copy the whole folder"
        )
    tensors: dict[str, MappedTensor] = {}
    for name in names:
        held = read_header(folder / name)[0]
        if twice := next((key for key in held if key in tensors), None):
            raise DataError(
                f"{folder / name} has {twice}, which another shard has too; copy the folder again"
            )
        tensors |= held
    return tensors, tuple(folder / name for name in names)


def _headless(folder: Path, tensors: Tensors, conversion: Conversion) -> str | None:
    """Advice on a language model that lacks only its last matrix; ``None`` for other models."""
    wanted = {
        name for rule in conversion.rules for place in rule.places() for name in rule.names(place)
    }
    missing = wanted - set(tensors)
    if not missing or not all(name.endswith(COPIES) for name in missing):
        return None
    return f"{folder} lacks {', '.join(sorted(missing))} alone, as AutoModel saves it, and its config.json says that it is not tied to the embedding; save it with AutoModelForCausalLM, or set tie_word_embeddings to true where they are one"


def _no_weights(folder: Path) -> str:
    has = f"{folder} has a {CONFIG} and no {WEIGHTS}"
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    if "adapter_model.safetensors" in names or "adapter_config.json" in names:
        return f"{folder} holds an adapter of PEFT and not the model itself; merge it into its model with PEFT's merge_and_unload, and give what save_pretrained writes then"
    pickles = [name for name in names if name in OTHER_WEIGHTS or PICKLES.fullmatch(name)]
    if pickles:
        return f"{folder} has its weights in {pickles[0]}, which is not read (it may execute code); save it with transformers' save_pretrained, which writes {WEIGHTS}"
    if unfinished := [name for name in names if name.endswith((".incomplete", ".part", ".aria2"))]:
        return f"{has}, and {unfinished[0]} is a download that has not ended; download the folder again"
    if said := gguf_inside(folder):
        return f"{has}; {said}"
    others = [name for name in names if name.endswith(".safetensors")]
    if len(others) == 1:
        return f"{has}; its weights are in {others[0]}: if they are all of the model's, rename it to {WEIGHTS}"
    if others:
        return f"{has}; its weights are in {len(others)} files such as {others[0]}, which no {INDEX} lists: copy that index too"
    return f"{has}; copy the weights too"


def _licence(folder: Path) -> str | None:
    card = folder / "README.md"
    if not card.is_file():
        return None
    match = LICENCE.search(card.read_text(errors="replace"))
    return match[1] if match else None


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
            [sys.executable, "-m", "systolic.formats.hugging_face.reader"],
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
