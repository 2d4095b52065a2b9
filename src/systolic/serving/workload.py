"""Traffic in files: what came to each model, read before buckets are chosen and saved when a server ends.

A file has a section for each model, and a section has histograms of size to how often:

    {"chat": {"prompt_tokens": {"128": 40, "900": 3}, "output_tokens": {"64": 43}}, "words": {"lengths": {"9": 20}}}
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import check_writable, write_json
from systolic.serving.batch.buckets import Recorder, Traffic
from systolic.serving.text.buckets import TextTraffic
from systolic.serving.text.request import TextOutput
from systolic.serving.text.sequence import EngineLoad, EngineWatcher, StepFacts

TEXT = {
    "prompt_tokens": "prompts",
    "output_tokens": "answers",
    "read_tokens": "reads",
    "decode_rows": "running",
}
"""Histograms of a language model, to the fields of :class:`~systolic.serving.text.buckets.TextTraffic`."""
BATCH = ("lengths", "examples")
"""Histograms of all other models, by their fields of :class:`~systolic.serving.batch.buckets.Traffic`."""
LARGEST = 2**31 - 1
"""Largest size of a histogram."""

Histograms = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTraffic:
    """The section of a model."""

    model: str
    origin: Path
    histograms: Histograms

    @property
    def text(self) -> TextTraffic:
        """For a language model.

        Raises:
            OptionError: it has no prompts and answers.
        """
        histograms = self._of(TEXT, ("prompt_tokens", "output_tokens"))
        return TextTraffic(**{TEXT[name]: histogram for name, histogram in histograms.items()})

    @property
    def batch(self) -> Traffic:
        """For any other model.

        Raises:
            OptionError: it has histograms of a language model.
        """
        return Traffic(**self._of(BATCH, ()))

    def _of(self, known: "Mapping[str, str] | tuple[str, ...]", needed: tuple[str, ...]) -> Any:
        lacking = [name for name in needed if name not in self.histograms]
        if lacking or any(name not in known for name in self.histograms):
            raise OptionError(
                f"{self.origin} has {', '.join(self.histograms)} of {self.model}, and such a model takes {', '.join(known)}"
                + (f"; add {', '.join(lacking)}" if lacking else "; leave the others out")
            )
        return dict(self.histograms)


def read_traffic(path: Path) -> dict[str, ModelTraffic]:
    """Sections of a file by model; of a saved one, or of a server's log in JSON.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is neither, or holds no request.
    """
    if not path.is_file():
        raise NotFoundError(
            f"{path} is not a file; give one that --save-traffic wrote, or a server's log"
        )
    try:
        logged = _logged(path)
        sections = _sections(json.loads(path.read_bytes()), path) if logged is None else logged
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is neither traffic in JSON nor a log of systolic serve --log json ({error})"
        ) from error
    return {
        model: ModelTraffic(model=model, origin=path, histograms=histograms)
        for model, histograms in sections.items()
    }


def _sections(fields: Any, path: Path) -> dict[str, Histograms]:
    form = 'give {"MODEL": {"lengths": {"SIZE": HOW OFTEN}}}'
    if not isinstance(fields, dict) or not fields:
        raise DataError(f"{path} has no section of a model; {form}")
    sections: dict[str, Histograms] = {}
    for model, section in fields.items():
        if not isinstance(section, dict) or not section:
            raise DataError(f"{path} has no histograms of {model!r}; {form}")
        for name in section:
            if name not in TEXT and name not in BATCH:
                known = ", ".join((*TEXT, *BATCH))
                raise DataError(f"{path} has {name!r} of {model!r}; histograms are {known}")
        sections[model] = {
            name: _histogram(value, f"{path}: {name} of {model}") for name, value in section.items()
        }
    return sections


def _histogram(counts: Any, where: str) -> dict[int, float]:
    if not isinstance(counts, dict):
        raise DataError(f'{where} is no histogram; give {{"SIZE": HOW OFTEN}}')
    histogram: dict[int, float] = {}
    for size, often in counts.items():
        if not size.isascii() or not size.isdigit() or not 1 <= int(size[:11]) <= LARGEST:
            raise DataError(f"{where} has the size {size[:40]!r}; sizes are 1 to {LARGEST}")
        if isinstance(often, bool) or not isinstance(often, int | float) or not 0 <= often < 1e15:
            raise DataError(f"{where} counts {size} {str(often)[:40]} times; counts are 0 to 1e15")
        histogram[int(size)] = histogram.get(int(size), 0.0) + often
    if not sum(histogram.values()):
        raise DataError(f"{where} counts nothing; leave it out or give counts above 0")
    return histogram


def _logged(path: Path) -> dict[str, Histograms] | None:
    """Traffic in a log; None if the file is none.

    Raises:
        DataError: it has no request with tokens.
    """
    sections: dict[str, dict[str, Counter[int]]] = {}
    events = 0
    for event in _events(path):
        events += 1
        prompt = event.get("prompt_tokens")
        if event["event"] != "request" or not isinstance(prompt, int) or "model" not in event:
            continue
        section = sections.setdefault(event["model"], {})
        # Of a request with several texts only the sums are known: all of them are taken as alike.
        texts = max(int(event.get("examples", 1)), 1)
        each = max(round(prompt / texts), 1)
        if "finish" not in event:
            section.setdefault("lengths", Counter())[each] += texts
            continue
        answers = texts * max(int(event.get("choices", 1)), 1)
        read = max(round((prompt - event.get("cached_tokens", 0)) / texts), 1)
        section.setdefault("prompt_tokens", Counter())[each] += texts
        section.setdefault("read_tokens", Counter())[read] += texts
        if written := event.get("completion_tokens", 0):
            section.setdefault("output_tokens", Counter())[max(round(written / answers), 1)] += (
                answers
            )
    if not events:
        return None
    if not sections:
        raise DataError(f"{path} is a log without answered texts; give one with requests")
    return {
        model: {name: {size: float(n) for size, n in counts.items()} for name, counts in of.items()}
        for model, of in sections.items()
        if "prompt_tokens" not in of or "output_tokens" in of
    }


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a log; other lines of standard error lie between them."""
    with path.open("rb") as lines:
        for line in lines:
            if b'"event"' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue  # Cut off, when the log was rotated or the server killed.
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event


