"""Evaluation of a model: the task's metrics over data, answers to held-out conversations by exact match and as JSON, or tasks of lm-evaluation-harness."""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from systolic.core.errors import (
    DataError,
    NotFoundError,
    OptionError,
    RunError,
    SystolicError,
    extra,
    nearest,
)
from systolic.core.files import write_atomically
from systolic.core.ranges import COUNT, check
from systolic.core.reporter import reporter
from systolic.data.text.instructions import Instructions, asked
from systolic.job import Job, Sampling, Split
from systolic.runs.run import JOB

if TYPE_CHECKING:
    from systolic.data.text.chat import Messages
    from systolic.inference.model import TrainedModel
    from systolic.steps.step_functions import StepFunctions

EXACT, JSON = "exact", "json"
GREEDY = Sampling(temperature=0.0)
Score = Callable[..., Any]
FOLDER = "harness"
"""Folder of a model's results, a file each."""
AT_ONCE = 16
"""Requests at once: the rows that a server decodes together by default."""
MARKS = ("bos_token_id", "eos_token_id")
"""Ids with one of which a text begins."""
HOST = "127.0.0.1"
POLL_SECONDS, TIMEOUT_SECONDS = 0.2, 30.0
_OPENER = build_opener(ProxyHandler({}))  # a proxy does not know this machine's own server
_REASON = re.compile(r"^systolic: (.*?)(?: \[[\w-]+\])?$", re.MULTILINE)


class HaltedError(Exception):
    """Evaluation ended early by its ``halt``."""


def never(done: int) -> bool:
    """Never halts; the default."""
    del done
    return False


