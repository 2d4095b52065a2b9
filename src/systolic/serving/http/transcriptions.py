"""``POST /v1/audio/transcriptions``: recordings to text."""

import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.protocol import ProblemError, bad, encode
from systolic.serving.http.responses import answered, event, objects, streamed
from systolic.serving.http.state import ServerState
from systolic.serving.request import ModelKind

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
FIELDS = 32
LONGEST_FIELD = 1 << 16
"""Bytes of a field that is no file."""


async def transcriptions(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as the parts that it calls."""
    try:
        form = await request.form(max_files=1, max_fields=FIELDS, max_part_size=LONGEST_FIELD)
    except (HTTPException, FormParserError, AssertionError) as error:
        raise bad(f"the body is no multipart form ({error})") from error
    try:
        name, shape, stream, language = _fields(form)
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise bad("file is missing; send a recording as a multipart form", "file")
        sound = await file.read()
    finally:
        await form.close()
    served = state.batch(request, name)
    if served.model.kind is not ModelKind.transcription:
        raise bad(
            f"{served.name} is a model of kind {served.model.kind.value} and writes down no speech",
            "model",
        )
    inputs = {"audio": objects([sound])}
    if language:
        inputs["language"] = objects([language.encode()])
    outputs = await answered(request, served, inputs)
    text = _text(outputs["text"][0])
    seconds = float(outputs["seconds"][0])
    segments = json.loads(_text(outputs["segments"][0]))
    if stream:
        return await streamed(request, _events(text, segments))
    return _response(shape, text, seconds, segments, _text(outputs["language"][0]))


def _fields(form: FormData) -> tuple[str | None, str, bool, str]:
    """Model, format, whether to stream, and the language or ""."""
    fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    shape = fields.get("response_format") or "json"
    if shape not in FORMATS:
        raise bad(
            f"response_format is {shape[:40]!r}; it takes {', '.join(FORMATS)}", "response_format"
        )
    for name, without in (("prompt", ""), ("temperature", "0")):
        value = fields.get(name, without)
        if value not in (without, "0.0", ""):
            raise bad(f"{name} is not supported; leave it out", name, "unsupported_parameter")
    words = form.getlist("timestamp_granularities[]")
    if any(word != "segment" for word in words):
        raise bad(
            "timestamp_granularities other than segment are not supported; leave them out",
            "timestamp_granularities[]",
        )
    stream = fields.get("stream", "").lower() in ("true", "1")
    return fields.get("model") or None, shape, stream, fields.get("language", "")


def _response(
    shape: str, text: str, seconds: float, segments: Sequence[dict[str, Any]], language: str
) -> Response:
    usage = {"type": "duration", "seconds": math.ceil(seconds)}
    match shape:
        case "text":
            return Response(f"{text}\n", media_type="text/plain")
        case "srt":
            parts = [
                f"{number}\n{_clock(segment['start'], ',')} --> {_clock(segment['end'], ',')}\n{segment['text'].strip()}\n"
                for number, segment in enumerate(segments, 1)
            ]
            return Response("\n".join(parts), media_type="text/plain")
        case "vtt":
            parts = [
                f"{_clock(segment['start'], '.')} --> {_clock(segment['end'], '.')}\n{segment['text'].strip()}\n"
                for segment in segments
            ]
            return Response("\n".join(["WEBVTT\n", *parts]), media_type="text/vtt")
        case "verbose_json":
            listed = [
                {"id": number, "seek": int(segment["start"] * 100), **segment}
                for number, segment in enumerate(segments)
            ]
            answer = {
                "task": "transcribe",
                "language": language,
                "duration": seconds,
                "text": text,
                "segments": listed,
                "usage": usage,
            }
        case _:
            answer = {"text": text, "usage": usage}
    return Response(encode(answer), media_type="application/json")


async def _events(text: str, segments: Sequence[dict[str, Any]]) -> AsyncIterator[bytes]:
    said = [words for segment in segments if (words := segment["text"].strip())]
    for number, words in enumerate(said):
        delta = f" {words}" if number else words
        yield event({"type": "transcript.text.delta", "delta": delta})
    yield event({"type": "transcript.text.done", "text": text})


def _clock(seconds: float, mark: str) -> str:
    """``00:01:02,345``."""
    whole = round(seconds * 1000)
    hours, minutes, rest = whole // 3_600_000, whole // 60_000 % 60, whole % 60_000
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def _text(value: bytes | str) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError as error:
        raise ProblemError(status=500, message="the model wrote no UTF-8") from error