class TextRecorder:
    """Histograms of what came to a language model; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {name: Counter() for name in TEXT}

    def stepped(self, rows: int) -> None:
        """Counts the texts that a step continues."""
        if rows:
            with self._lock:
                self._counts["decode_rows"][rows] += 1

    def ended(self, output: TextOutput) -> None:
        """Counts a request."""
        if not output.completion_tokens:
            return  # It was cancelled or refused before it was read.
        with self._lock:
            self._counts["prompt_tokens"][output.prompt_tokens] += 1
            self._counts["read_tokens"][max(output.prompt_tokens - output.cached_tokens, 1)] += 1
            self._counts["output_tokens"][output.completion_tokens] += 1

    def to_json(self) -> dict[str, Any]:
        """Its section; {} where nothing came."""
        with self._lock:
            if not self._counts["output_tokens"]:
                return {}
            return {name: _written(counts) for name, counts in self._counts.items() if counts}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEngine:
    """An :class:`~systolic.serving.text.sequence.EngineWatcher` that records beside another."""

    inner: EngineWatcher
    recorder: TextRecorder

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""
        self.inner.stepped(facts)
        self.recorder.stepped(facts.decode_rows)

    def ended(self, output: TextOutput, load: EngineLoad) -> None:
        """After each request."""
        self.inner.ended(output, load)
        self.recorder.ended(output)


class TrafficBook:
    """Traffic of the models of a server, whatever their versions and engines.

    Args:
        path: Where it is saved; a model without requests keeps the section that the file has.

    Raises:
        DataError: there is a file, and it is not of this kind.
        RunError: the folder is not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before: dict[str, Any] = {}
        check_writable(path)
        if path.exists():
            try:
                self._before = json.loads(path.read_bytes())
                _sections(self._before, path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} is there and holds no traffic; choose another") from error
        self._texts: dict[str, TextRecorder] = {}
        self._batches: dict[str, Recorder] = {}

    def text(self, model: str) -> TextRecorder:
        """The recorder of a language model."""
        return self._texts.setdefault(model, TextRecorder())

    def batch(self, model: str) -> Recorder:
        """The recorder of any other model."""
        return self._batches.setdefault(model, Recorder())

    def save(self) -> list[str]:
        """Replaces the file; the models that requests came to.

        Raises:
            RunError: the file can't be written.
        """
        sections = {model: recorder.to_json() for model, recorder in self._texts.items()}
        for model, recorder in self._batches.items():
            histograms = recorder.traffic.to_json().items()
            sections[model] = {name: counts for name, counts in histograms if counts}
        filled = {model: section for model, section in sections.items() if section}
        if filled:
            write_json(self.path, {**self._before, **filled})
        return list(filled)


def _written(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(size): often for size, often in sorted(counts.items())}
