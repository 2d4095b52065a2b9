"""A Bundle: a portable trained model in a folder, with its weights, configuration, tokenizer and origin.

``bundle.json`` says what the model is and lists every other file with its size and SHA-256. Weights are
safetensors under the paths of our parameters. Nothing in it is executed: the model's type is one of
:data:`MODELS`, and there is no pickle.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError, TakenError
from systolic.core.files import check_folder_writable, check_room, fault_of, is_full, write_json
from systolic.core.units import with_article
from systolic.job import Model, Quantization
from systolic.runs.bundle.record import (
    DIGEST,
    FORMAT,
    KIND,
    PLAIN_FORMAT,
    AnyTensor,
    BundleHead,
    BundleRecord,
    FileRecord,
    StoredTensor,
    quantization_of,
    seal,
    sealed,
    versions,
    views,
)
from systolic.runs.bundle.tensors import SUFFIX, MappedTensor, TensorSpec, read_header, write
from systolic.runs.run import JOB

MANIFEST = "bundle.json"
"""Written last: a folder without it is no Bundle."""
SHARD_BYTES = 4 * 10**9
"""Size of a weights file; a larger tensor has a file of its own."""
WEIGHTS = "weights"
"""Stem of the names of its weights files."""
FORMATS = {WEIGHTS: "systolic", "model": "pt", "adapter_model": "pt"}
"""``format`` in the metadata of weights files by their stem; transformers opens ``pt`` only."""
RECORDED = "recorded/"
"""Folder of recorded inputs and outputs, which are no weights."""
ORIGIN = "source/config.json"
"""The config.json that the model came with."""
DRAFT = ".draft-"
"""Between the name of a folder and random letters, in the hidden name of its draft."""
HASHED_BYTES = 1 << 22
"""Bytes that are hashed at a time."""

MODELS = {
    "CNN": "systolic.models.vision.config",
    "Decoder": "systolic.models.decoder.config",
    "Encoder": "systolic.models.encoder.config",
    "MobileNetV2": "systolic.models.vision.config",
    "ExportedProgram": "systolic.formats.program.model",
    "ResNet": "systolic.models.vision.config",
    "ViT": "systolic.models.vision.config",
    "Whisper": "systolic.models.whisper.config",
}
"""Types of models to their modules; a Bundle names one of them."""
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".joblib", ".dill", ".ckpt")
"""Suffixes of files that execute code when they are read."""
PROTOCOLS = (2, 3, 4, 5)
"""Second byte of a pickle."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened Bundle; weights are mapped when they are read."""

    folder: Path
    record: BundleRecord
    model: Model
    tensors: Mapping[str, AnyTensor] = field(repr=False)
    """By the paths of our parameters; quantized ones as the floats that they stand for."""
    parts: Mapping[str, StoredTensor] = field(repr=False, default_factory=dict)
    """Codes and scales of quantized matrices by their paths."""

    @property
    def quantization(self) -> Quantization:
        """Formats of its quantized matrices."""
        return quantization_of(self.record.quantization)

    def damaged(self) -> str | None:
        """Name of the first file whose contents have changed, ``None`` if all are intact; reads everything."""
        for name, about in self.record.files.items():
            with (self.folder / name).open("rb") as opened:
                if _sha256(opened) != about.sha256:
                    return name
        return None

    def verify(self) -> None:
        """Compares the contents of all files with their digests.

        Raises:
            DataError: a file has changed.
        """
        if (name := self.damaged()) is not None:
            raise DataError(
                f"{self.folder / name} is damaged: its contents are not those that were written; copy it again, or import the model again"
            )


def model_record(model: Model) -> dict[str, Any]:
    """``type`` and fields of a model.

    Raises:
        RunError: its type is none of :data:`MODELS`.
    """
    name = type(model).__name__
    if MODELS.get(name) != type(model).__module__:
        raise RunError(
            f"{with_article(type(model).__name__)} can't be kept in a Bundle; kept are {', '.join(MODELS)}"
        )
    return {"type": name, **msgspec.to_builtins(model, enc_hook=str)}


