"""Progress of an offline batch in words."""

import io

from systolic.serving.http.telemetry import OpeningLog
from systolic.serving.offline.files import BatchProgress, line, summary


def test_generated_tokens_and_prompts_are_told_apart() -> None:
    done = BatchProgress(
        lines=4,
        earlier=0,
        answered=2,
        failed=0,
        prompt_tokens=3000,
        completion_tokens=50,
        seconds=10.0,
    )
    assert line(done) == ("2 of 4 lines, 5 generated tokens/s, 300 prompt tokens/s, 10.0 s left")
    assert summary(done, "out.jsonl").endswith(
        "; 50 generated and 3,000 prompt tokens in 10.0 s (5 generated tokens/s, 300 prompt tokens/s)"
    )
    vectors = BatchProgress(
        lines=2, earlier=0, answered=2, failed=0, prompt_tokens=100, seconds=10.0
    )
    assert summary(vectors, "out.jsonl").endswith(
        "; 100 prompt tokens in 10.0 s (10 prompt tokens/s)"
    )


def test_opening_is_told_in_lines_where_there_is_no_terminal() -> None:
    file, warnings = io.StringIO(), []
    log = OpeningLog(warnings.append, file)
    log.write("opening", model="tiny", version=1, path="models/tiny")
    for done in range(1, 41):
        log.write("compiled", model="tiny", program=f"p{done}", done=done, programs=40)
    log.warn("a file is damaged")
    log.write("request", id="req-1")
    told = file.getvalue().splitlines()
    assert told[0] == "reading tiny from models/tiny"
    assert len(told) == 11
    assert told[-1] == "compiling tiny  40/40  p40"
    assert warnings == ["a file is damaged"]
