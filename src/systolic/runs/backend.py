"""Orbax: asynchronous saves with retention, and loads, imported only when a checkpoint is touched.

Its log messages around a failed save are suppressed, since the run reports it in one line.
"""

import base64
import dataclasses
import datetime
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CoroutineType, TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from systolic.job import Mode
from systolic.runs import tree
from systolic.runs.manifest import DamagedError
from systolic.runs.remote.upload import Part

_ORBAX = f"{os.sep}orbax{os.sep}"
_UNSTARTED = "coroutine 'async_serialize"
_installed = False
EXTRA = "_extra"
"""Item for values that are no arrays: one file per process."""
CHANGES_AT_COMMIT = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that Orbax writes after the manifest, in the same commit; a restore reads neither."""
_SCRATCH = ".orbax-checkpoint-tmp"


def hush() -> None:
    """Suppresses messages of Orbax and its event loops about saves for the rest of the process.

    When a disk fills up, every array of a checkpoint fails. Orbax raises the first failure and closes
    its event loop. The other failures are logged as unretrieved task exceptions when they are
    collected, hit the closed loop in TensorStore's threads, or are coroutines that were never awaited.
    """
    global _installed
    if _installed:
        return
    _installed = True
    logging.getLogger("absl").addFilter(_progress)
    logging.getLogger("asyncio").addFilter(_failures)
    warnings.filterwarnings("ignore", message=_UNSTARTED, category=RuntimeWarning)
    before = sys.unraisablehook

    def hook(report: "sys.UnraisableHookArgs") -> None:
        if not _of_a_closed_loop(report):
            before(report)

    sys.unraisablehook = hook


def _of_a_closed_loop(report: "sys.UnraisableHookArgs") -> bool:
    error = report.exc_value
    if isinstance(error, RuntimeWarning):  # If warnings are errors.
        return isinstance(report.object, CoroutineType) and _ORBAX in (
            report.object.cr_code.co_filename
        )
    return isinstance(error, RuntimeError) and "loop is closed" in str(error)


def _progress(record: logging.LogRecord) -> bool:
    """Log filter that drops Orbax's messages: failures surface as one error, and the run reports progress."""
    return _ORBAX not in record.pathname


