"""``systolic generate``, ``predict``, ``eval`` and ``verify``, and their functions in Python."""

import json
import reprlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.arguments import OptionWords, Partner, command_of, explained_by
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.core.reporter import reporter, working
from systolic.job import Sampling, Split

if TYPE_CHECKING:
    from systolic.inference.model import Messages, TrainedModel
    from systolic.inference.results import GeneratedTexts, MeasuredModel, Predictions
    from systolic.inference.verification import Verified

RUN = OptionWords(Path, name="run")
WORDS = OptionWords(tuple[str, ...])
SAMPLING = Sampling()


@command_of
def generate(  # noqa: PLR0913  the options of systolic generate
    model: Annotated["TrainedModel | Path | str", RUN],
    prompts: Annotated[
        "str | Messages | Sequence[str | Messages]", OptionWords(tuple[str, ...], name="prompt")
    ] = (),
    *,
    file: Path | None = None,
    tokens: Annotated[int, COUNT] = 200,
    sampling: Annotated[Sampling, OptionWords(Sampling, flat=True)] = SAMPLING,
    stop: Annotated[str | Sequence[str], OptionWords(tuple[str, ...], repeated=True)] = (),
    seed: Annotated[int, NOT_NEGATIVE] = 0,
    chat: bool = False,
    system: str | None = None,
    schema: Annotated[Path | Mapping[str, Any] | None, OptionWords(Path | None)] = None,
    checkpoint: str | int = "best",
    trust: bool = False,
) -> "GeneratedTexts":
    """Continues prompts with a trained language model.

    Args:
        model: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        prompts: Texts to continue, one after the other; - reads one from standard input, and "" starts a new text.
        file: File of more prompts: one per line, or .jsonl with the field prompt or messages (role, content), answered as a chat; - reads standard input.
        tokens: Limit of new tokens for each prompt. A text that reaches the model's longest ends earlier, with a warning.
        sampling: Sampling of the next token.
        stop: String that ends the text and is left out of it.
        seed: Seed of the sampling; the same seed gives the same text for a prompt.
        chat: Treat each prompt as a message, in the tokenizer's chat template.
        system: System message before each prompt; implies --chat.
        schema: File with a JSON Schema that each answer follows. An answer that reaches the limit of tokens is cut off.
        checkpoint: Checkpoint of a run: best, last or the number of a step.
        trust: Execute the run's recipe even if it is another user's; its digest is remembered for later commands.

    Returns:
        The texts. The reporter's ``update`` gets each piece as it is generated: a
        :class:`~systolic.inference.results.TextPiece`.

    Raises:
        NotFoundError: there is no such model, checkpoint or file of prompts.
        OptionError: the model continues no text, a prompt is longer than it takes, a stop string is empty, or the schema cannot be followed.
        SystolicError: the model can't be opened; as :func:`systolic.open`.
    """
    from systolic.inference.model import read_prompts
    from systolic.inference.results import GeneratedTexts, Stops, TextCompletion, TextPiece

    listed = read_prompts(prompts, file)
    Stops(stop)  # refuses an empty string before the run is opened
    begun = time.perf_counter()
    arguments: dict[str, Any] = {"tokens": tokens, "sampling": sampling, "stop": stop}
    arguments |= {"seed": seed, "chat": chat, "system": system, "schema": _schema(schema)}
    texts: list[TextCompletion] = []
    with _opened(model, checkpoint, trust) as (opened, warnings), _held(opened) as show_warnings:
        # A prompt that is refused is refused before the first answer.
        streams = [opened.stream(prompt, **arguments) for prompt in listed]
        for number, (prompt, pieces) in enumerate(zip(listed, streams, strict=True)):
            start = time.perf_counter()
            is_chat = chat or system is not None or not isinstance(prompt, str)
            shown = TextPiece(number, prompt, is_chat)
            reporter().update(replace(shown, begins=True))
            text = ""
            for piece in pieces:
                text += piece
                reporter().update(replace(shown, text=piece))
            reporter().update(replace(shown, ends=True))
            seconds = time.perf_counter() - start
            texts.append(
                TextCompletion(prompt=prompt, text=text, finish=pieces.finish, seconds=seconds)
            )
            show_warnings()
    return GeneratedTexts(
        path=_path(model),
        step=opened.step,
        texts=texts,
        seconds=time.perf_counter() - begun,
        warnings=tuple(warnings),
    )


