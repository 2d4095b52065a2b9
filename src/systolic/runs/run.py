"""The run directory: everything that a training writes, readable with a text editor.

``job.json`` holds the job, ``environment.json`` the machine, ``metrics.jsonl`` the records,
``diagnoses.jsonl`` gradients and updates by layer, ``summary.json`` the result; ``checkpoints/`` belongs to :mod:`systolic.runs.checkpoint`.
``recipe.py`` and ``modules/`` are a user's recipe with what it imports from its folder, ``tokenizer/`` is the text's.
"""

import datetime
import io
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from systolic.core.errors import NotFoundError, RunError, TakenError, nearest
from systolic.core.files import write_atomically, write_json
from systolic.runs import metrics
from systolic.runs.access import LOCK, Access, Lock
from systolic.runs.paths import DIRECTORY
from systolic.runs.remote import mirror
from systolic.runs.remote.store import Objects, in_bucket
from systolic.runs.remote.upload import Part, Sender, claim

if TYPE_CHECKING:
    import numpy as np


_VARIABLES = ("XLA_", "JAX_", "LIBTPU", "TPU_", "CUDA_VISIBLE_DEVICES", "NCCL_")
_GIT_SECONDS = 10
JOB = "job.json"
RECIPE = "recipe.py"
MODULES = "modules"
TOKENIZER = "tokenizer"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
DIAGNOSES = "diagnoses.jsonl"
SUMMARY = "summary.json"
_CHANGES_EACH_START = ("argv", "pid")
_KEPT = frozenset((RECIPE, MODULES, TOKENIZER))
"""Files written before job.json."""


def environment(devices: Sequence[str], flags: Sequence[str] = ()) -> dict[str, Any]:
    """This process's environment as JSON.

    Args:
        devices: the devices as the caller names them, e.g. ``["TPU v5 lite", ...]``.
        flags: of the compiler, given to each program.
    """
    import psutil

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": list(devices),
        "flags": list(flags),
        "packages": packages(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "git": git(),
        "argv": list(sys.argv),
        "pid": os.getpid(),
    }


@cache
def packages() -> dict[str, str]:
    """Versions of all installed packages by name; read once in a process, which may train several runs."""
    import importlib.metadata

    # Each access to an attribute parses the package's whole description again.
    known = [package.metadata for package in importlib.metadata.distributions()]
    versions = {
        str(metadata["Name"]): str(metadata["Version"]) for metadata in known if metadata["Name"]
    }
    return dict(sorted(versions.items(), key=lambda pair: pair[0].lower()))


def git() -> dict[str, Any] | None:
    """The commit of the current folder and whether files differ from it; ``None`` outside a repository."""
    if shutil.which("git") is None:
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
    )
    return result.stdout.strip()


def _never(record: metrics.Record) -> bool:
    del record
    return False


