"""``systolic serve RUN|BUNDLE|DIR...``: a web server of trained models."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import MissingExtraError, OptionError
from systolic.core.ranges import CONTEXT, COUNT, NOT_NEGATIVE, POSITIVE, Range
from systolic.job import ServedCache
from systolic.report.output import print_json
from systolic.serving.layout import ServingLayout

if TYPE_CHECKING:
    from systolic.serving.server import ServeSettings
    from systolic.serving.workload import ModelTraffic


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serves trained models: OpenAI's API, the Open Inference Protocol and TensorFlow Serving's REST on one port.

    Language models are batched continuously, all others dynamically. The server listens at once and is ready
    (/health) when every program is compiled. SIGTERM ends it when the requests in flight have ended.

    Args:
        models: Runs, Bundles, Hugging Face folders or GGUF files, each as DIR or NAME=DIR; a folder of folders 1, 2, ... holds versions.
        host: Address to listen on; 0.0.0.0 for all.
        port: Port; 0 takes a free one.
        tls_cert: Certificate chain (PEM), for HTTPS.
        tls_key: Its private key (PEM).
        keys: File of API keys' hashes; without it everyone is let in.
        new_key: Add a key of this name to the file, print it and end.
        rate_per_minute: Requests of a key in a minute; 0 sets no bound.
        tokens_per_minute: Tokens of a key in a minute, of prompts and answers; 0 sets no bound.
        grace_seconds: Time for the requests in flight when the server is told to end.
        deadline_seconds: Ends each request so long after it came.
        body_bytes: Largest body of a request.
        requests: Requests that are answered or wait at once.
        queued: Requests for text that wait for their first step; more are refused with 429.
        rows: Texts that are continued at once.
        context: Tokens of a text, prompt and answer together, at least 2; 0 takes the model's own, at most 4,096.
        chunk: Most tokens of a prompt that a step reads.
        page_size: Positions of a page of the cache.
        pages: Pages of the cache; 0 holds all texts at their longest.
        kv_dtype: Format of keys and values: plain is the compute dtype; int8 has a scale for each position and head; fp8 (e4m3) has none.
        layout: Devices of each language model.
        precision: Of the computation; auto takes a run's own, and for models in files bf16 on TPUs and GPUs and f32 on CPUs.
        delay_ms: Longest wait of a request for others to share its batch, for models that write no text.
        traffic: What to choose the sizes of programs for: a file of --save-traffic, or the log of a server in JSON.
        save_traffic: Write what came to each model into this file when the server ends.
        strict: End a model that compiles a program after it was ready; such compiles are counted without it too.
        model_control: Let clients take the models given here out and in again, as Triton's do: /v2/repository/models/NAME/unload and /load.
        log: The log's form: text for people, json for programs, or auto, which asks whether standard error is a terminal.
        check_cache: Print which compiled programs are on the disk, and why the others are not, and end; nothing is compiled.
        log_prompts: Write prompts into the log.
        checkpoint: Of a run: best, last or the number of a step.
        trust: Execute the run's recipe although it is not yours, now and later: its digest is remembered.
        json: Print one JSON object with the address when the server listens, with the new key, or with the programs on the disk.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    keys: Path | None = None
    new_key: str | None = None
    rate_per_minute: Annotated[int, NOT_NEGATIVE] = 0
    tokens_per_minute: Annotated[int, NOT_NEGATIVE] = 0
    grace_seconds: Annotated[float, NOT_NEGATIVE] = 45.0
    deadline_seconds: Annotated[float, POSITIVE] | None = None
    body_bytes: Annotated[int, COUNT] = 64 << 20
    requests: Annotated[int, COUNT] = 2048
    queued: Annotated[int, COUNT] = 1024
    rows: Annotated[int, COUNT] = 16
    context: Annotated[int, CONTEXT] = 0
    chunk: Annotated[int, COUNT] = 256
    page_size: Annotated[int, COUNT] = 64
    pages: Annotated[int, NOT_NEGATIVE] = 0
    kv_dtype: ServedCache = ServedCache.plain
    layout: ServingLayout = ServingLayout()  # noqa: RUF009 (frozen)
    precision: Literal["auto", "bf16", "f32"] = "auto"
    delay_ms: Annotated[float, NOT_NEGATIVE] = 2.0
    traffic: Path | None = None
    save_traffic: Path | None = None
    strict: bool = False
    model_control: bool = False
    log: Literal["auto", "json", "text"] = "auto"
    check_cache: bool = False
    log_prompts: bool = False
    checkpoint: str = "best"
    trust: bool = False
    json: bool = False


def run(args: Sequence[str]) -> int:
    """The verb."""
    options = parse(ServeOptions, args, "systolic serve")
    from systolic.serving.server import serve, targets

    try:
        import systolic.serving.http.process  # noqa: F401 (fails where the packages of the extra lack)
        from systolic.serving.http.keys import new_key
    except ImportError as error:
        raise MissingExtraError("systolic serve", "serve") from error
    if options.new_key is not None:
        if options.keys is None:
            raise OptionError("--new-key needs the file that it is added to; add --keys FILE")
        key = new_key(options.keys, options.new_key)
        print_json({"name": options.new_key, "key": key}) if options.json else print(key)
        return 0
    if not options.models:
        raise OptionError(
            "systolic serve needs a model; give a run, a Bundle or a Hugging Face folder"
        )
    if options.check_cache:
        from systolic.serving.kept_programs import check_cache

        checked = check_cache(options.models, settings(options))
        if options.json:
            print_json({"models": [one.to_json() for one in checked]})
        else:
            print("\n".join(line for one in checked for line in one.lines()))
        return 0
    names = [one.name for one in targets(options.models)]

    def listening(port: int) -> None:
        scheme = "https" if options.tls_cert else "http"
        url = f"{scheme}://{options.host}:{port}"
        if options.json:
            print_json({"url": url, "models": names})
        else:
            print(f"{url}  ready when {url}/health answers 200; Ctrl+C ends it", flush=True)

    if not serve(options.models, settings(options), listening):
        sys.stdout.flush()
        sys.stderr.flush()
        # Python would end under the compiler's threads, which aborts the process.
        os._exit(0)
    return 0


def settings(options: ServeOptions) -> "ServeSettings":
    """What the options ask for; errors as those of the parts."""
    from systolic.job import Precision
    from systolic.serving.batch.options import BatchOptions
    from systolic.serving.http.keys import Keys
    from systolic.serving.http.limits import HttpLimits
    from systolic.serving.http.process import Address
    from systolic.serving.server import LogForm, ServeSettings
    from systolic.serving.text.opening import EngineSizes
    from systolic.serving.workload import TrafficBook

    keys = None
    if options.keys is not None:
        keys = Keys(
            file=options.keys,
            rate_per_minute=options.rate_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
    return ServeSettings(
        address=Address(
            host=options.host,
            port=options.port,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            grace_seconds=options.grace_seconds,
        ),
        limits=HttpLimits(
            body_bytes=options.body_bytes,
            requests=options.requests,
            deadline_seconds=options.deadline_seconds,
        ),
        sizes=EngineSizes(
            rows=options.rows,
            context=options.context,
            chunk=options.chunk,
            page_size=options.page_size,
            pages=options.pages,
            cache=options.kv_dtype,
            queued=options.queued,
            strict=options.strict,
        ),
        batch=BatchOptions(delay_ms=options.delay_ms, strict=options.strict),
        layout=options.layout,
        precision=Precision(options.precision),
        traffic=_traffic(options),
        book=None if options.save_traffic is None else TrafficBook(options.save_traffic),
        keys=keys,
        model_control=options.model_control,
        log=LogForm(options.log),
        log_prompts=options.log_prompts,
        checkpoint=options.checkpoint,
        trust=options.trust,
    )


def _traffic(options: ServeOptions) -> "Mapping[str, ModelTraffic]":
    """What is expected of each model.

    Raises: as :func:`~systolic.serving.workload.read_traffic`, and
        OptionError: the file is about other models.
    """
    from systolic.serving.server import targets
    from systolic.serving.workload import read_traffic

    if options.traffic is None:
        return {}
    found = read_traffic(options.traffic)
    names = [one.name for one in targets(options.models)]
    if not any(name in found for name in names):
        raise OptionError(
            f"{options.traffic} is about {', '.join(found)}, and served are {', '.join(names)}; give one of them that name as NAME=DIR"
        )
    return found
