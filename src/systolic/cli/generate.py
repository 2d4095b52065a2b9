"""``systolic generate RUN|BUNDLE|DIR "prompt"``: continues texts, streamed."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import DataError, NotFoundError
from systolic.core.ranges import COUNT, NOT_NEGATIVE
from systolic.job import Sampling
from systolic.report.output import print_json, warn

SAMPLING = Sampling()


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continues prompts with a trained language model.

    Args:
        run: The run's directory, or a model: a Bundle, a Hugging Face folder or a GGUF file.
        prompt: The texts to continue, one after the other; - reads one from standard input, and "" begins a text.
        file: More prompts: the lines of a file, or of a .jsonl the field prompt, or messages (role, content), which are answered as a chat; - reads standard input.
        tokens: At most so many new tokens for each prompt; a text ends before, with a warning, where the model takes no longer one.
        sampling: How tokens are picked.
        stop: A string that ends the text, which leaves it out; may be given several times.
        seed: The same seed gives the same text for a prompt.
        chat: Each prompt is a message, which the model answers by its tokenizer's chat template.
        system: A system message before each prompt, which is then a message too.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object at the end instead of streaming.
    """

    run: Annotated[Path, tyro.conf.Positional]
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    file: Path | None = None
    tokens: Annotated[int, COUNT] = 200
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = SAMPLING
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    seed: Annotated[int, NOT_NEGATIVE] = 0
    chat: bool = False
    system: str | None = None
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(GenerateOptions, args, "systolic generate")
    asked = prompts(options.prompt, options.file)
    from systolic.data.text.stops import Stops
    from systolic.inference.model import open_model

    Stops(options.stop)  # refuses an empty string before the run is opened
    model = open_model(options.run, options.checkpoint, trust=options.trust, warn=warn)
    later: list[str] = []
    model.warn = later.append  # what is said of a text waits for the end of its line
    answers: list[dict[str, Any]] = []
    begun = time.perf_counter()
    # A prompt that is refused is refused before the first answer.
    streams = [
        model.stream(
            text,
            tokens=options.tokens,
            sampling=options.sampling,
            stop=options.stop,
            seed=options.seed,
            chat=options.chat,
            system=options.system,
        )
        for text in asked
    ]
    for text, pieces in zip(asked, streams, strict=True):
        start = time.perf_counter()
        said = text if isinstance(text, str) else str(text[-1].get("content") or "")
        turns = options.chat or options.system is not None or text is not said
        shown = f"{said}\n" if turns else said
        answer = "".join(pieces) if options.json else show(shown, pieces, first=not answers)
        seconds = time.perf_counter() - start
        finish = pieces.finish and pieces.finish.value
        answers.append(
            {
                "prompt" if text is said else "messages": text,
                "text": answer,
                "finish_reason": finish,
                "seconds": seconds,
            }
        )
        while later:
            warn(later.pop(0))
    if options.json:
        record: dict[str, Any] = {"run": str(options.run), "step": model.step}
        # One prompt is answered by one text, several by a list.
        record |= answers[0] if len(answers) == 1 else {"answers": answers}
        print_json({**record, "seconds": time.perf_counter() - begun})
    return 0


def show(prompt: str, pieces: Any, *, first: bool) -> str:
    """Prints a prompt and what follows as it comes, an empty line before all but the first; the text."""
    sys.stdout.write(prompt if first else f"\n{prompt}")
    told = []
    for piece in pieces:
        told.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(told)


def prompts(given: Sequence[str], file: Path | None) -> list[Any]:
    """The prompts of a command line, texts or messages; one that is empty where there are none.

    Raises:
        NotFoundError: no such file.
        DataError: it is no text, a line is no JSON object with a prompt or messages, or there is none in it.
    """
    found = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in given]
    if file is None:
        return found or [""]
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except OSError as error:
        raise NotFoundError(f"{file} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    # A byte order mark of some editors is no part of the first prompt.
    lines: list[Any] = [line for line in text.removeprefix("\ufeff").splitlines() if line.strip()]
    if file.suffix == ".jsonl":
        lines = [_prompt(line, file, number + 1) for number, line in enumerate(lines)]
    if not lines:
        raise DataError(f"{file} has no prompt; write one a line")
    return found + lines


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
