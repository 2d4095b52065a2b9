"""Checks that the processes of a job agree: settings and data before the first step, batches during training."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from systolic.core.errors import DataError, RunError, SystolicError
from systolic.data.fingerprint import contents_of, difference
from systolic.job import Data, Split
from systolic.job.data import Contents
from systolic.training import distributed

if TYPE_CHECKING:
    from systolic.setup import Setup

EVERY = 100
"""Batches between comparisons, each of which copies this process's part of the batch to the host."""

_LONG = 80
"""Length in characters above which a message shows only the part of a value that differs."""


def require_same_job(setup: "Setup") -> None:
    """Checks before training that all processes have the same settings.

    Collective. Covers the job's fields, the compiler's flags and package versions, but not the code of a recipe file.
    Paths of the data (a ``Path``, or text that begins with ``/`` or ``~``) may differ.

    Raises:
        RunError: settings differ; names the first setting that differs, both values and the processes.
    """
    if not distributed.several():
        return
    answers = [json.loads(text) for text in distributed.exchange(json.dumps(_settings(setup)))]
    first = answers[0]
    for process, answer in enumerate(answers):
        for name in sorted(first.keys() | answer.keys()):
            # Compared as text, since NaN is not equal to itself.
            if json.dumps(first.get(name)) != json.dumps(answer.get(name)):
                mine, other = _told(first.get(name), answer.get(name))
                raise RunError(
                    f"processes 0 and {process} were given different settings: {name} is {mine} in process 0 and {other} in process {process}; start every process with the same options and versions"
                )


def _settings(setup: "Setup") -> dict[str, Any]:
    settings: dict[str, Any] = {name: version(name) for name in ("systolic", "jax", "jaxlib")}
    settings["flags"] = " ".join(setup.flags)
    plain = setup.job.to_json()
    # Data may be at different paths in each process; its contents are compared instead.
    data = msgspec.to_builtins(setup.job.data, enc_hook=_kind, order="deterministic")
    plain["data"] = {"type": type(setup.job.data).__name__, **data}
    todo: list[tuple[str, Any]] = [("", plain)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [(f"{name}.{key}".lstrip("."), part) for key, part in value.items()]
        elif name.startswith("data.") and isinstance(value, list):
            todo += [(f"{name}.{number}", part) for number, part in enumerate(value)]
            settings[f"{name}.length"] = len(value)
        elif name.startswith("data.") and isinstance(value, str) and value[:1] in ("/", "~"):
            settings[name] = "a path"
        else:
            settings[name] = value
    return settings


def _kind(value: Any) -> str:
    """Placeholder for a value without a plain form: paths, and the repr of objects, differ between machines."""
    return "a path" if isinstance(value, PurePath) else f"of {type(value).__qualname__}"


def _told(first: Any, other: Any) -> tuple[str, str]:
    """Both values as text; long ones start shortly before their first difference."""
    texts = (repr(first), repr(other))
    if max(map(len, texts)) <= _LONG:
        return texts
    pairs = enumerate(zip(*texts, strict=False))
    same = next((at for at, (mine, its) in pairs if mine != its), min(map(len, texts)))
    start = max(same - _LONG // 4, 0)
    shown = [
        ("…" if start else "")
        + text[start : start + _LONG]
        + ("…" if len(text) > start + _LONG else "")
        for text in texts
    ]
    return shown[0], shown[1]


def require_same_data(data: Data) -> None:
    """Checks before training that processes have the same data in every split.

    Collective. Covers the fingerprints of :mod:`systolic.data.fingerprint`, the tokenizer and the sizes of splits;
    data without a fingerprint is compared by batches only.

    Raises:
        DataError: the data differs (names the data, the difference and the processes), or a process can't read it.
    """
    if not distributed.several():
        return
    own: dict[str, Any] = {"error": "", "sizes": {}, "contents": {}, "encoding": []}
    try:
        own["encoding"] = data.encoding()
        own["sizes"] = {split.value: data.size(split) for split in Split}
        own["contents"] = {name: asdict(contents) for name, contents in contents_of(data).items()}
    except SystolicError as error:
        own["error"] = str(error)
    answers = [json.loads(text) for text in distributed.exchange(json.dumps(own))]
    for process, answer in enumerate(answers):
        if answer["error"]:
            raise DataError(f"{answer['error']} (in process {process})")
    first = answers[0]
    for process, answer in enumerate(answers):
        if answer["encoding"] != first["encoding"]:
            mine, other = (", ".join(each["encoding"]) or "none" for each in (first, answer))
            raise DataError(
                f"processes 0 and {process} have different tokenizers: {mine} in process 0, {other} in process {process}; give every process the same tokenizer.json and tokenizer_config.json"
            )
        for split in Split:
            name = split.value
            what = _different(first["contents"].get(name), answer["contents"].get(name))
            if what is None and first["sizes"][name] != answer["sizes"][name]:
                what = f"size {answer['sizes'][name]}, {first['sizes'][name]} in process 0"
            if what is not None:
                where = (answer["contents"].get(name) or {}).get("where", "the data")
                raise DataError(
                    f"processes 0 and {process} have different data for {name}: in process {process} {where} has {what}; give every process the same files and versions"
                )


def _different(first: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str | None:
    if first is None or other is None:
        return None if first == other else "different files"
    change = difference(Contents(**first), Contents(**other))
    return change and change.replace("before", "in process 0")


class SameBatches:
    """Compares the parts of a batch that several processes hold, in the first batch and every ``every`` batches after.

    Collective: every process checks the same batches.
    """

    def __init__(self, every: int = EVERY) -> None:
        self._every, self._seen = every, 0

    def check(self, batch: Mapping[str, Any]) -> None:
        """Checks a batch if a comparison is due.

        Raises:
            DataError: see :func:`systolic.training.distributed.require_same`.
        """
        if self._seen % self._every == 0:
            distributed.require_same(batch)
        self._seen += 1
