"""What whoever starts a server reads."""

import io

from systolic.job.serving_memory import ServingMemory
from systolic.serving.batch.buckets import Shapes, choose
from systolic.serving.facts import CompileFacts
from systolic.serving.http.metrics import (
    BatchLoadMetrics,
    BatchMetrics,
    Metrics,
    TextLoadMetrics,
    TextMetrics,
)
from systolic.serving.http.telemetry import ConsoleLog
from systolic.serving.text.buckets import Buckets, TextTraffic


def test_the_first_minute() -> None:
    file = io.StringIO()
    log, metrics = ConsoleLog(file), Metrics()
    log.write("opening", model="smol", version=1, path="bundles/smol")
    text = TextLoadMetrics("smol", TextMetrics(metrics).of("smol"), log)
    traffic = TextTraffic.assumed(512)
    text.sized(
        Buckets.of(traffic, rows=4, chunk=128, context=512, page_size=64, mixed=False),
        programs=21,
        kernel="ragged paged attention, 2 heads of 64 elements in a row of 128",
    )
    memory = ServingMemory(
        capacity_bytes=2**34,
        weights_bytes=2**29 + 2**21,
        adapters_bytes=2**21,
        temporary_bytes=2**27,
        page_bytes=2**20,
        page_size=64,
        pages=33,
    )
    text.measured(memory, 512)
    for done in range(1, 22):
        text.compiled(
            CompileFacts(bucket=f"p{done}", seconds=1.0, cached=False, done=done, programs=21)
        )
    batch = BatchLoadMetrics("pictures", BatchMetrics(metrics).of("pictures"), log)
    batch.sized(choose(Shapes(largest=8)))
    log.write("warm", model="smol", version=1, seconds=61.25)
    kinds = ("chat", "embedding", "image", "transcription", "tensors", "text")
    log.write(
        "ready",
        seconds=61.3,
        url="http://127.0.0.1:8000",
        models=[{"name": kind, "kind": kind} for kind in kinds],
        keys=True,
    )
    log.write("failed", error="it broke")
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= 100
    for line in (
        "reading smol from bundles/smol",
        "smol: 21 programs; expected padding, of assumed traffic:",
        "  pages are read by ragged paged attention, 2 heads of 64 elements in a row of 128",
        "  weights         512.0 MiB",
        "  adapters          2.0 MiB",
        "  room for 4 texts of 512 tokens at once",
        "compiling smol  21/21  p21",
        "pictures: 8 programs; expected padding, of assumed traffic:",
        "  batch         1, 2, 3, 4, 5, 6, 7, 8",
        "smol is ready after 61.2 s",
        "  curl http://127.0.0.1:8000/v1/chat/completions \\",
        '    -H "Authorization: Bearer $KEY" \\',
        '    -d @- <<< "{\\"instances\\": [{\\"b64\\": \\"$(base64 < picture.jpg)\\"}]}"',
        "error: it broke",
    ):
        assert line in shown, line
    # Where lines can't be overwritten, a tenth of the programs at a time.
    assert shown.count("compiling smol") == 10


def test_a_terminal_overwrites_the_line_of_compiles() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    log = ConsoleLog(file)
    log.write("compiled", model="m", program="decode 1, 2 pages", done=1, programs=2)
    log.write("compiled", model="m", program="decode 2, 2 pages", done=2, programs=2)
    log.write("warm", model="m", version=1, seconds=2.0)
    lines = file.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        "compiling m  1/2  decode 1, 2 pages",
        "compiling m  2/2  decode 2, 2 pages",
        "m is ready after 2.0 s\n",
    ]
