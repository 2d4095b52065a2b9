"""Files of an offline batch in OpenAI's format: an input that is streamed, and an output that each line is appended to; progress on stderr, as a bar on a terminal, otherwise as a line now and then."""

import fcntl
import hashlib
import json
import os
import re
import stat
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec
from msgspec import Raw
from rich.text import Text

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.core.files import check_writable
from systolic.core.units import duration, plural
from systolic.data.text.line_files import DAMAGED, opened
from systolic.report import terminal
from systolic.report.progress import LiveArea, bar
from systolic.serving.http.protocol import encode, with_infinities

BODIES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
"""Field of a line that is a body alone, and the route that it is for."""
EXPECTED = 'each line is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or a body alone with messages, prompt or input'
"""Form of a file of requests."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
ABSENT = Raw()
_ID = re.compile(r"batch_req_(?P<line>[1-9][0-9]{0,14})_(?P<digest>[0-9a-f]{16})")
_HEAD = b'{"id":"batch_req_'
"""How each result begins. A file of something else loses nothing."""
LINE_SECONDS = 30.0
"""Seconds between lines where there is no terminal."""
BLANK = 0
"""Digest of a line that holds nothing, which has no result."""


class _Fields(msgspec.Struct, kw_only=True):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT


class _Streamed(msgspec.Struct, kw_only=True):
    stream: Raw = ABSENT


class _Response(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str | None = None
    body: Raw = ABSENT


class _Problem(msgspec.Struct, kw_only=True):
    code: str
    message: str


class _Result(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str | None = None
    response: _Response | None = None
    error: _Problem | None = None


_FIELDS = msgspec.json.Decoder(_Fields)
_STREAMED = msgspec.json.Decoder(_Streamed)
_RESULT = msgspec.json.Decoder(_Result)


class LineRequest(NamedTuple):
    """A line that can be asked."""

    custom_id: str
    url: str
    body: bytes


class LineProblem(NamedTuple):
    """A line that can't."""

    custom_id: str
    code: str
    message: str


class LineAnswered(NamedTuple):
    """Which line of the input a line of the output answers."""

    number: int
    digest: int
    ok: bool
    """Whether its status is 200."""


def custom_id_of(number: int, line: bytes) -> str:
    """Name of a line in the output: its ``custom_id``, or ``line-N`` if it has none."""
    try:
        return _FIELDS.decode(line).custom_id or f"line-{number}"
    except UNREADABLE:
        return f"line-{number}"


def request_of(number: int, line: bytes) -> LineRequest | LineProblem:
    """The request of a line, counted from 1: ``{"custom_id", "method", "url", "body"}``, or a body alone."""
    named = f"line-{number}"
    try:
        fields = _FIELDS.decode(line)
    except UNREADABLE as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return LineProblem(named, "invalid_line", f"line {number} is no request: {reason}")
    named = fields.custom_id or named
    if fields.method not in (None, "POST"):
        message = f"method is {fields.method!r}; send POST"
        return LineProblem(named, "invalid_method", message)
    url, body = fields.url, fields.body
    if not bytes(body) and url is None:
        bodies = zip(BODIES, (fields.messages, fields.prompt, fields.input), strict=True)
        routes = [BODIES[name] for name, value in bodies if bytes(value)]
        if len(routes) == 1:
            url, body = routes[0], Raw(line.strip())
    if url is None or not url.startswith("/") or not url.isprintable():
        known = "there is no url" if url is None else f"url is {url!r}"
        message = f"{known}; give a path such as /v1/chat/completions"
        return LineProblem(named, "invalid_url", message)
    if not bytes(body):
        return LineProblem(named, "invalid_body", "body is missing; give the fields of the request")
    if _streams(bytes(body)):
        message = "stream is true, and a batch has whole answers; leave it out"
        return LineProblem(named, "invalid_body", message)
    return LineRequest(named, url, bytes(body))