class Run:
    """One run's directory. Make it with :meth:`create` or :meth:`open`, and close it.

    Args:
        path: the directory of a run.
        access: a writer locks the directory and may append.
        part: of a run in a bucket that several hosts write.

    Raises:
        RunError: another process writes to it.
    """

    def __init__(self, path: Path, access: Access, part: Part | None = None) -> None:
        self.path = path
        self.access = access
        self.part = part
        self._lock = Lock(path) if access is Access.write else None
        self._sender: Sender | None = None
        self._metrics: metrics.Log | None = None
        self._samples: metrics.Log | None = None
        self._diagnoses: metrics.Log | None = None

    @classmethod
    def create(
        cls,
        path: Path | str | None,
        description: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] = MappingProxyType({}),
        now: datetime.datetime | None = None,
        part: Part | None = None,
    ) -> Self:
        """Creates a run: first the files that it keeps, then ``job.json``, which makes it a run.

        Args:
            path: an absent or empty directory; ``None`` makes ``runs/<job's name>-<UTC time>``.
            description: the content of ``job.json``; its ``job.name`` names the directory.
            files: path in the run to content: the recipe, its modules, the tokenizer.
            now: the time in the name, by default the present.
            part: as of the class.

        Raises:
            TakenError: the directory is not empty.
            RunError: it is not writable.
        """
        objects = None if path is None else _objects(path)
        if objects is not None and objects.names():
            raise TakenError(
                f"{objects.folder.url} is not empty; continue its run with systolic train --resume {objects.folder.url} or choose another folder"
            )
        folder = _fresh(description, now) if path is None else Path(path)
        if objects is not None:
            folder = objects.folder.copy
            shutil.rmtree(folder, ignore_errors=True)  # Of a run that the bucket has no more.
        try:
            if folder.exists() and (not folder.is_dir() or _content(folder)):
                raise TakenError(_occupied(folder))
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"{folder} could not be made ({error.strerror}); choose another folder"
            ) from error
        run = cls(folder, Access.write, part)
        if _content(folder):  # Another process was faster, and is done already.
            run.close()
            raise TakenError(_occupied(folder))
        try:
            _remove(folder)
            for name, content in files.items():
                write_atomically(run._own(name), content)
            run.write_job(description)
            if objects is not None:
                claim(folder)
        except Exception:
            _remove(folder)
            run.close()
            raise
        run._send(objects)
        return run

    @classmethod
    def open(
        cls, path: Path | str, *, access: Access = Access.read, part: Part | None = None
    ) -> Self:
        """Opens an existing run; a reader may do so while another process trains.

        With ``part``, of a run in a bucket, one that leads another copy than the writer's sends that host's part.

        Raises:
            NotFoundError: it is not a run; names the nearest one.
            RunError: a writer, and another process writes to it.
        """
        sends = access is Access.write or (part is not None and part.leads)
        objects = _objects(path) if sends else None
        if objects is None:
            folder = mirror.pull(path)
            if not (folder / JOB).is_file():
                raise NotFoundError(_not_a_run(folder))
            return cls(folder, access, part)
        folder = objects.folder.copy
        folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder, access, part)
        try:
            run._lock = run._lock or Lock(folder)
            mirror.bring(objects, sends=access is Access.write, claims=access is Access.write)
            if not (folder / JOB).is_file():
                raise NotFoundError(f"{objects.folder.url} is not a run: it has no {JOB}")
        except Exception:
            run.close()
            raise
        run._send(objects)
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(waits=kind is None)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard files."""
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        """Path of its report page."""
        return self.path / "report.html"

    @property
    def recipe(self) -> Path:
        """Copy of a user's recipe file; absent for a shipped recipe."""
        return self.path / RECIPE

    @property
    def modules(self) -> Path:
        """The folder of the modules that the recipe imports from beside its file; absent without any."""
        return self.path / MODULES

    @property
    def tokenizer(self) -> Path:
        """The folder with the copy of the text's tokenizer; absent for bytes and for other data."""
        return self.path / TOKENIZER

    def code(self) -> dict[str, bytes]:
        """The files of the run's recipe: path in the run to content; empty for a shipped recipe.

        All files among the modules count: Python also imports bytecode and shared libraries.
        """
        if not self.recipe.is_file():
            return {}
        files = [self.recipe, *sorted(path for path in self.modules.rglob("*") if path.is_file())]
        return {file.relative_to(self.path).as_posix(): file.read_bytes() for file in files}

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a record to ``metrics.jsonl``; it is in the file on return.

        Raises:
            RunError: the disk is full (the records before are intact), or the run is open for reading.
            TypeError: a value is neither JSON nor a NumPy scalar.
        """
        if self._metrics is None:
            self._metrics = metrics.Log(self._own(METRICS))
        self._metrics.append(record)

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of one kind, or all, oldest first; NaN and infinity are numbers again.

        Raises:
            RunError: a line is damaged; names it. A last line that a kill cut short is left out.
        """
        for record in metrics.read(self.path / METRICS):
            if kind is None or record.get("kind") == kind:
                yield record

    def truncate(self, step: int, again: Callable[[metrics.Record], bool] = _never) -> int:
        """Drops the records after ``step``, from which training continues, atomically.

        Starts, bad steps, skips, resumes, stops and interruptions stay at any step. Samples and
        diagnoses after the step are dropped too.

        Args:
            step: the last step to keep.
            again: which earlier records and samples will be made again.

        Returns:
            Number of records of ``metrics.jsonl`` that were dropped.
        """
        if self._metrics is None:
            self._metrics = metrics.Log(self._own(METRICS))
        if self._samples is None and (self.path / SAMPLES).exists():
            self._samples = metrics.Log(self._own(SAMPLES))
        if self._samples is not None:
            self._samples.truncate(step, lambda record: again({"kind": "sample", **record}))
        if self._diagnoses is None and (self.path / DIAGNOSES).exists():
            self._diagnoses = metrics.Log(self._own(DIAGNOSES))
        if self._diagnoses is not None:
            self._diagnoses.truncate(step, _never)
        return self._metrics.truncate(step, again)

    def append_sample(self, record: Mapping[str, Any]) -> None:
        """Adds a sample (``step``, ``prompt``, ``text``) to ``samples.jsonl``."""
        if self._samples is None:
            self._samples = metrics.Log(self._own(SAMPLES))
        self._samples.append(record)

    def samples(self) -> Iterator[dict[str, Any]]:
        """The samples, oldest first."""
        yield from metrics.read(self.path / SAMPLES)

    def append_diagnosis(self, record: Mapping[str, Any]) -> None:
        """Appends a gradient probe of a step (see :mod:`systolic.training.diagnosis`) to ``diagnoses.jsonl``."""
        if self._diagnoses is None:
            self._diagnoses = metrics.Log(self._own(DIAGNOSES))
        self._diagnoses.append(record)

    def diagnoses(self) -> Iterator[dict[str, Any]]:
        """The gradient probes, oldest first."""
        yield from metrics.read(self.path / DIAGNOSES)

    def write_job(self, description: Mapping[str, Any]) -> None:
        """Writes ``job.json``: job, layout, slice, and the path of the run."""
        where = {DIRECTORY: str(self.path.absolute())}
        write_json(self._own(JOB), {**description, **where})

    def read_job(self) -> dict[str, Any]:
        """Reads ``job.json``.

        Raises:
            RunError: the file is damaged.
        """
        return self._read(JOB, job_fields)

    def write_environment(self, devices: Sequence[str], flags: Sequence[str] = ()) -> None:
        """Writes ``environment.json``. One that an earlier start wrote and that differs is kept, numbered.

        Args:
            devices: the devices as the caller names them.
            flags: of the compiler, given to each program beside those in the environment's variables.
        """
        path = self._own(ENVIRONMENT)
        now = environment(devices, flags)
        if path.exists():
            before = path.read_text()
            if _lasting(before) != _lasting(json.dumps(now)):
                number = 1 + sum(1 for _ in self.path.glob("environment-*.json"))
                write_atomically(self.path / f"environment-{number}.json", before)
        write_json(path, now)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``; NaN and infinity as in ``metrics.jsonl``."""
        plain = json.loads(metrics.encode(summary))
        write_json(self._own(SUMMARY), plain)

    def drop_summary(self) -> None:
        """Removes the summary of a run that continues, so that it does not look finished."""
        self._own(SUMMARY).unlink(missing_ok=True)

    def read_summary(self) -> dict[str, Any]:
        """Reads ``summary.json``; its paths are those of the run's present place.

        Raises:
            NotFoundError: the run has not ended.
            RunError: the file is damaged.
        """
        if not (self.path / SUMMARY).exists():
            raise NotFoundError(
                f"{self.path} has no summary: it has not ended; continue it with --resume {shlex.quote(str(self.path))}"
            )
        return renamed(self._read(SUMMARY, metrics.decode), self.path)

    def write_bad(self, step: int, arrays: "Mapping[str, np.ndarray]") -> Path:
        """Saves the batch of a bad step as ``bad/step-<n>.npz``; returns the file."""
        import numpy as np

        path = self._own(f"bad/step-{step}.npz")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in arrays.items():
                content = io.BytesIO()
                np.lib.format.write_array(content, np.asarray(array), allow_pickle=False)
                archive.writestr(f"{name}.npy", content.getvalue())
        write_atomically(path, buffer.getvalue())
        return path

    def sync(self) -> None:
        """Has the disk hold all records, so that none is older than a checkpoint that follows."""
        for log in (self._metrics, self._samples, self._diagnoses):
            if log is not None:
                log.sync()

    def send(self) -> None:
        """Sends what is new to the run's bucket, if it has one."""
        if self._sender is not None:
            self._sender.send()

    def close(self, *, waits: bool = True) -> None:
        """Closes the files and releases the lock; ``waits`` for what other hosts send."""
        for log in (self._metrics, self._samples, self._diagnoses):
            if log is not None:
                log.close()
        sender, self._sender = self._sender, None
        try:
            if sender is not None:
                sender.close(waits=waits)
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
                self.access = Access.read

    def _send(self, objects: Objects | None) -> None:
        """Begins to send the run's files to their bucket, if they have one."""
        if objects is None:
            return
        sender = Sender(objects, part=self.part)
        try:
            sender.start()
        except Exception:
            self.close()
            raise
        self._sender = sender

    def _own(self, name: str) -> Path:
        if self.access is not Access.write:
            raise RunError(f"{self.path} is open for reading; open it with Access.write")
        return self.path / name

    def _read(self, name: str, decode: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        try:
            return decode((self.path / name).read_bytes())
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path / name} is damaged; restore it, or start again in another folder"
            ) from error


