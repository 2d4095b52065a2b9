"""``systolic serve``, ``systolic batch``, and :func:`systolic.serve`, :func:`systolic.batch`: answers of trained models."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from systolic.core.arguments import OptionWords, Partner, command_of, explained_by
from systolic.core.errors import MissingExtraError, OptionError, extra
from systolic.core.option_words import path_text
from systolic.core.ranges import CONTEXT, COUNT, NOT_NEGATIVE, POSITIVE, Range
from systolic.core.reporter import reporter, working
from systolic.job import Precision, ServedCache
from systolic.steps.serving_layout import ServingLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from systolic.serving.http.keys import Keys
    from systolic.serving.offline.files import BatchProgress
    from systolic.serving.server import KeptPrograms
    from systolic.serving.workload import ModelTraffic

SERVE_USAGE = """usage: systolic serve MODEL... [options]
       systolic serve --keys FILE --new-key NAME

MODEL is a run, a Bundle, a Hugging Face folder or a GGUF file, as DIR or NAME=DIR. One port answers OpenAI's API, the
Open Inference Protocol and TensorFlow Serving's REST. Language models are batched continuously, all others dynamically.
The server listens at once and is ready (/health) when every program is compiled. After SIGTERM it ends when the
requests in flight have ended."""

BATCH_USAGE = """usage: systolic batch MODEL IN.jsonl OUT.jsonl [options]