def no_request(number: int, line: bytes) -> str | None:
    """Why a line is something else than a request, such as a line of a log; None for a request, though it be a wrong one."""
    request = request_of(number, line)
    if isinstance(request, LineRequest) or request.code not in ("invalid_line", "invalid_url"):
        return None
    return request.message.removeprefix(f"line {number} is no request: ")


def _streams(body: bytes) -> bool:
    if b'"stream"' not in body:
        return False
    try:
        stream = _STREAMED.decode(body).stream
    except UNREADABLE:
        return False  # The route says what is wrong with it.
    return bytes(stream) == b"true"


def result_id(number: int, digest: int) -> str:
    """Names a line of the input by its number and the digest of its bytes."""
    return f"batch_req_{number}_{digest:016x}"


def answer_line(id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output for a request that was asked, whatever its status.

    Args:
        id: By :func:`result_id`.
        custom_id: Of the input's line.
        status: HTTP status.
        request_id: Of the server's application.
        body: One JSON value; NaN and Infinity may be in it, as TensorFlow Serving writes them.
    """
    response = _Response(
        status_code=status, request_id=request_id, body=Raw(_strict(body).replace(b"\n", b" "))
    )
    return _written(_Result(id=id, custom_id=custom_id, response=response))


def _strict(body: bytes) -> bytes:
    """The same value as JSON that every reader takes."""
    if b"NaN" not in body and b"Infinity" not in body:
        return body
    return encode(with_infinities(json.loads(body), b"1e999"))


def problem_line(id: str, problem: LineProblem) -> bytes:
    """A line of the output for one of the input that could not be asked."""
    error = _Problem(code=problem.code, message=problem.message)
    return _written(_Result(id=id, custom_id=problem.custom_id, error=error))


def answered_line(line: bytes) -> LineAnswered | None:
    """The line of the input that a line of an output answers; None if no batch of this package wrote it."""
    try:
        result = _RESULT.decode(line)
    except UNREADABLE:
        return None
    match = _ID.fullmatch(result.id)
    if match is None:
        return None
    ok = result.response is not None and result.response.status_code == 200
    return LineAnswered(int(match["line"]), int(match["digest"], 16), ok)


def _written(result: _Result) -> bytes:
    return msgspec.json.encode(result) + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProgress:
    """How far a batch is; numbers of tokens and seconds are of this process."""

    lines: int
    """Lines of the input."""
    earlier: int
    """Lines that an earlier process answered."""
    answered: int
    """Lines with a result, earlier ones included."""
    failed: int
    """Results whose status is not 200."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    """Since the model was ready."""
    stopped: bool = False
    """Whether it was told to end."""

    @property
    def generated_per_second(self) -> float:
        """Tokens of answers."""
        return self.completion_tokens / max(self.seconds, 1e-9)

    @property
    def prompts_per_second(self) -> float:
        """Tokens of prompts."""
        return self.prompt_tokens / max(self.seconds, 1e-9)

    @property
    def left_seconds(self) -> float | None:
        """Until the end at the rate so far."""
        here = self.answered - self.earlier
        return self.seconds / here * (self.lines - self.answered) if here else None


def digest_of(line: bytes) -> int:
    """64 bits of a line's digest, without the whitespace around it; :data:`BLANK` for one that is nothing else."""
    held = line.strip()
    return (_hash(held) or 1) if held else BLANK


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _cut(line: bytes) -> bool:
    """Whether a line was not written whole; blocks that a loss of power kept from the disk are zeros."""
    return not line.endswith(b"\n") or b"\0" in line


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """The lines of a file by their digests; 8 bytes a line, whatever it holds."""

    path: Path
    digests: "array[int]"

    @classmethod
    def read(cls, path: Path) -> "BatchInput":
        """Reads a file once.

        Raises:
            NotFoundError: it can't be read.
            DataError: no line is a request, or two lines have the same custom_id.
        """
        digests, ids = array("Q"), array("Q")
        problems: tuple[str, ...] | None = ()
        try:
            with opened(path) as file:
                for number, line in enumerate(file, 1):
                    digests.append(digest_of(line))
                    if digests[-1] != BLANK:
                        ids.append(_hash(custom_id_of(number, line).encode()))
                    if digests[-1] != BLANK and problems is not None:
                        reason = no_request(number, line)
                        said = f"line {number} is no request ({reason}), nor is any other"
                        problems = None if reason is None else (problems or (said,))
        except DAMAGED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise NotFoundError(
                    f"{path} cannot be read ({error.strerror}); check the path"
                ) from error
            raise DataError(
                f"{path} is damaged behind line {len(digests)} ({error}); copy it again"
            ) from error
        if problems:
            raise DataError(f"{path}: {problems[0]}; {EXPECTED}")
        source = cls(path=path, digests=digests)
        source._check(ids)
        return source

    @property
    def count(self) -> int:
        """Lines that hold something."""
        return len(self.digests) - self.digests.count(BLANK)

    def lines(self, skip: bytearray) -> Iterator[tuple[int, bytes]]:
        """Lines with their numbers, without those that ``skip[number]`` leaves out.

        Raises:
            RunError: the file has changed since it was read.
        """
        with opened(self.path) as file:
            for number, (line, digest) in enumerate(zip(file, self.digests, strict=False), 1):
                if digest == BLANK or skip[number]:
                    continue
                if digest_of(line) != digest:
                    raise RunError(
                        f"line {number} of {self.path} has changed meanwhile; run the same command again"
                    )
                yield number, line

    def _check(self, ids: "array[int]") -> None:
        """Raises where two lines have the same custom_id."""
        import numpy as np

        hashes = np.sort(np.frombuffer(ids, np.uint64))
        twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        if not twice:
            return
        first: dict[str, int] = {}
        with opened(self.path) as file:
            for number, line in enumerate(file, 1):
                name = custom_id_of(number, line)
                if digest_of(line) == BLANK or _hash(name.encode()) not in twice:
                    continue
                if name in first:
                    raise DataError(
                        f"{self.path}: lines {first[name]} and {number} have the custom_id {name[:80]!r}; give each line its own"
                    )
                first[name] = number


@dataclass(kw_only=True, eq=False)
class BatchOutput:
    """A file that results are appended to, by one process at a time."""

    path: Path
    source: BatchInput
    done: bytearray
    """By number of a line: whether its result is in the file."""
    answered: int = 0
    """Lines whose results are in the file."""
    failed: int = 0
    """Results among them whose status is not 200."""
    _file: int = -1
    _end: int = 0
    _synced: int = field(default=0)

    @classmethod
    def open(cls, path: Path, source: BatchInput) -> "BatchOutput":
        """Opens or makes the file; a last line that was cut off is dropped.

        Raises:
            OptionError: it is the input, or no regular file.
            DataError: it has results of another input, or something else.
            RunError: it can't be written, or another process writes it.
        """
        check_writable(path)
        output = cls(path=path, source=source, done=bytearray(len(source.digests) + 1))
        try:
            output._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            state = os.fstat(output._file)
            if not stat.S_ISREG(state.st_mode):
                raise OptionError(
                    f"{path} is no regular file; name one, so that a second run can continue it"
                )
            if os.path.samestat(state, os.stat(source.path)):
                raise OptionError(f"{path} is the input; name another output")
            fcntl.flock(output._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            output._recover()
        except BlockingIOError as error:
            output.close()
            raise RunError(
                f"another process writes {path}; wait for its end, or name another output"
            ) from error
        except OSError as error:
            output.close()
            raise output._unwritten(error) from error
        except (OptionError, DataError):
            output.close()
            raise
        return output

    @property
    def left(self) -> int:
        """Lines of the input without a result."""
        return self.source.count - self.answered

    @property
    def progress(self) -> BatchProgress:
        """How far it is before anything is done."""
        return BatchProgress(
            lines=self.source.count,
            earlier=self.answered,
            answered=self.answered,
            failed=self.failed,
        )

    def append(self, number: int, line: bytes, *, ok: bool) -> None:
        """Adds the result of a line; it outlives the process, and after :meth:`sync` the machine.

        Raises:
            RunError: the disk is full; what was added before stays.
        """
        try:
            self._write(line)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise self._unwritten(error) from error
        self._end += len(line)
        self._mark(number, ok)

    def sync(self) -> None:
        """Waits until everything added is on the disk; from any thread.

        Raises:
            RunError: the disk failed.
        """
        end = self._end
        if end == self._synced:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._unwritten(error) from error
        self._synced = end

    def close(self) -> None:
        """Closes the file, which frees it for others."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        at = self._end
        while view:
            count = os.pwrite(self._file, view, at)
            view, at = view[count:], at + count

    def _mark(self, number: int, ok: bool) -> None:
        self.done[number] = True
        self.answered += 1
        self.failed += not ok

    def _recover(self) -> None:
        """Reads what an earlier process has written."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            for place, line in enumerate(file, 1):
                if _cut(line) and (place > 1 or _HEAD.startswith(line[: len(_HEAD)])):
                    os.ftruncate(self._file, self._end)
                    break
                self._take(place, line)
                self._end += len(line)

    def _take(self, place: int, line: bytes) -> None:
        answered = answered_line(line)
        if answered is None:
            raise DataError(
                f"{self.path}: line {place} is no result of systolic batch; name another output"
            )
        digests = self.source.digests
        if answered.number > len(digests) or digests[answered.number - 1] != answered.digest:
            raise DataError(
                f"{self.path}: line {place} answers another line {answered.number} than {self.source.path} has; name another output, or the input that it was made of"
            )
        if self.done[answered.number]:
            raise DataError(
                f"{self.path}: line {place} answers line {answered.number} a second time; delete one of them"
            )
        self._mark(answered.number, answered.ok)

    def _unwritten(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path} could not be written ({error.strerror}); {self.answered:,} of {self.source.count:,} lines are in it: free some space and run the same command again"
        )


class BatchDisplay(LiveArea):
    """Context that shows a batch.

    Args:
        stream: Where to.
        environ: Of the terminal.
        width: Columns; by default the terminal's.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        environ: Mapping[str, str] | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream, environ=environ, width=width)
        self._stream, self._clock = stream, clock
        self._said = clock()

    def see(self, progress: BatchProgress) -> None:
        """Shows the progress; a closed terminal does not end the batch."""
        if self.drawn:
            self.draw(bar(progress.answered, progress.lines, Text(line(progress))))
        elif self._clock() - self._said >= LINE_SECONDS:
            self._said = self._clock()
            terminal.say(self._stream, line(progress))


def line(progress: BatchProgress) -> str:
    """The progress as text: ``1,200 of 5,000 lines (3 failed), 865 generated tokens/s, 2,310 prompt tokens/s, 4 m 05 s left``."""
    failed = f" ({progress.failed:,} failed)" if progress.failed else ""
    parts = [f"{progress.answered:,} of {plural(progress.lines, 'line')}{failed}"]
    parts.append(_rates(progress))
    if progress.stopped:
        parts.append("ending with the lines in flight (Ctrl+C again ends at once)")
    elif progress.left_seconds is not None:
        parts.append(f"{duration(progress.left_seconds)} left")
    return ", ".join(parts)


def summary(progress: BatchProgress, out: str) -> str:
    """Totals of a batch that has ended."""
    failed = f", {progress.failed:,} of them failed" if progress.failed else ""
    text = f"{out}: {progress.answered:,} of {plural(progress.lines, 'line')} answered{failed}"
    if progress.answered > progress.earlier:
        tokens = f"{progress.prompt_tokens:,} prompt tokens"
        if progress.completion_tokens:
            tokens = f"{progress.completion_tokens:,} generated and {tokens}"
        text += f"; {tokens} in {duration(progress.seconds)} ({_rates(progress)})"
    return text


def _rates(progress: BatchProgress) -> str:
    """Generated tokens and prompt tokens apart; a model that writes no text generates none."""
    prompts = f"{progress.prompts_per_second:,.0f} prompt tokens/s"
    if not progress.completion_tokens:
        return prompts
    return f"{progress.generated_per_second:,.0f} generated tokens/s, {prompts}"