def _schema(schema: Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A schema, read from its file.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is no JSON.
    """
    if schema is None or isinstance(schema, Mapping):
        return schema
    from systolic.inference.grammar import json_rule

    try:
        content = json.loads(Path(schema).read_bytes())
    except OSError as error:
        raise NotFoundError(f"--schema {schema} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"--schema {schema} is not JSON ({error}); give a JSON Schema") from error
    json_rule(content)  # refuses what is no schema before the model is opened
    return content


@command_of
@explained_by(generate)
def predict(
    model: Annotated["TrainedModel | Path | str", RUN],
    files: Annotated[Path | str | Sequence[Path | str], WORDS] = (),
    *,
    out: Path | None = None,
    checkpoint: str | int = "best",
    trust: bool = False,
) -> "Predictions":
    """Labels files with a trained model; a language model scores texts in bits per byte, an embedding model returns vectors, Whisper transcribes recordings.

    Args:
        model: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        files: Images or arrays for an image model, text files for a language model, recordings for Whisper, texts or text files for an embedding model, .npz files with an array for each input for an exported program. For a recipe on arrays, tables of new rows: CSV, TSV, JSONL or .npz. If a file cannot be read, it is named, the others are answered, and the exit code is 1.
        out: For an exported program, write the outputs for one file as arrays to this .npz file. For tables, write the answers of all rows to this .jsonl or .csv file.

    Returns:
        The answers. The reporter's ``update`` gets each as it is known: a
        :class:`~systolic.inference.results.FileAnswer`.

    Raises:
        OptionError: no files are given, or ``out`` does not fit them or the model.
        NotFoundError: there is no such model or checkpoint, or none of the files.
        DataError: with ``out``, no row was answered.
        SystolicError: the model can't be opened; as :func:`systolic.open`.
    """
    from systolic.formats.registry import in_files
    from systolic.inference.results import (
        NPZ,
        answered,
        check_files,
        check_out,
        written_arrays,
        written_rows,
    )

    listed = [files] if isinstance(files, str | Path) else list(files)
    path = _path(model)
    if not listed:
        raise OptionError(
            f"systolic predict {path} needs files, or texts for a model of embeddings; name one or more after it"
        )
    if out is not None:
        check_out(listed, out)
    if not in_files(path):
        check_files(listed)
    with _opened(model, checkpoint, trust) as (opened, warnings):
        if not opened.takes_texts:
            check_files(listed)
        if out is None:
            predictions = answered(opened, listed)
        else:
            write = written_arrays if out.suffix == NPZ else written_rows
            predictions = write(opened, listed, out)
    return replace(predictions, path=path, warnings=tuple(warnings))


@command_of
@explained_by(generate)
def evaluate(  # noqa: PLR0913  the options of systolic eval
    model: Annotated["TrainedModel | Path | str", RUN],
    *,
    split: Split | None = None,
    path: Path | None = None,
    checkpoint: str | int = "best",
    batches: Annotated[int, NOT_NEGATIVE] = 0,
    harness: Annotated[str | Sequence[str], OptionWords(tuple[str, ...])] = (),
    harness_tasks: Annotated[Path | None, Partner("harness")] = None,
    harness_limit: Annotated[int, NOT_NEGATIVE, Partner("harness")] = 0,
    trust: bool = False,
) -> "MeasuredModel":
    """Evaluates a run on its held-out data, on other data, or by tasks of lm-evaluation-harness.

    Args:
        model: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        split: Split to evaluate; by default every held-out split.
        path: Other data, such as new.jsonl, read like the run's own; all of it is evaluated.
        batches: Use only the first N batches; 0 uses all.
        harness: Tasks of lm-evaluation-harness (extra harness) in place of data, with commas: hellaswag,arc_easy. Results are kept in RUN/harness, or in MODEL.harness beside a model that is no run.
        harness_tasks: Folder of tasks of your own, YAML files.
        harness_limit: Use only the first N documents of each task; 0 uses all.

    Raises:
        OptionError: both a split and a path are given, or there is no such data.
        NotFoundError: there is no such model or checkpoint, the data is gone, or nothing is at ``path``.
        SystolicError: the model can't be opened; as :func:`systolic.open`.
    """
    from systolic.inference.evaluation import check_data
    from systolic.inference.results import MeasuredModel

    if harness:
        if (split, path, batches) != (None, None, 0):
            raise OptionError(
                "--harness has data of its own; leave out --split, --path and --batches"
            )
        return _by_harness(model, harness, harness_tasks, harness_limit, checkpoint, trust)
    check_data(split, path)
    with _opened(model, checkpoint, trust) as (opened, warnings):
        metrics = opened.evaluate(split, path=path, batches=batches)
        baselines = opened.baselines_of(path)
    return MeasuredModel(
        path=_path(model),
        step=opened.step,
        metrics=metrics,
        baselines=baselines,
        warnings=tuple(warnings),
    )


def _by_harness(
    model: "TrainedModel | Path | str",
    tasks: str | Sequence[str],
    folder: Path | None,
    limit: int,
    checkpoint: str | int,
    trust: bool,
) -> "MeasuredModel":
    from systolic.inference.evaluation import run_harness
    from systolic.inference.model import TrainedModel
    from systolic.inference.results import MeasuredModel
    from systolic.runs.run import JOB
    from systolic.runs.weights import step_of

    words = [tasks] if isinstance(tasks, str) else tasks
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    if not names:
        raise OptionError("--harness names no task; give some, such as hellaswag,arc_easy")
    path, step = _path(model), 0
    if isinstance(model, TrainedModel):
        step = model.step
    elif (path / JOB).is_file():
        step = step_of(path, str(checkpoint))
    options = ["--checkpoint", str(step or checkpoint), *(["--trust"] if trust else [])]
    metrics = run_harness(path, names, folder, limit, options)
    return MeasuredModel(path=path, step=step, metrics=metrics, baselines={})


@command_of
def verify_bundle(
    path: Annotated[Path | str, OptionWords(Path, name="bundle")], *, replay: bool = True
) -> "Verified":
    """Compares every file of a Bundle with its digest, refuses files that it does not list, and replays its recorded inputs.

    Args:
        path: The Bundle's folder.
        replay: Compute the recorded inputs here and compare with the recorded outputs.

    Raises:
        NotFoundError: the folder is no Bundle, or lacks a file.
        DataError: a file was changed, truncated or added, is a link out of the folder, or a pickle.
        RunError: a newer version wrote it, or its outputs here differ by more than the recorded tolerance.
    """
    from systolic.inference.verification import verified

    with working(f"verify {Path(path).name}"):
        return verified(Path(path), replay=replay)


def _path(model: "TrainedModel | Path | str") -> Path:
    """Path of a model.

    Raises:
        OptionError: it is neither a path nor a model.
    """
    if isinstance(model, str | Path):
        return Path(model)
    from systolic.inference.model import TrainedModel

    if not isinstance(model, TrainedModel):
        raise OptionError(
            f"model is {reprlib.repr(model)}; it takes a run, a model's folder or file, or what systolic.open returned"
        )
    return model.path


@contextmanager
def _opened(
    model: "TrainedModel | Path | str", checkpoint: str | int, trust: bool
) -> Generator[tuple["TrainedModel", list[str]]]:
    """The model of a path, or one that is open already as it is, and the warnings until the end; those of a path are reported, too.

    Raises:
        OptionError: it is neither a path nor a model, or a checkpoint is chosen of one that is open already.
    """
    from systolic.inference.model import TrainedModel, open_model

    _path(model)
    warnings: list[str] = []
    tell = model.warn if isinstance(model, TrainedModel) else reporter().warn

    def warn(line: str) -> None:
        warnings.append(line)
        tell(line)

    if not isinstance(model, TrainedModel):
        yield open_model(model, checkpoint, trust=trust, warn=warn), warnings
        return
    if checkpoint != "best":
        raise OptionError(
            f"{model!r} is open already, at its checkpoint; leave out checkpoint {checkpoint}, or give the run's path"
        )
    model.warn = warn
    try:
        yield model, warnings
    finally:
        model.warn = tell


@contextmanager
def _held(model: "TrainedModel") -> Generator[Callable[[], None]]:
    """Holds a model's warnings back until the line of a text ends; yields what lets them go, which the end does too, however it comes."""
    later: list[str] = []
    warn, model.warn = model.warn, later.append

    def show_warnings() -> None:
        while later:
            warn(later.pop(0))

    try:
        yield show_warnings
    finally:
        model.warn = warn
        show_warnings()