def _failures(record: logging.LogRecord) -> bool:
    """Log filter that drops asyncio's messages about Orbax tasks."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if ".orbax-checkpoint-tmp" in str(error):  # TensorStore's failures have no traceback.
        return False
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None:
        if _ORBAX in trace.tb_frame.f_code.co_filename:
            return False
        trace = trace.tb_next
    return True


def is_first() -> bool:
    """Whether this is the first or only process of its job."""
    return jax.process_index() == 0


hush()


def scratch_folders(folder: Path) -> list[Path]:
    """Folders of saves that never committed."""
    return [path for path in folder.glob(f"*{_SCRATCH}*") if path.is_dir()]


def scratch_folder(folder: Path, step: int) -> Path:
    """Folder of the save that is about to commit.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in scratch_folders(folder):
        if path.name.split(_SCRATCH)[0] == str(step):
            return path
    raise FileNotFoundError(f"no uncommitted checkpoint of step {step} in {folder}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints to keep when a new one is committed."""

    keep_last: int
    keep_best: int
    mode: Mode


@dataclasses.dataclass(kw_only=True, slots=True)
class _Info:
    step: int
    metrics: dict[str, Any] | None
    time: datetime.datetime


class _Keep(policies.PreservationPolicy):
    """Orbax's newest-N and best-N together, with metrics from the manifests.

    Orbax would read metrics from its own files and fail to open a folder where one is damaged.
    """

    def __init__(self, retention: Retention, score: Callable[[int], float | None]) -> None:
        self._score = score
        parts: list[policies.PreservationPolicy] = [policies.LatestN(n=retention.keep_last)]
        if retention.keep_best:
            parts.append(
                policies.BestN(
                    get_metric_fn=lambda metrics: metrics["score"],
                    reverse=retention.mode is Mode.min,
                    n=retention.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._any = policies.AnyPreservationPolicy(parts)

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
        """One answer per checkpoint, oldest first."""
        infos = []
        for info in checkpoints:
            score = self._score(info.step)
            metrics = None if score is None else {"score": score}
            infos.append(_Info(step=info.step, metrics=metrics, time=info.time))
        return self._any.should_preserve(infos, context=context)


class _ExtraHandler(ocp.CheckpointHandler):
    """Bytes and JSON of each process, as text that a person can read."""

    def save(self, directory: Any, args: "_ExtraSave") -> None:
        """Writes this process's file."""
        plain = {
            name: {"base64": base64.b64encode(value).decode()}
            if isinstance(value, bytes)
            else {"json": value}
            for name, value in args.extra.items()
        }
        (Path(directory) / f"process_{jax.process_index()}.json").write_text(json.dumps(plain))

    def restore(self, directory: Any, args: Any = None) -> list[dict[str, Any]]:
        """Reads the files of all processes, in their order."""
        paths = Path(directory).glob("process_*.json")
        return [
            {
                name: base64.b64decode(value["base64"]) if "base64" in value else value["json"]
                for name, value in json.loads(path.read_text()).items()
            }
            for path in sorted(paths, key=lambda path: int(path.stem.rpartition("_")[2]))
        ]


@ocp.args.register_with_handler(_ExtraHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _ExtraSave(ocp.args.CheckpointArgs):
    extra: Mapping[str, Any]


class Saver:
    """Writes the checkpoints of one folder, one at a time, in the background."""

    def __init__(
        self,
        folder: Path,
        *,
        retention: Retention,
        score: Callable[[int], float | None],
        before_commit: Callable[[], None],
        part: Part | None = None,
    ) -> None:
        self.folder = folder
        several = _processes(part)
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Keep(retention, score),
                save_decision_policy=None,
                lightweight_initialize=True,
                save_root_metadata=False,
                create=part is None,
                multiprocessing_options=several,
                async_options=ocp.AsyncOptions(
                    # Its signals do not tell one copy's folders from another's.
                    create_directories_asynchronously=part is None,
                    # Runs after the last array is on disk and before the rename that commits.
                    post_finalization_callback=before_commit,
                    timeout_secs=24 * 3600,
                ),
            ),
            handler_registry=_registry(part, several),
        )

    def save(
        self, step: int, table: Mapping[tuple[str, ...], Any], extra: Mapping[str, Any]
    ) -> None:
        """Copies the arrays off the devices and starts writing; returns before the disk is done."""
        items: dict[str, Any] = {
            name: ocp.args.PyTreeSave(tree.nest(leaves, tree.to_data))
            for name, leaves in _by_item(table).items()
        }
        items[EXTRA] = _ExtraSave(extra)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def saving(self) -> bool:
        """Whether a save is in progress."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Blocks until the save is committed; raises its error."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and frees the threads."""
        self._manager.close()


class _PartHandler(ocp.PyTreeCheckpointHandler):
    """Leaves the processes' databases as they are; those of all copies are merged in the bucket."""

    def finalize(self, directory: Any) -> None:
        """Merges nothing."""
        del directory


def _processes(part: Part | None) -> ocp.options.MultiprocessingOptions:
    """Processes that write one folder."""
    if part is None:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=part.leader,
        active_processes={*part.members},
        barrier_sync_key_prefix=f"copy-{part.leader}",
    )


def _registry(part: Part | None, several: ocp.options.MultiprocessingOptions) -> Any:
    registry = ocp.handlers.create_default_handler_registry()
    registry.add(EXTRA, _ExtraSave, _ExtraHandler())
    if part is not None:
        # Without files that Orbax's own of this process would have its first process begin.
        arrays = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler())
        )
        handler = _PartHandler(multiprocessing_options=several, type_handler_registry=arrays)
        registry.add(None, ocp.args.PyTreeSave, handler)
    return registry


def load(folder: Path, wanted: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Reads arrays of a committed checkpoint straight into their shardings.

    Args:
        folder: the checkpoint.
        wanted: abstract leaves by path; whole items.

    Raises:
        DamagedError: a file disappeared while reading.
    """
    arrays = {path: _empty(leaf) for path, leaf in wanted.items() if not leaf.size}
    for name, leaves in _by_item(wanted).items():
        abstract = tree.nest(leaves, tree.abstract_data)
        arguments = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                dtype=leaf.dtype,
                sharding=leaf.sharding,
                global_shape=leaf.shape,
            ),
            abstract,
        )
        try:
            with ocp.PyTreeCheckpointer() as reader:
                data = reader.restore(
                    folder / name,
                    args=ocp.args.PyTreeRestore(item=abstract, restore_args=arguments),
                )
        except FileNotFoundError as error:
            raise DamagedError(f"{name} is missing") from error
        for path, leaf in leaves.items():
            arrays[path] = tree.from_data(tree.pick(data, path), leaf)
    return arrays


def _by_item(table: Mapping[tuple[str, ...], Any]) -> dict[str, dict[tuple[str, ...], Any]]:
    """Leaves of each item, without empty arrays, which Orbax does not write."""
    grouped: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, leaf in table.items():
        if leaf.size:
            grouped.setdefault(tree.item(path), {})[path] = leaf
    return grouped


def _empty(leaf: Any) -> jax.Array:
    data = tree.abstract_data(leaf)
    array = jax.make_array_from_callback(
        data.shape, data.sharding, lambda index: np.zeros(data.shape, data.dtype)[index]
    )
    return tree.from_data(array, leaf)


def load_extra(folder: Path) -> list[dict[str, Any]]:
    """Values that each process saved beside the arrays, in order of the processes."""
    return _ExtraHandler().restore(folder / EXTRA)