def _objects(path: Path | str) -> Objects | None:
    """Objects of a path in a bucket."""
    folder = in_bucket(path)
    return None if folder is None else Objects(folder)


def job_fields(content: bytes) -> dict[str, Any]:
    """The fields of a job.json.

    Raises:
        ValueError: it describes no job.
    """
    fields = json.loads(content)
    if not isinstance(fields, dict) or not isinstance(fields.get("job", {}), dict):
        raise ValueError("it describes no job")
    return fields


def _fresh(description: Mapping[str, Any], now: datetime.datetime | None) -> Path:
    job = description.get("job") or {}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(job.get("name") or "run")).strip("-.") or "run"
    stamp = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y%m%dT%H%M%SZ")
    folder = Path("runs") / f"{name}-{stamp}"
    number = 2
    while folder.exists():
        folder = folder.with_name(f"{name}-{stamp}-{number}")
        number += 1
    return folder


def _content(folder: Path) -> list[Path]:
    """Content of a folder, without the leftovers of a start that was killed before it wrote job.json."""
    paths = [path for path in folder.iterdir() if path.name != LOCK]
    began = (folder / LOCK).exists() and not (folder / JOB).exists()
    return [path for path in paths if not (began and _is_kept(path.name))]


def _is_kept(name: str) -> bool:
    """Whether a start writes a file of that name, complete or not."""
    return name in _KEPT or any(name.startswith(f".{kept}.") for kept in (*_KEPT, JOB))