def num_batches(job: Job, steps: "StepFunctions", split: Split, examples: int = 0) -> int | None:
    """Batches of an evaluation that reads at most so many ``examples`` (0: all); ``None`` where that is unknown before reading."""
    from systolic.steps.programs import evaluation_rows

    rows, size = evaluation_rows(job, steps), job.data.size(split)
    needed = -(-examples // rows)
    if size is None:
        return needed or None
    whole = -(-size // rows)
    return min(whole, needed) if needed else whole


def reads_all(job: Job, split: Split, examples: int) -> bool:
    """Whether ``examples`` (0: all) are known to be the whole split."""
    size = job.data.size(split)
    return not examples or (size is not None and size <= examples)


def evaluate(
    job: Job,
    steps: "StepFunctions",
    program: Any,
    params: Any,
    model_state: Any,
    split: Split,
    examples: int = 0,
    halt: Callable[[int], bool] = never,
) -> dict[str, float]:
    """Means over a split, weighted exactly (by token or example), name to value.

    Args:
        job: The trained job.
        steps: Its programs.
        program: ``steps.evaluate``, jitted or compiled.
        params: Weights.
        model_state: Other variables.
        split: Part of the data to evaluate.
        examples: Number of examples to read, from the first; 0 reads all.
        halt: Called before each batch with the number of batches done; ends the evaluation on True.

    Raises:
        DataError: the split is empty.
        HaltedError: ``halt`` returned True.
    """
    import jax

    from systolic.steps.programs import evaluation

    feed = evaluation(job, steps, split, examples)
    total: Any = None
    try:
        for done, batch in enumerate(feed):
            # Waits for the batch before last: the devices keep work for one batch, and an evaluation
            # that is halted ends after that one.
            if halt(max(done - 1, 0)):
                raise HaltedError
            sums = program(params, model_state, batch)
            jax.block_until_ready(total)
            total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    finally:
        feed.close()
    if total is None:
        raise DataError(
            f"the {split.value} split of {job.name} is empty; give the recipe data for it"
        )
    return {
        name: float(mean.total) / max(float(mean.weight), 1e-9)
        for name, mean in jax.device_get(total).items()
    }


def split_of(name: Any) -> Split:
    """The split of a name, which a caller in Python may give as anything.

    Raises:
        OptionError: there is no such split.
    """
    names = [split.value for split in Split]
    if name not in names:
        raise OptionError(
            f"{name!r} is no split{nearest(str(name), names)}; give {' or '.join(names)}"
        )
    return Split(name)


def check_data(split: Split | None, path: Path | str | None) -> None:
    """Refuses a split of a run's own data beside other data.

    Raises:
        OptionError: both are given.
    """
    if path is not None and split is not None:
        raise OptionError(
            f"--split {split.value} is a part of the run's own data and --path is other data; give one of them"
        )


def splits(job: Job, chosen: Split | None) -> list[Split]:
    """The splits to evaluate: the one asked for, else all that are held out and not empty.

    Raises:
        OptionError: there is none, or the one asked for is empty.
    """
    held_out = [split for split in (Split.validation, Split.test) if job.data.size(split) != 0]
    if not held_out and job.data.size(Split.train) == 0:
        raise OptionError(f"{job.name} has no data of its own; give the data with --path")
    if chosen is None and not held_out:
        raise OptionError(
            f"{job.name} has no held-out data; choose --split train, or give the recipe data for validation"
        )
    if chosen is not None and job.data.size(chosen) == 0:
        others = " or ".join(
            split.value for split in (*held_out, Split.train) if split is not chosen
        )
        raise OptionError(f"{job.name} has no {chosen.value} data; choose --split {others}")
    return held_out if chosen is None else [chosen]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How the answers of models are scored.

    Raises:
        OptionError: a number outside its range.
    """

    metrics: tuple[str, ...] = ()
    """``exact``, ``json`` or ``FILE.py:FUNCTION``; () answers nothing."""
    conversations: Annotated[int, COUNT] = 100
    """Held-out conversations that are answered: the first so many."""
    tokens: Annotated[int, COUNT] = 256
    """Most new tokens of an answer."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerMetric:
    """A score of an answer, whose mean over the conversations is reported."""

    name: str
    score: Score
    """(answer, reference, messages before it) -> a number."""


NO_ANSWERS = AnswerOptions()
"""Scores nothing."""


def metrics_of(words: Sequence[str]) -> list[AnswerMetric]:
    """The metrics of a command line.

    Raises:
        OptionError: a word is none.
        NotFoundError: there is no such file or function.
    """
    metrics = []
    for word in dict.fromkeys(words):
        if word in OWN:
            metrics.append(OWN[word])
        elif ".py" in word:
            metrics.append(_of_file(word))
        else:
            raise OptionError(
                f"{word} is no metric; give {', '.join(OWN)}, or a function of (answer, reference) in a file of yours as FILE.py:FUNCTION"
            )
    return metrics


def check_answers(options: AnswerOptions, data: Path | None) -> None:
    """Refuses metrics before models are read.

    Raises:
        OptionError: there is no data to answer, or a word is no metric.
        NotFoundError: there is no such file or function.
    """
    if options.metrics and data is None:
        raise OptionError("metrics of answers need conversations to answer; give them with --data")
    metrics_of(options.metrics)


def scores_of(
    model: "TrainedModel",
    path: Path,
    options: AnswerOptions,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """Means of the metrics over the greedy answers to the conversations at a path, and ``answered``, their number; {} without metrics.

    The last answer of each conversation is the reference, and the model is given the turns before it.

    Raises:
        OptionError: a metric is none, or returns no number; or the data is no conversations, or the model has no chat template for them.
        NotFoundError: there is no such file.
    """
    metrics = metrics_of(options.metrics)
    if not metrics:
        return {}
    totals = dict.fromkeys((metric.name for metric in metrics), 0.0)
    pairs = _held_out(model, path)[: options.conversations]
    for number, (before, reference) in enumerate(pairs, 1):
        say(f"{model.path.name} answers {number} of {len(pairs)}")
        (answer,) = model.generate([before], tokens=options.tokens, sampling=GREEDY)
        for metric in metrics:
            totals[metric.name] += _number(metric, metric.score(answer, reference, before))
    means = {name: total / len(pairs) for name, total in totals.items()}
    return {**means, "answered": float(len(pairs))}


def _held_out(model: "TrainedModel", path: Path) -> "list[tuple[Messages, str]]":
    """The turns of each conversation before its last answer, with that answer.

    Raises:
        OptionError: there are none for this model.
    """
    from systolic.data.text.conversations import read

    data = model.job_on(path).data
    if not isinstance(data, Instructions):
        raise OptionError(
            f"{path} holds no conversations for {model.path}, or its tokenizer has no chat template, so there are no answers to score; give JSONL of messages, or leave --metric out"
        )
    pairs = []
    for line in read(data.file(Split.validation), data.reading):
        before = asked(line.messages)
        content = line.messages[len(before)].get("content")
        if before and isinstance(content, str):
            pairs.append((before, content))
    if not pairs:
        raise OptionError(f"{path} has no conversation with a question and its answer")
    return pairs


def _exact(answer: str, reference: str, _: Any) -> bool:
    return answer.strip() == reference.strip()


def _valid_json(answer: str, *_: Any) -> bool:
    try:
        json.loads(answer)
    except ValueError:
        return False
    return True


OWN: Mapping[str, AnswerMetric] = {
    EXACT: AnswerMetric(name="exact_match", score=_exact),
    JSON: AnswerMetric(name="valid_json", score=_valid_json),
}
"""Metrics by their words: the share of answers that are the reference but for spaces around, and of those that are JSON."""


def _of_file(word: str) -> AnswerMetric:
    """A user's function of (answer, reference), or of (answer, reference, messages).

    Raises:
        NotFoundError: there is no such file or function.
        OptionError: it takes other arguments.
    """
    from systolic import recipes

    path, colon, name = word.rpartition(":")
    if not colon:
        raise OptionError(f"{word} names no function; give it as {word}:FUNCTION")
    function = recipes.from_file(Path(path), name, word).function
    takes = inspect.signature(function)
    if _binds(takes, 3):
        return AnswerMetric(name=name, score=function)
    if _binds(takes, 2):
        return AnswerMetric(
            name=name, score=lambda answer, reference, _: function(answer, reference)
        )
    raise OptionError(
        f"{word} takes {takes}; a metric takes (answer, reference), or (answer, reference, messages), and returns a number"
    )


def _binds(takes: inspect.Signature, count: int) -> bool:
    try:
        takes.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _number(metric: AnswerMetric, value: Any) -> float:
    if not isinstance(value, Real):
        raise OptionError(f"the metric {metric.name} returned {value!r}; return a number or a bool")
    return float(value)


def run_harness(
    model: Path, tasks: Sequence[str], folder: Path | None, limit: int, options: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Metrics by task, kept in ``RUN/harness/TIME.json``, or beside a model that is no run in ``NAME.harness``.

    Args:
        model: A run, or a model's folder or file.
        tasks: Names of tasks, of groups, or patterns of them.
        folder: Tasks of your own, YAML files; None for the harness's alone.
        limit: Documents of each task; 0 for all.
        options: More options of ``systolic serve``.

    Raises:
        MissingExtraError: the extra ``harness`` is not installed.
        OptionError: there is no such task, or the model continues no text.
        NotFoundError: there is no such folder.
        RunError: the model can't be served, or the harness failed.
    """
    with extra("--harness", "harness"):
        import lm_eval
        from lm_eval.tasks import TaskManager
    if folder is not None and not folder.is_dir():
        raise NotFoundError(f"{folder} is no folder of tasks; give one with YAML files")
    manager = TaskManager(include_path=None if folder is None else str(folder))
    names = manager.match_tasks(list(tasks))
    for task in tasks:
        if not manager.match_tasks([task]):
            raise OptionError(
                f"the harness has no task {task}; lm-eval ls tasks lists them, and --harness-tasks is a folder of your own"
            )
    with _served(model, options) as url, _without_proxy():
        about = _tokenizer(url, model)
        start = next((about[name] for name in MARKS if about[name] is not None), None)
        arguments = {
            "base_url": f"{url}/v1/completions",
            "model": "model",
            "tokenizer_backend": "remote",
            "num_concurrent": AT_ONCE,
            "max_length": about["model_max_length"],
            **({} if start is None else {"custom_prefix_token_id": start}),
        }
        try:
            found: Any = lm_eval.simple_evaluate(
                model="local-completions",
                model_args=arguments,
                tasks=names,
                task_manager=manager,
                limit=limit or None,
                log_samples=False,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise RunError(f"the harness failed: {type(error).__name__}: {reason}") from error
    content = {key: found[key] for key in ("results", "versions", "n-samples", "configs")}
    version = {"lm_eval": lm_eval.__version__, "limit": limit, "served with": list(options)}
    _keep(model, version | content)
    return {task: _numbers(values) for task, values in found["results"].items()}


def _keep(model: Path, content: Mapping[str, Any]) -> None:
    """Writes results; a warning where that fails, since hours of work are in them."""
    folder = model / FOLDER
    if not (model / JOB).exists():  # a Bundle has the files that it lists, and no others
        folder = model.with_name(f"{model.name}.{FOLDER}")
    file = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    try:
        folder.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(content, indent=1, default=str).encode())
    except (OSError, SystolicError) as error:
        reporter().warn(f"the results are not kept in {file}: {error}")


def _tokenizer(url: str, model: Path) -> dict[str, Any]:
    """Facts that the server tells of a model's tokenizer.

    Raises:
        OptionError: it continues no text.
    """
    try:
        with _OPENER.open(f"{url}/tokenizer_info", timeout=TIMEOUT_SECONDS) as response:
            about = json.load(response)
    except HTTPError:
        about = {}
    if "model_max_length" not in about:
        raise OptionError(
            f"{model} continues no text, and the harness asks for texts; give a language model"
        )
    return about


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a task; ``acc,none`` is that without a filter."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and "," in name
    }


@contextmanager
def _without_proxy() -> Generator[None]:
    """A context in which the harness's own clients ask this machine without a proxy."""
    before = os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = ",".join(filter(None, [before, HOST]))
    try:
        yield
    finally:
        del os.environ["NO_PROXY"]
        if before is not None:
            os.environ["NO_PROXY"] = before


@contextmanager
def _served(model: Path, options: Sequence[str]) -> Generator[str]:
    """The address of a server of the model alone, on this machine, while it lasts.

    Raises:
        RunError: it ended before it was ready, with its reason.
    """
    words = ["serve", f"model={model}", "--port", "0", "--log", "json", *options]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-m", "systolic", *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        try:
            url = server.stdout.readline().partition(" ")[0]
            while server.poll() is None and not _is_ready(url):
                time.sleep(POLL_SECONDS)
            if server.poll() is not None:
                log.seek(0)
                reasons = _REASON.findall(log.read())
                raise RunError(reasons[-1] if reasons else f"the server of {model} ended early")
            yield url
        finally:
            server.terminate()


def _is_ready(url: str) -> bool:
    """Whether a server answers with every model."""
    try:
        with _OPENER.open(f"{url}/health", timeout=TIMEOUT_SECONDS) as answer:
            return answer.status == HTTPStatus.OK
    except (OSError, ValueError):
        return False