def open_bundle(folder: Path) -> Bundle:
    """A Bundle, with the sizes of its files checked; :meth:`Bundle.damaged` compares their contents.

    Raises:
        NotFoundError: the folder is no Bundle, or a file is missing.
        DataError: it is damaged.
        RunError: it was written by a newer version.
    """
    file = folder / MANIFEST
    try:
        plain = json.loads(file.read_bytes())
    except OSError as error:
        if (folder / JOB).is_file():
            raise NotFoundError(
                f"{folder} is a run, and no Bundle; systolic export {shlex.quote(str(folder))} --to bundle writes one"
            ) from error
        raise NotFoundError(
            f"{folder} is no Bundle: {MANIFEST} can't be read ({error.strerror}); make one with systolic import"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged ({error}); import the model again") from error
    head = msgspec.convert(plain, BundleHead) if isinstance(plain, dict) else BundleHead()
    if head.kind != KIND:
        raise DataError(f"{file} was not written by systolic import; import the model again")
    if not isinstance(head.format, int) or head.format > FORMAT:
        raise RunError(
            f"{folder} is a Bundle of format {head.format}, written by Systolic {head.systolic}, and this version reads up to {FORMAT}; upgrade with pip install -U systolic"
        )
    try:
        record = msgspec.convert(plain, BundleRecord)
    except msgspec.ValidationError as error:
        raise DataError(f"{file} is damaged ({error}); import the model again") from error
    _check_files(folder, record)
    model = _model(record, file)
    tensors: dict[str, MappedTensor] = {}
    for name in record.files:
        if name.endswith(SUFFIX) and not name.startswith(RECORDED):
            tensors |= read_header(folder / name)[0]
    plain, parts = views(tensors, record.quantization, file)
    return Bundle(folder=folder, record=record, model=model, tensors=plain, parts=parts)


def _check_files(folder: Path, record: BundleRecord) -> None:
    for name, about in record.files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise DataError(f"{folder / MANIFEST} names {name}, outside its folder; don't use it")
        file = folder / name
        if not file.is_file():
            raise NotFoundError(f"{folder} lacks {name}; copy the whole folder")
        if (size := file.stat().st_size) != about.bytes:
            raise DataError(
                f"{file} has {size} bytes and had {about.bytes} when it was written; copy it again"
            )


def _model(record: BundleRecord, file: Path) -> Model:
    fields = dict(record.model)
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in MODELS:
        raise DataError(
            f"{file} holds a {name}, known are {', '.join(MODELS)}; upgrade Systolic, or import the model again"
        )
    try:
        return msgspec.convert(fields, vars(import_module(MODELS[name]))[name])
    except (msgspec.ValidationError, TypeError) as error:
        raise DataError(
            f"the model of {file} does not read in this version ({error}); import the model again"
        ) from error


def arrays(bundle: Bundle, like: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Weights with their paths, made shard by shard on the devices of their shardings when they are asked for.

    The files' digests are computed meanwhile and judged after the last.

    Args:
        bundle: The Bundle.
        like: Shape, dtype and sharding of each (``jax.ShapeDtypeStruct``); paths that the Bundle lacks are left out.

    Raises:
        DataError: a file is damaged, or a tensor has another shape than the model's.
    """
    from concurrent.futures import ThreadPoolExecutor

    import jax

    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(bundle.verify)
        for path, shape in like.items():
            tensor = bundle.parts.get(path, bundle.tensors.get(path))
            if tensor is None:
                continue
            if tensor.shape != tuple(shape.shape):
                raise DataError(
                    f"{path} in {bundle.folder} is {tensor.shape} and the model has {tuple(shape.shape)}; import the model again"
                )
            fill = partial(tensor.part, dtype=np.dtype(shape.dtype))
            yield path, jax.make_array_from_callback(shape.shape, shape.sharding, fill)
        check.result()


# Writing


class BundleDraft:
    """A Bundle being written, in a folder beside its own that becomes it when whole; made by :func:`draft`."""

    def __init__(self, folder: Path, final: Path) -> None:
        self.folder, self.final = folder, final
        self._files: dict[str, FileRecord] = {}

    def add(self, name: str, content: bytes) -> None:
        """Adds a small file."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with _written(file) as out:
            out.write(content)
        self._files[name] = out.record

    def weights(
        self,
        planned: Sequence[TensorSpec],
        pieces: Callable[[str], Iterator[np.ndarray]],
        progress: Callable[[int], None],
        stem: str = WEIGHTS,
    ) -> None:
        """Writes the weights, one piece of a tensor in memory at a time.

        Args:
            planned: All tensors.
            pieces: Consecutive pieces of a tensor's first dims, by its name; called in their order.
            progress: Called with the bytes of each tensor that was written.
            stem: Of the names of the files: ``model`` as Hugging Face has it.

        Raises:
            RunError: the disk has less room.
        """
        check_room(self.final, sum(spec.nbytes for spec in planned))
        shards = shards_of(planned)
        names = _names(stem, len(shards))

        def counted(shard: Sequence[TensorSpec]) -> Iterator[Iterator[np.ndarray]]:
            for tensor in shard:
                yield pieces(tensor.name)
                progress(tensor.nbytes)

        for name, shard in zip(names, shards, strict=True):
            with _written(self.folder / name) as out:
                write(out, shard, counted(shard), {"format": FORMATS[stem]})
            self._files[name] = out.record
        if len(shards) > 1:
            self.add(f"{stem}{SUFFIX}.index.json", index_of(names, shards))

    def rename(self) -> Path:
        """Gives the folder its name as it is, without a bundle.json."""
        os.replace(self.folder, self.final)
        return self.final

    def finish(self, **about: Any) -> Bundle:
        """Writes bundle.json and gives the folder its name.

        Args:
            about: Fields of :class:`BundleRecord`, but for kind, format, files, versions and digest.
        """
        self.describe(**about)
        os.replace(self.folder, self.final)
        return open_bundle(self.final)

    def describe(self, **about: Any) -> Bundle:
        """Writes bundle.json and opens the draft, still under its temporary name."""
        record = BundleRecord(
            kind=KIND, format=PLAIN_FORMAT, files=self._files, versions=versions(), **about
        )
        # Only a reader that knows the job prepares inputs as the run did, and codes are no weights.
        if record.job is not None or record.quantization:
            record = msgspec.structs.replace(record, format=FORMAT)
        write_json(self.folder / MANIFEST, sealed(msgspec.to_builtins(record)))
        return open_bundle(self.folder)


@contextlib.contextmanager
def draft(final: Path) -> Generator[BundleDraft]:
    """A folder beside ``final`` for its files, removed if the block fails or is interrupted.

    Raises:
        TakenError: there is something at ``final``.
        RunError: the disk is full, or the folder not writable.
    """
    check_free(final)
    scratch: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # Removes drafts of processes that were killed: no process holds them.
        for left in final.parent.glob(f".{glob.escape(final.name)}{DRAFT}*"):
            with contextlib.suppress(OSError), _held(left) as free:
                if free:
                    shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}{DRAFT}"))
        scratch.chmod(0o777 & ~_umask())
        with _held(scratch):
            yield BundleDraft(scratch, final)
    except OSError as error:
        cure = "free some space" if is_full(error) else "choose another folder"
        raise RunError(
            f"{final} could not be written ({fault_of(error)}); {cure} and start again, nothing was left there"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def write_file(final: Path, content: bytes) -> None:
    """Writes one new file, which a kill leaves whole or not at all, with a draft that the next one removes.

    Raises: as :func:`draft`.
    """
    check_room(final, len(content))
    with draft(final) as new:
        file = new.folder / final.name
        with _written(file) as out:
            out.write(content)
        os.replace(file, final)


@contextlib.contextmanager
def _held(folder: Path) -> Generator[bool]:
    """A lock on a folder that ends with the process, whatever ends it; False where another one has it, or no disk locks."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(opened)


def check_free(final: Path) -> None:
    """Refuses a folder that has something in it, can't be written, or lies in a Bundle or a run, whose files are its own.

    Raises:
        TakenError: so.
        OptionError: what is above it is a file, or its name is too long.
        RunError: its folder is not writable.
    """
    try:
        taken = final.exists() and not (final.is_dir() and not any(final.iterdir()))
    except OSError as error:  # too long a name, a folder that is not ours
        raise OptionError(
            f"{final} can't be written ({fault_of(error)}); choose another --out"
        ) from error
    if taken:
        raise TakenError(f"{final} exists; choose another --out, or remove it")
    for folder in final.resolve().parents:
        for name, kind in ((MANIFEST, "Bundle"), (JOB, "run")):
            if (folder / name).is_file():
                raise TakenError(
                    f"{final} would lie in the {kind} {folder}, whose files are its own; choose another --out"
                )
    check_folder_writable(final)


def shards_of(planned: Sequence[TensorSpec], limit: int = SHARD_BYTES) -> list[list[TensorSpec]]:
    """Tensors of each file, in order, up to ``limit`` bytes a file."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def index_of(names: Sequence[str], shards: Iterable[Sequence[TensorSpec]]) -> bytes:
    """The JSON index of numbered shards, as Hugging Face has it."""
    places = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    size = sum(t.nbytes for shard in shards for t in shard)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2).encode()


def _names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}{SUFFIX}"]
    return [f"{stem}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]


class _Hashing:
    """A binary file that hashes what is written to it."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._hash, self._size = raw, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._size += len(data)
        return self._raw.write(data)

    @property
    def record(self) -> FileRecord:
        return FileRecord(bytes=self._size, sha256=self._hash.hexdigest())


@contextlib.contextmanager
def _written(file: Path) -> Generator[Any]:
    """A new file, on the disk when the block ends."""
    with file.open("wb") as raw:
        yield _Hashing(raw)
        raw.flush()
        os.fsync(raw.fileno())


def _sha256(opened: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while part := opened.read(HASHED_BYTES):
        digest.update(part)
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def checked_bundle(folder: Path) -> Bundle:
    """A Bundle whose files are all those that were written, and no others.

    Raises:
        NotFoundError: the folder is no Bundle, or lacks a file.
        DataError: a file was changed, truncated or added, is a link out of the folder, or a pickle.
        RunError: it was written by a newer version.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise NotFoundError(f"{folder} {what}; give the folder of a Bundle, with its {MANIFEST}")
    if not (folder / MANIFEST).exists():
        return open_bundle(folder)  # says why it is none
    names = set(_files(folder))
    bundle = open_bundle(folder)
    # Compares bundle.json with its own digest, which versions that record versions write.
    file = bundle.folder / MANIFEST
    plain = json.loads(file.read_bytes())
    if (DIGEST in plain or bundle.record.versions) and plain.get(DIGEST) != seal(plain):
        raise DataError(
            f"{file} is damaged: its contents are not those that were written; copy it again"
        )
    listed = {*bundle.record.files, MANIFEST}
    if more := sorted(names - listed):
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        raise DataError(
            f"{folder} holds {more[0]}{others}, which its {MANIFEST} does not list; remove what does not belong to it, or copy the Bundle again"
        )
    for name in sorted(listed - {MANIFEST}):
        _refuse_pickle(folder / name)
    bundle.verify()
    return bundle


def _files(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, as bundle.json has them.

    Raises:
        DataError: one is a link out of the folder.
    """
    root = folder.resolve()
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(here) / name
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise DataError(
                    f"{path} is a link out of the Bundle, to {os.readlink(path)}; copy the file itself there"
                )
        for name in (
            *files,
            *(subfolder for subfolder in folders if (Path(here) / subfolder).is_symlink()),
        ):
            yield (Path(here) / name).relative_to(folder).as_posix()


def _refuse_pickle(file: Path) -> None:
    with file.open("rb") as opened:
        first = opened.read(2)
        opened.seek(max(file.stat().st_size - 1, 0))
        last = opened.read(1)
    looks = first[:1] == b"\x80" and first[1:] and first[1] in PROTOCOLS and last == b"."
    if file.suffix in PICKLES or (looks and file.suffix != SUFFIX):
        raise DataError(
            f"{file} is a pickle, which executes code when it is read, and no Bundle holds one; don't use this folder"
        )
