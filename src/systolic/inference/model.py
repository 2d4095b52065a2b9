"""A trained model, opened from its run or from files: it evaluates, generates and predicts on this machine's devices, from prompts in words, files and standard input."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.arguments import with_types
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import lines_of, nearest_file
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check_arguments
from systolic.core.units import si
from systolic.data.text.instructions import Instructions
from systolic.data.text.text_data import Sentences
from systolic.formats.registry import in_files
from systolic.inference.results import Continuation
from systolic.job import Job, Layout, Precision, Remat, Sampling, Split
from systolic.recipes.jobs import kept_flags
from systolic.recipes.jobs.run import check_folder, rebuild
from systolic.runs.job_record import read_record
from systolic.runs.run import JOB, Run

if TYPE_CHECKING:
    import numpy as np

    from systolic.formats.source import Source
    from systolic.inference.generation import Generator
    from systolic.inference.predictions import RowPrograms
    from systolic.runs.weights import Weights
    from systolic.setup import Setup
    from systolic.steps.step_functions import StepFunctions


Messages = Sequence[Mapping[str, Any]]
"""``role`` and ``content`` of each message of a chat."""
Place = Callable[[Job, str, Sequence[Any]], tuple[Layout, Sequence[Any]] | None]
"""A job, a platform and its devices to a layout and the devices that it is for; None leaves it to the default."""
CACHED_BYTES = 64 << 20
"""Weights up to which a CPU's caches hold them: copies of them cost a text less than the compile of a program without."""
Metrics = dict[str, float]
"""Name of a metric to its mean over the data, such as ``bits_per_byte``."""


def several(prompts: str | Messages | Sequence[str | Messages]) -> list[Any]:
    """Prompts as a list; a list of messages is one prompt.

    Raises:
        OptionError: they are neither a text nor a list.
    """
    if not isinstance(prompts, str | Iterable) or isinstance(prompts, Mapping):
        raise OptionError(
            f"prompts is {prompts!r}; give a text or a list of texts, messages or a list of such lists"
        )
    listed: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    return [listed] if listed and isinstance(listed[0], Mapping) else listed


def read_prompts(
    prompts: str | Messages | Sequence[str | Messages], file: Path | None
) -> list[Any]:
    """Prompts with those of a file, texts or messages; ``-`` is standard input, and one that is empty stands for none.

    Raises:
        NotFoundError: no such file.
        DataError: it is no text, a line is no JSON object with a prompt or messages, or there is none in it.
    """
    listed = [
        sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        for prompt in several(prompts)
    ]
    return (listed or [""]) if file is None else listed + _lines(file)