Answers the requests of a file in OpenAI's batch format, each line exactly once. Rerun to continue.
A line is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or a body alone. Results are
appended as they complete, in any order. A line that cannot be answered gets a result with its error, and the exit code
is 1."""

FORMS = Literal["auto", "bf16", "f32"]
LOGS = Literal["auto", "json", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """A server that listens; its models may still be opened. Reporters are given it."""

    url: str
    models: tuple[str, ...]
    """Names of the models, as requests have them; one with several versions is here as often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEnd:
    """A server that has ended, with every request answered."""

    is_opening: bool
    """Whether a model was still being opened: the process then ends without its compiler's threads (:func:`os._exit`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey:
    """An API key that was added to a file, which keeps its hash alone."""

    name: str
    key: str


@command_of
def serve(  # noqa: PLR0913  the options of systolic serve
    models: Annotated[
        str | Path | Sequence[str | Path], OptionWords(tuple[str, ...], default=())
    ] = (),
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Range(least=0, most=65535)] = 8000,
    tls_cert: Path | str | None = None,
    tls_key: Path | str | None = None,
    keys: Path | str | None = None,
    new_key: str | None = None,
    rate_per_minute: Annotated[int, NOT_NEGATIVE, Partner("keys")] = 0,
    tokens_per_minute: Annotated[int, NOT_NEGATIVE, Partner("keys")] = 0,
    grace_seconds: Annotated[float, NOT_NEGATIVE] = 45.0,
    deadline_seconds: Annotated[float | None, POSITIVE] = None,
    body_bytes: Annotated[int, COUNT] = 64 << 20,
    requests: Annotated[int, COUNT] = 2048,
    queued: Annotated[int, COUNT] = 1024,
    rows: Annotated[int, COUNT] = 16,
    context: Annotated[int, CONTEXT] = 0,
    chunk: Annotated[int, COUNT] = 256,
    page_size: Annotated[int, COUNT] = 64,
    pages: Annotated[int, NOT_NEGATIVE] = 0,
    kv_dtype: ServedCache = ServedCache.plain,
    speculate: Annotated[int, Range(least=0, most=15)] = 0,
    adapter: Annotated[str | Sequence[str], OptionWords(tuple[str, ...], repeated=True)] = (),
    adapters: Annotated[int, NOT_NEGATIVE] = 0,
    adapter_rank: Annotated[int, NOT_NEGATIVE] = 0,
    layout: ServingLayout = ServingLayout(),  # noqa: B008 (frozen)
    precision: FORMS = "auto",
    delay_ms: Annotated[float, NOT_NEGATIVE] = 2.0,
    traffic: Path | str | None = None,
    save_traffic: Path | str | None = None,
    strict: bool = False,
    model_control: bool = False,
    log: LOGS = "auto",
    check_cache: bool = False,
    log_prompts: bool = False,
    checkpoint: str | int = "best",
    trust: bool = False,
) -> "ServerEnd | NewKey | list[KeptPrograms]":
    """Serves trained models: OpenAI's API, the Open Inference Protocol and TensorFlow Serving's REST on one port.

    Returns after SIGTERM or Ctrl-C, when every request is answered. SIGHUP reads the folders again: new and
    changed versions are added when they are ready, and deleted ones are removed when their requests have
    ended. The server logs to stderr.

    Args:
        models: Runs, Bundles, Hugging Face folders or GGUF files, each as DIR or NAME=DIR; a folder of folders 1, 2, ... holds versions.
        host: Address to listen on; 0.0.0.0 for all.
        port: Port; 0 takes a free one.
        tls_cert: Certificate chain (PEM), for HTTPS.
        tls_key: Private key of the certificate (PEM).
        keys: File of API keys' hashes; without it no key is required.
        new_key: Add a key with this name to the file, print it and exit.
        rate_per_minute: Requests per minute of a key; 0 sets no limit.
        tokens_per_minute: Tokens per minute of a key, prompts and answers together; 0 sets no limit.
        grace_seconds: Time for the requests in flight after a signal to stop.
        deadline_seconds: Time limit of each request.
        body_bytes: Largest body of a request.
        requests: Limit of requests that run or wait at once.
        queued: Requests for text that wait for their first step; more are refused with 429.
        rows: Texts that are continued at once.
        context: Tokens of a text, prompt and answer together, at least 2; 0 takes the model's own, at most 4,096.
        chunk: Largest number of prompt tokens that a step reads.
        page_size: Positions of a page of the cache.
        pages: Pages of the cache; 0 holds all texts at their longest.
        kv_dtype: Format of keys and values: plain is the compute dtype; int8 has a scale for each position and head; fp8 (e4m3) has none.
        speculate: Tokens to propose for a text at once, from what it says already, and to verify in one step; 0 proposes none.
        adapter: Low-rank adapter of the first model as NAME=DIR, a run of train sft --adapter lora or a PEFT folder; requests choose it by its name as their model.
        adapters: Adapters that the first model has room for, beside every matrix; 0 takes those of --adapter, beside theirs. With --model-control clients load others.
        adapter_rank: Rank that every adapter is padded to; 0 takes the largest of --adapter, and 16 at least with --adapters.
        layout: Devices of each language model.
        precision: Precision of the computation. auto takes a run's own; models in files use bf16 on TPUs and GPUs and f32 on CPUs.
        delay_ms: Longest wait of a request for others to share its batch, for models without text output.
        traffic: Traffic to choose the sizes of programs for: a file of --save-traffic, or a server's log in JSON.
        save_traffic: Write each model's traffic to this file when the server ends.
        strict: End a model that compiles a program after it was ready. Such compiles are always counted.
        model_control: Let clients unload and load these models, as on Triton: /v2/repository/models/NAME/unload and /load.
        log: Format of the log: text for people, json for programs; auto writes text if stderr is a terminal.
        check_cache: Print which compiled programs are cached, and why the others are not, then exit. Nothing is compiled.
        log_prompts: Write prompts to the log.
        checkpoint: Checkpoint of a run: best, last or the number of a step.
        trust: Execute the run's recipe even if it is another user's; its digest is remembered for later commands.

    Returns:
        How the server ended. With ``new_key`` the key, with ``check_cache`` the programs of each model, without serving.

    Raises:
        MissingExtraError: the packages of the extra ``serve`` are not installed.
        NotFoundError: there is no such model or file.
        OptionError: options contradict each other, a name is repeated or not valid in a path of the server, or the host is no address of this machine.
        RunError: a model can't be opened, or the port can't be listened on.
    """
    words = [path_text(model) for model in ([models] if isinstance(models, str | Path) else models)]
    with extra("systolic serve", "serve"):
        from systolic.serving.http.process import Address
    from systolic.serving import server
    from systolic.serving.workload import TrafficBook

    if new_key is not None:
        return _added_key(new_key, keys)
    if not words:
        raise OptionError(
            "systolic serve needs a model; give a run, a Bundle or a Hugging Face folder"
        )
    served_targets = server.targets(words)
    adapted = server.adapter_settings(adapter, served_targets, adapters, adapter_rank)
    names = tuple(target.name for target in served_targets)
    settings = server.ServeSettings(
        address=Address(
            host=host,
            port=port,
            tls_cert=None if tls_cert is None else Path(tls_cert),
            tls_key=None if tls_key is None else Path(tls_key),
            grace_seconds=grace_seconds,
        ),
        limits=server.HttpLimits(
            body_bytes=body_bytes, requests=requests, deadline_seconds=deadline_seconds
        ),
        sizes=server.EngineSizes(
            rows=rows,
            context=context,
            chunk=chunk,
            page_size=page_size,
            pages=pages,
            cache=kv_dtype,
            queued=queued,
            strict=strict,
            speculate=speculate,
            adapters=adapted.count,
        ),
        adapters=adapted,
        batch=server.BatchOptions(delay_ms=delay_ms, strict=strict),
        layout=layout,
        precision=Precision(precision),
        traffic={} if traffic is None else _traffic(Path(traffic), names),
        book=None if save_traffic is None else TrafficBook(Path(save_traffic)),
        keys=_allowed(keys, rate_per_minute, tokens_per_minute),
        model_control=model_control,
        log=log,
        log_prompts=log_prompts,
        checkpoint=str(checkpoint),
        trust=trust,
    )
    if check_cache:
        return server.kept_programs(words, settings)

    def listening(number: int) -> None:
        scheme = "https" if tls_cert else "http"
        reporter().update(Listening(url=f"{scheme}://{host}:{number}", models=names))

    return ServerEnd(is_opening=not server.serve(words, settings, listening))


def _added_key(name: str, file: Path | str | None) -> NewKey:
    """A new key, whose hash is in the file.

    Raises: as :func:`~systolic.serving.http.keys.new_key`, and
        OptionError: there is no file.
    """
    from systolic.serving.http.keys import new_key

    if file is None:
        raise OptionError("--new-key needs the file that it is added to; add --keys FILE")
    return NewKey(name=name, key=new_key(Path(file), name))


def _allowed(file: Path | str | None, requests: int, tokens: int) -> "Keys | None":
    """Keys of a file, with what each may ask in a minute; ``None`` lets everyone in."""
    from systolic.serving.http.keys import Keys

    if file is None:
        return None
    return Keys(file=Path(file), rate_per_minute=requests, tokens_per_minute=tokens)


def _traffic(file: Path, names: Sequence[str]) -> "Mapping[str, ModelTraffic]":
    """Traffic that is expected of each model.

    Raises: as :func:`~systolic.serving.workload.read_traffic`, and
        OptionError: the file is about other models.
    """
    from systolic.serving.workload import read_traffic

    known = read_traffic(file)
    if not any(name in known for name in names):
        raise OptionError(
            f"{file} is about {', '.join(known)}, and served are {', '.join(names)}; give one of them that name as NAME=DIR"
        )
    return known


@command_of
@explained_by(serve)
def batch(  # noqa: PLR0913  the options of systolic batch
    model: Annotated[str | Path, OptionWords(str)],
    source: Path | str,
    out: Path | str,
    *,
    in_flight: Annotated[int, NOT_NEGATIVE] = 0,
    rows: Annotated[int, COUNT] = 16,
    context: Annotated[int, CONTEXT] = 0,
    chunk: Annotated[int, COUNT] = 256,
    page_size: Annotated[int, COUNT] = 64,
    pages: Annotated[int, NOT_NEGATIVE] = 0,
    kv_dtype: ServedCache = ServedCache.plain,
    speculate: Annotated[int, Range(least=0, most=15)] = 0,
    adapter: Annotated[str | Sequence[str], OptionWords(tuple[str, ...], repeated=True)] = (),
    precision: FORMS = "auto",
    checkpoint: str | int = "best",
    trust: bool = False,
) -> "BatchProgress":
    """Answers the requests of a file in OpenAI's batch format, each line exactly once. Rerun to continue.

    Ctrl-C ends it when the lines in flight have their results; a second one ends it at once.

    Args:
        model: A run, a Bundle, a Hugging Face folder or a GGUF file, as DIR or NAME=DIR.
        source: The requests (.jsonl).
        out: The results (.jsonl); the lines that it has are not asked again.
        in_flight: Lines in flight at once; 0 takes twice --rows, and 128 for models without text output.
        adapter: Low-rank adapter of the model as NAME=DIR, a run of train sft --adapter lora or a PEFT folder; lines choose it by its name as their model.

    Returns:
        Numbers of lines with a result and of failed lines; ``answered`` is below ``lines`` after Ctrl-C.

    Raises:
        MissingExtraError: the packages of the extra ``serve`` are not installed.
        NotFoundError: there is no such model or file.
        OptionError: an adapter has no name, or that of the model, or belongs to another model.
        DataError: the file is no batch of requests, or the output has results of another model, other adapters or other options.
        RunError: the model stopped, or the disk is full; rerun to continue.
    """
    try:
        from systolic.serving import server
        from systolic.serving.offline.batch import run_batch

        adapted = server.adapter_settings(adapter, server.targets([path_text(model)]))
        settings = server.ServeSettings(
            sizes=server.EngineSizes(
                rows=rows,
                context=context,
                chunk=chunk,
                page_size=page_size,
                pages=pages,
                cache=kv_dtype,
                speculate=speculate,
                adapters=adapted.count,
            ),
            adapters=adapted,
            precision=Precision(precision),
            checkpoint=str(checkpoint),
            trust=trust,
        )
    except ImportError as error:
        raise MissingExtraError("systolic batch", "serve") from error
    with working(f"batch {path_text(model)}"):
        return run_batch(path_text(model), Path(source), Path(out), settings, in_flight)