def _remove(folder: Path) -> None:
    """Removes the leftovers that :func:`_content` leaves out."""
    for path in [path for path in folder.iterdir() if _is_kept(path.name)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def renamed(summary: dict[str, Any], path: Path) -> dict[str, Any]:
    """Summary whose commands and paths name the run's present place."""
    before, now = summary.get("run"), str(path)
    moved = dict(summary)
    if isinstance(before, str) and before != now:
        moved["run"] = now
        if isinstance(command := summary.get("next"), str):
            moved["next"] = command.replace(shlex.quote(before), shlex.quote(now), 1)
    kept = summary.get("checkpoint")
    if isinstance(kept, str) and not Path(kept).is_relative_to(path.resolve()):
        moved["checkpoint"] = str(path.absolute() / Path(kept).parent.name / Path(kept).name)
    return moved


def _occupied(folder: Path) -> str:
    if (folder / JOB).is_file():
        return f"{folder} already holds a run; continue it with systolic train --resume {shlex.quote(str(folder))} or choose another folder"
    return f"{folder} is not empty and not a run; choose another folder"


def runs_in(folder: Path) -> list[Path]:
    """Runs in a folder, or the trials of the study that it is."""
    return sorted(_runs(folder) or _runs(folder / "trials"))


def _runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if (path / JOB).is_file()]


def _is_of_model(file: Path) -> bool:
    """Whether a file is one that a Hugging Face folder has beside its config.json."""
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    return file.name in names or file.suffix == ".safetensors"


def _not_a_run(folder: Path) -> str:
    for parent in folder.absolute().parents:
        if (parent / JOB).is_file():
            return f"{folder} is not a run but a part of one; did you mean {parent}?"
    inside = runs_in(folder)
    if inside:
        newest = max(inside, key=lambda path: (path / JOB).stat().st_mtime)
        return f"{folder} is not a run but holds {len(inside)}; did you mean {newest}?"
    siblings = sorted(map(str, _runs(folder.parent)))
    close = nearest(str(folder), siblings)
    why = "has no job.json" if folder.exists() else "does not exist"
    if folder.is_dir() and (
        parts := sorted(file.name for file in folder.iterdir() if _is_of_model(file))
    ):
        return f"{folder} is neither a run (no job.json) nor a Hugging Face folder: it has {parts[0]} and no config.json; copy that file of the model, too"
    if folder.exists() and not siblings:
        return f"{folder} is neither a run (no job.json) nor a Hugging Face folder (no config.json); check the path"
    known = "" if close or not siblings else f"; there are {', '.join(siblings[:5])}"
    return f"{folder} is not a run: it {why}{close}{known}"


def _lasting(text: str) -> dict[str, Any]:
    try:
        plain = json.loads(text)
    except ValueError:
        return {}
    return {name: value for name, value in plain.items() if name not in _CHANGES_EACH_START}