def _lines(file: Path) -> list[Any]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_bytes().decode()
    except OSError as error:
        raise NotFoundError(f"{file} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    # A byte order mark of some editors is no part of the first prompt.
    lines: list[Any] = lines_of(text.removeprefix("\ufeff"))
    if file.suffix == ".jsonl":
        lines = [_prompt(line, file, number + 1) for number, line in enumerate(lines)]
    if not lines:
        raise DataError(f"{file} has no prompt; write one a line")
    return lines


def _prompt(line: str, file: Path, number: int) -> Any:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{file}: prompt {number} is not JSON ({error})") from error
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        return row["messages"]
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
        raise DataError(
            f"{file}: prompt {number} has neither a text in the field prompt nor a list of turns in messages"
        )
    return row["prompt"]


def turns_of(prompt: Any, *, chat: bool, system: str | None) -> str | Messages:
    """A prompt as the model is asked: a text to continue, or the messages of a chat.

    Raises:
        OptionError: it is neither, or the messages end with an answer or have a system's message beside the one that is given.
    """
    if isinstance(prompt, str):
        if not chat and system is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence) or not prompt:
        raise OptionError(f"the prompt is {prompt!r}; give a text, or a list of messages")
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError(
                f"message {number} of the prompt is {message!r}; give role and content"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise OptionError(f"message {number} of the prompt has no content; give a text")
    if prompt[-1]["role"] == "assistant":
        raise OptionError(
            "the messages of the prompt end with an answer; end them with what the model shall answer"
        )
    if system is None:
        return prompt
    if prompt[0]["role"] == "system":
        raise OptionError(
            "the prompt has a system message and another one is given; leave one of them out"
        )
    return [{"role": "system", "content": system}, *prompt]


@with_types
def open_model(
    path: Path | str,
    checkpoint: str | int = "best",
    *,
    job: Job | None = None,
    trust: bool = False,
    warn: Callable[[str], None] | None = None,
    place: "Place | None" = None,
) -> "TrainedModel":
    """Loads the weights of a run, a Bundle or a Hugging Face folder onto this machine's devices, however many there are.

    Args:
        path: The run's directory, or the model's folder.
        checkpoint: Of a run: ``best``, ``last`` or the number of a step. A damaged best or last checkpoint
            gives way to another one, with a warning.
        job: For a run that was made from a Job with types of your own: that Job.
        trust: Execute the run's recipe even if it is another user's; its digest is remembered for later commands.
        warn: Called with each warning, one line; by default they are collected in ``warnings``.
        place: Chooses devices and their layout for a server; by default all of them share the batch.

    Raises:
        NotFoundError: there is no such run, folder or checkpoint.
        TrustError: the run's recipe belongs to another user.
        RunError: the run can't be rebuilt by this version, or no checkpoint is intact.
        DataError: files of the folder are damaged or incomplete.
        OptionError: the folder holds an unknown model, or a checkpoint or job was given for it.
    """
    if in_files(Path(path)):
        from systolic.formats.source import open_source

        _refuse_choice(Path(path), job, checkpoint)
        return from_source(open_source(path), warn=warn, place=place)
    check_folder(Path(path))
    with Run.open(path) as run:
        from systolic.runs import weights
        from systolic.setup import with_frozen

        keep_programs()
        setup = set_up_here(rebuild(run, trust_code=trust, job=job).job, run, place)
        loaded = weights.load(run, setup.steps, str(checkpoint))
        record = read_record(run)
        loaded = with_frozen(loaded, setup, run.path, record)
    model = TrainedModel(Path(path), setup, loaded, warn)
    for line in loaded.skipped:
        model.warn(f"{line}; using step {loaded.step}")
    return model


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A model whose weights are not read yet."""

    setup: "Setup"
    read: "Callable[[], Weights]"
    """Reads the weights."""


def prepare_model(
    path: Path,
    checkpoint: str | int = "best",
    *,
    precision: Precision = Precision.auto,
    trust: bool = False,
    warn: Callable[[str], None] = lambda _: None,
    place: Place | None = None,
) -> PreparedModel:
    """A model in files or a run, on this machine's devices, in its job's precision where none is given; else as :func:`open_model`."""
    if in_files(path):
        from systolic.formats.jobs import job_of, notes_of
        from systolic.formats.source import open_source
        from systolic.formats.weights import weights_of

        _refuse_choice(path, None, checkpoint)
        source = open_source(path)
        setup_of_files = set_up_here(_in_precision(job_of(source), precision), place=place)
        for line in notes_of(source, setup_of_files.job):
            warn(line)
        return PreparedModel(
            setup=setup_of_files, read=lambda: weights_of(source, setup_of_files.steps)
        )
    check_folder(path)
    with Run.open(path) as run:
        job = _in_precision(rebuild(run, trust_code=trust).job, precision)
        setup = set_up_here(job, run, place)

    def read() -> "Weights":
        from systolic.runs import weights
        from systolic.setup import with_frozen

        with Run.open(path) as run:
            loaded = weights.load(run, setup.steps, str(checkpoint))
            loaded = with_frozen(loaded, setup, run.path, read_record(run))
        for line in loaded.skipped:
            warn(f"{line}; using step {loaded.step}")
        return loaded

    return PreparedModel(setup=setup, read=read)


def _refuse_choice(path: Path, job: Job | None, checkpoint: str | int) -> None:
    """Refuses what only a run has.

    Raises:
        OptionError: a checkpoint or a job is given.
    """
    if job is not None or checkpoint != "best":
        choice = "a job" if job is not None else f"checkpoint {checkpoint}"
        raise OptionError(
            f"{path} is no run but a model in files, which takes no {choice.removeprefix('a ')}; leave it out"
        )


def is_model(path: Path) -> bool:
    """Whether a path looks like a run or a model in files."""
    return (path / JOB).is_file() or in_files(path)


def from_source(
    source: "Source",
    precision: Precision = Precision.auto,
    warn: Callable[[str], None] | None = None,
    *,
    texts: bool = True,
    place: "Place | None" = None,
) -> "TrainedModel":
    """The model of files, with its weights on this machine's devices.

    Args:
        source: The files.
        precision: Precision of the computation.
        warn: As for :func:`open_model`.
        texts: Whether it reads and writes texts; without, its files need no tokenizer.
        place: As for :func:`open_model`.

    Raises: as :func:`open_model`.
    """
    from systolic.formats.jobs import job_of, notes_of
    from systolic.formats.weights import weights_of

    keep_programs()
    job = _in_precision(job_of(source, texts=texts), precision)
    setup = set_up_here(job, place=place)
    model = TrainedModel(source.path, setup, weights_of(source, setup.steps), warn)
    for line in notes_of(source, job):
        model.warn(line)
    return model


def _in_precision(job: Job, precision: Precision) -> Job:
    return job if precision is Precision.auto else replace(job, precision=precision)


def keep_programs() -> None:
    """Keeps compiled programs, so that the next process that opens the model finds them."""
    from systolic.core.files import cache_home
    from systolic.steps.programs import compiler_cache

    compiler_cache(str(cache_home() / "xla"))


class TrainedModel:
    """Weights with the programs that use them; made by :func:`open_model`, ``systolic.open``.

    Attributes:
        path: The run's directory, or the folder or file of the model.
        setup: The job on this machine's devices.
        weights: What the checkpoint holds; an array put in the place of another counts from the next call on.
        warnings: Lines that no ``warn`` took.
    """

    def __init__(
        self,
        path: Path,
        setup: "Setup",
        weights: "Weights",
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.path, self.setup, self.weights = path, setup, weights
        self.warnings: list[str] = []
        self.warn = self.warnings.append if warn is None else warn
        self._made_of: dict[str, Any] = {}
        self._made: dict[Any, Any] = {}

    def __repr__(self) -> str:
        """Kind, origin and size in one line."""
        from systolic.runs.weights import sizes_of

        sizes = sizes_of({**self.weights.params, **self.weights.model_state})
        held = ", ".join(sizes.bytes_by_dtype)
        step = f", step {self.step}" if self.step else ""
        kind, task = type(self.job.model).__name__, type(self.job.task).__name__
        return f"<TrainedModel {self.path}: {kind} for {task}, {si(sizes.elements)} parameters in {held}{step}, on {self.setup.machine.name}>"

    def _repr_html_(self) -> str:
        from systolic.report.notebook import screen

        return screen([], [repr(self)[1:-1], *(f"note: {line}" for line in self.warnings)])

    @property
    def job(self) -> Job:
        """The job, laid out over this machine's devices."""
        return self.setup.job

    @property
    def steps(self) -> "StepFunctions":
        """Programs of the job on this machine."""
        return self.setup.steps

    @property
    def step(self) -> int:
        """The training step of the checkpoint; 0 for a model that is no run."""
        return self.weights.step

    @property
    def baselines(self) -> Metrics:
        """Baselines of the metrics on the run's own data, such as the bits per byte of gzip."""
        return self.baselines_of()

    def baselines_of(self, path: Path | str | None = None) -> Metrics:
        """Baselines of the metrics on the data at ``path``, by default the run's own; {} for data without any.

        Raises: as :meth:`job_on`.
        """
        return dict(self.job_on(path).data.baselines())

    @property
    def plain_weights(self) -> dict[str, Any]:
        """Parameters and other variables of the job's model by path; adapters are merged into the matrices beside them."""
        from systolic.models.adapters import merged

        adapter, weights = self.job.adapter, self.weights
        if adapter:
            return merged(weights.params, weights.model_state, adapter)
        return {**weights.params, **weights.model_state}

    # Evaluation

    def evaluate(
        self,
        split: Split | str | None = None,
        *,
        path: Path | str | None = None,
        batches: Annotated[int, NOT_NEGATIVE] = 0,
        sequence: int | None = None,
    ) -> dict[str, Metrics]:
        """Metrics over held-out data by the name of the split, or by ``path``.

        Args:
            split: Which part of the run's own data; by default all held-out parts.
            path: Other data, read as the run's own was; all of it is evaluated.
            batches: Reads only the first so many batches; 0 reads all.
            sequence: Of conversations at ``path``: tokens of a row, by default those of the training, or 1,024.

        Raises:
            OptionError: both a split and a path are given, there is no such data, or ``batches`` is negative.
            NotFoundError: the data is gone, or nothing is at ``path``.
        """
        from systolic.data.input_files import FILES
        from systolic.inference.evaluation import check_data, evaluate, split_of, splits
        from systolic.steps.programs import evaluation_rows, jit_evaluate

        check_arguments(TrainedModel.evaluate, {"batches": batches}, str)
        wanted = split if split is None or isinstance(split, Split) else split_of(split)
        check_data(wanted, path)
        job = self.job_on(path)
        if sequence is not None and isinstance(job.data, Instructions):
            job = replace(job, data=replace(job.data, sequence=sequence))
        try:
            chosen = splits(job, wanted)
        except NotFoundError as error:
            gone = str(error).partition("; ")[0]
            raise NotFoundError(f"{gone}; give {self.path} other data with --path") from error
        steps, weights = self.setup.steps, self.weights
        program, examples = jit_evaluate(steps), batches * evaluation_rows(job, steps)
        metrics = {
            str(path or part.value): evaluate(
                job, steps, program, weights.params, weights.model_state, part, examples
            )
            for part in chosen
        }
        for line in FILES.take():
            self.warn(f"{line}; it was left out")
        return metrics

    def job_on(self, path: Path | str | None) -> Job:
        """The job with the data at a path in place of its own, where one is given.

        Raises:
            NotFoundError: nothing is at the path.
            OptionError: the job's kind of data can't be read from elsewhere.
        """
        if path is None:
            return self.job
        if not Path(path).exists():
            raise NotFoundError(f"{path} does not exist{nearest_file(Path(path))}; check the path")
        return replace(self.job, data=self.job.data.at(Path(path).absolute()))

    # Generation

    def generate(
        self,
        prompts: str | Messages | Sequence[str | Messages],
        *,
        tokens: Annotated[int, COUNT] = 200,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: str | Sequence[str] = (),
        seed: int = 0,
        chat: bool = False,
        system: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Texts that continue ``prompts``, one for each, without the prompt; arguments as :meth:`stream`. A list of messages is one prompt."""
        return [
            "".join(
                self.stream(
                    prompt,
                    tokens=tokens,
                    sampling=sampling,
                    stop=stop,
                    seed=seed,
                    chat=chat,
                    system=system,
                    schema=schema,
                )
            )
            for prompt in several(prompts)
        ]

    def stream(
        self,
        prompt: str | Messages,
        *,
        tokens: Annotated[int, COUNT] = 200,
        sampling: Sampling = Sampling(),  # noqa: B008
        stop: str | Sequence[str] = (),
        seed: int = 0,
        chat: bool = False,
        system: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """The text that continues a prompt, piece by piece as it is generated; ``finish`` then says how it ended: with a warning where the model takes no longer text.

        Args:
            prompt: May be empty: the text then begins with the token that starts one. Messages, each with role and content, are answered by the tokenizer's chat template.
            tokens: At most so many new tokens.
            sampling: Sampling of the next token.
            stop: A string, or several: the text ends before the first of them.
            seed: The same seed gives the same text for a prompt.
            chat: The prompt is a user's message, which the model answers by its tokenizer's chat template.
            system: A system message before the others; the prompt is then a message too.
            schema: The text is JSON that this JSON Schema describes; text that reaches ``tokens`` is cut off.

        Raises:
            OptionError: the schema cannot be followed, messages for a tokenizer without a template, the run was not trained on text, ``prompt`` is no text, is too long or is empty where no token starts a text, ``tokens`` is no whole number from 1, or a stop string is empty.
            RunError: its model does not generate.
        """
        turns = turns_of(prompt, chat=chat, system=system)
        check_arguments(TrainedModel.stream, {"tokens": tokens}, str)
        generator = self._generator(sampling)
        return generator.stream(
            turns, tokens=tokens, seed=seed, stop=stop, schema=schema, warn=self.warn
        )

    def _kept(self) -> dict[Any, Any]:
        """Programs that were made of the weights as they are; none after an array was replaced."""
        now, before = {**self.weights.params, **self.weights.model_state}, self._made_of
        if now.keys() != before.keys() or any(now[path] is not before[path] for path in now):
            self._made_of, self._made = now, {}
        return self._made

    def _generator(self, sampling: Sampling) -> "Generator":
        """The compiled programs of a way of sampling, kept for the next prompt."""
        from systolic.inference.generation import Generator

        kept = self._kept()
        if sampling not in kept:
            weights = self.weights
            kept[sampling] = Generator(
                self.setup.steps,
                weights.params,
                weights.model_state,
                sampling,
                like=next((one for one in kept.values() if isinstance(one, Generator)), None),
                paged=self._paged,
            )
        return kept[sampling]

    @cached_property
    def _paged(self) -> bool:
        """Whether texts are generated as a server does: by a decoder on one CPU with more weights than caches hold, and memory for them in both forms."""
        from systolic.chips.host import free_bytes
        from systolic.models.decoder.config import Decoder
        from systolic.models.linear import alone_on_cpu
        from systolic.runs.weights import sizes_of

        sizes = sizes_of({**self.weights.params, **self.weights.model_state})
        held = sum(sizes.bytes_by_dtype.values())
        alone = isinstance(self.job.model, Decoder) and alone_on_cpu(self.setup.steps.target)
        wide = 4 * sizes.elements
        if not alone or held <= CACHED_BYTES or 2 * wide >= free_bytes():
            return False
        dtype = self.setup.steps.target.dtype
        if dtype != "float32" and not self.job.quantization:
            self.warn(
                f"weights are held as float32, {si(wide, 'B')} in place of {si(wide // 2, 'B')}: a CPU multiplies few rows of {dtype} more slowly"
            )
        return True

    # Prediction

    @property
    def _programs(self) -> "RowPrograms":
        """Programs of predictions, kept for the next call."""
        from systolic.inference.predictions import RowPrograms

        kept, made = self._kept(), RowPrograms(self.setup.steps, self.weights)
        return kept.setdefault(RowPrograms, made)

    def predict(
        self, files: Path | str | Sequence[Path | str] | Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """An answer for each file, in their order: arguments and errors as :meth:`predictions`.

        Arrays by name, ``{"x": array}``, are taken in the place of a table or an ``.npz`` file, and each of their
        rows gets an answer.
        """
        if isinstance(files, Mapping):
            from systolic.inference.predictions import answers_of

            return answers_of(self._programs, files)
        return [answer for _, answer in self.predictions(files)]

    def predictions(
        self, files: Path | str | Sequence[Path | str]
    ) -> Iterator[tuple[Path | str, dict[str, Any]]]:
        """Each file with its answer as plain values, as soon as it is known.

        The answer is ``label``, ``probability`` and ``top`` of an image, ``bits_per_byte``, ``perplexity``
        and ``tokens`` of a text, ``embedding`` of a text for a model of embeddings, ``rows`` of a table (the
        answers for each of its rows, for a recipe whose data are arrays), and ``error`` (one line)
        of a file that can't be read.

        Args:
            files: One or more: images or arrays for an image model, files of text for a language model,
                texts or their files for a model of embeddings.

        Raises:
            OptionError: ``files`` is neither a path nor a list of paths.
        """
        from systolic.inference.predictions import predictions

        several = list(files) if isinstance(files, Iterable) else [files]
        several = [files] if isinstance(files, str | Path) else several
        if not all(isinstance(file, str | Path) for file in several):
            from systolic.data.input_files import InputFiles

            by_name = self.takes_rows or isinstance(self.job.data, InputFiles)
            arrays = ", or arrays by name as predict({name: array})" if by_name else ""
            raise OptionError(
                f"files has the type {type(files).__name__}; give a path or a list of paths{arrays}"
            )
        if self.takes_texts:
            from systolic.inference.predictions import embeddings

            yield from embeddings(self._programs, list(several))
            return
        paths = [Path(file) for file in several]
        if self.takes_rows:
            from systolic.inference.predictions import rows_of

            yield from rows_of(self._programs, paths)
            return
        yield from predictions(self._programs, paths)

    def outputs(self, file: Path | str) -> dict[str, Any]:
        """Outputs of an exported program for all examples of an ``.npz`` file: name to array [examples, ...].

        Raises:
            OptionError: the model is no exported program.
            NotFoundError: there is no such file.
            DataError: it lacks inputs, or has no examples.
        """
        from systolic.inference.predictions import output_arrays

        return output_arrays(self._programs, Path(file))

    @property
    def takes_rows(self) -> bool:
        """Whether :meth:`predict` takes tables of rows: the recipe's data has no files of single examples."""
        from systolic.inference.predictions import are_rows

        return are_rows(self.job.data)

    @property
    def takes_texts(self) -> bool:
        """Whether :meth:`predict` takes texts themselves beside files."""
        return isinstance(self.job.data, Sentences)


def set_up_here(job: Job, run: Run | None = None, place: Place | None = None) -> "Setup":
    """A job on this machine's devices, with the compiler flags of its run: any number of devices can use what any layout trained.

    Args:
        job: The job.
        run: Its run.
        place: Chooses the devices and their layout; by default all of them share the batch.
    """
    from systolic.setup import set_up
    from systolic.steps.machine import LocalDevices

    machine = LocalDevices.here()
    placed = None if place is None else place(job, machine.platform, machine.devices)
    layout = Layout(data=1, fsdp=-1, remat=Remat.none)
    if placed is not None:
        layout = placed[0]
        machine = replace(machine, devices=placed[1])
    ways = len(machine.devices)
    batch = (
        replace(job.batch, total=job.batch.resolve(Layout(data=1, fsdp=1)), per_device=None)
        if job.batch.total
        else job.batch
    )
    if job.batch.total and job.batch.total % ways:
        batch = replace(batch, total=-(-job.batch.total // ways) * ways)
    flags = None
    if run is not None:
        record = read_record(run)
        flags = kept_flags(record, record.plan, job.model).compiler
    job = replace(job, layout=layout, batch=batch)
    return set_up(job, machine, flags, reads=False, serves=placed is not None)


def answers(source: "Source", inputs: Mapping[str, "np.ndarray"]) -> "tuple[np.ndarray, str]":
    """Outputs float32[rows, ..., n] of a model as a user opens it, and the platform that computed them.

    Raises: as :func:`open_model`.
    """
    from systolic.formats.comparison import outputs_of

    model = from_source(source, Precision.f32, texts=False)
    return outputs_of(model.setup.steps, model.weights, inputs), model.setup.machine.platform
