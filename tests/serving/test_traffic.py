"""Traffic in files: from a server's log or its end to the sizes of programs, and the padding that was expected."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from systolic.core.errors import DataError, NotFoundError, OptionError, RunError
from systolic.serving.batch.buckets import Shapes, Traffic, choose
from systolic.serving.http.metrics import Metrics, TextMetrics
from systolic.serving.request import ModelKind
from systolic.serving.text.buckets import Buckets, TextTraffic
from systolic.serving.text.opening import open_engine
from systolic.serving.text.request import SamplingParams, TextRequest
from systolic.serving.workload import RecordedEngine, TrafficBook, read_traffic
from tests.serving.http.running import echo_model, running, toy_model
from tests.serving.text.engine import SIZES, shared


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "neither traffic in JSON nor a log"),
        ("{}", "no section of a model"),
        ("[1]", "no section of a model"),
        ('{"m": {}}', "no histograms of 'm'"),
        ('{"m": {"length": {"3": 1}}}', "has 'length' of 'm'; histograms are prompt_tokens"),
        ('{"m": {"lengths": [3]}}', "lengths of m is no histogram"),
        ('{"m": {"lengths": {"0": 1}}}', "has the size '0'"),
        ('{"m": {"lengths": {"-1": 1}}}', "has the size '-1'"),
        ('{"m": {"lengths": {"99999999999999999999": 1}}}', "sizes are 1 to 2147483647"),
        ('{"m": {"lengths": {"3": -1}}}', "counts 3 -1 times"),
        ('{"m": {"lengths": {"3": NaN}}}', "counts 3 nan times"),
        ('{"m": {"lengths": {"3": true}}}', "counts 3 True times"),
        ('{"m": {"lengths": {"3": 0}}}', "counts nothing"),
        ("[" * 100_000, "neither traffic in JSON nor a log"),
        ("\x00\xff", "neither traffic in JSON nor a log"),
        ('{"time": "", "event": "ready"}', "a log without answered texts"),
        (
            '{"event": "request", "model": [], "prompt_tokens": 3}',
            "neither traffic in JSON nor a log",
        ),
    ],
)
def test_a_file_that_is_no_traffic_is_refused_in_one_line(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "given"
    file.write_text(text)
    with pytest.raises(DataError) as refused:
        read_traffic(file)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(NotFoundError, match="not a file"):
        read_traffic(tmp_path)


def test_histograms_of_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text('{"m": {"prompt_tokens": {"3": 1}}, "v": {"lengths": {"3": 2}}}')
    found = read_traffic(file)
    assert found["v"].batch == Traffic(lengths={3: 2.0})
    with pytest.raises(OptionError, match=r"has prompt_tokens of m, .*; add output_tokens"):
        _ = found["m"].text
    with pytest.raises(
        OptionError, match=r"has lengths of v, .*; add prompt_tokens, output_tokens"
    ):
        _ = found["v"].text
    with pytest.raises(OptionError, match="takes lengths, examples; leave the others out"):
        _ = found["m"].batch


def test_a_log_is_traffic(tmp_path: Path) -> None:
    """What a server wrote, and what is lost of it."""
    words = toy_model(ModelKind.embedding, "words")
    with running([echo_model(), words]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        client.completions.create(model="echo", prompt="hello", max_tokens=8)
        client.completions.create(model="echo", prompt=["hello you", "hello me!"], max_tokens=3)
        client.completions.create(model="echo", prompt="hi", max_tokens=4, n=3)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="echo", prompt="", max_tokens=-1)
        client.embeddings.create(model="words", input=["one", "two", "three"])
        infer = {
            "inputs": [
                {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["fourteen words"]}
            ]
        }
        with server.client() as http:
            assert http.post("/v2/models/words/infer", json=infer).status_code == 200
    lines = server.lines.getvalue().splitlines()
    tokens = [one["prompt_tokens"] for one in server.log("request") if one.get("model") == "words"]
    file = tmp_path / "server.log"
    file.write_text("\n".join(["a library's warning", *lines, lines[-1][:-9]]))
    found = read_traffic(file)
    text = found["echo"].text
    assert text.prompts == {6: 1.0, 10: 2.0, 3: 1.0}  # Bytes, and what starts a prompt.
    assert text.answers == {8: 1.0, 3: 2.0, 4: 3.0}
    assert text.measured
    each, alone = round(tokens[0] / 3), tokens[1]
    assert found["words"].batch.lengths == {each: 3.0, alone: 1.0}


def test_what_is_saved_is_read_and_what_did_not_come_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    book = TrafficBook(file)
    assert book.save() == []
    assert not file.exists()
    book.batch("a").record(2, [5, 7])
    book.batch("quiet").record(2, [9])
    assert book.save() == ["a", "quiet"]
    later = TrafficBook(file)
    later.batch("a").record(1, [6])
    later.batch("quiet")
    assert later.save() == ["a"]
    found = read_traffic(file)
    assert found["a"].batch == Traffic(examples={1: 1.0}, lengths={6: 1.0})
    assert found["quiet"].batch == Traffic(examples={2: 1.0}, lengths={9: 1.0})
    other = tmp_path / "notes.json"
    other.write_text('{"mine": 1}')
    with pytest.raises(DataError, match="histograms"):
        TrafficBook(other)
    other.write_text("notes")
    with pytest.raises(DataError, match="holds no traffic; choose another"):
        TrafficBook(other)
    with pytest.raises((OptionError, RunError)):
        TrafficBook(other / "inside")


def test_no_traffic_moves_a_bucket_past_its_limits() -> None:
    draw = random.Random(0)

    def histogram() -> dict[int, float]:
        most = draw.choice([3, 90, 5000, 2**31 - 1])
        return {
            draw.randint(1, most): draw.choice([0.0, 1.0, 1e15])
            for _ in range(draw.choice([1, 5, 300]))
        }

    for _ in range(40):
        rows, page_size = draw.randint(1, 40), draw.choice([1, 8, 64])
        context = draw.randint(2, 3000)
        chunk = page_size * draw.randint(1, 8)
        traffic = TextTraffic(
            prompts=histogram(),
            answers=histogram() | {2: 1.0},
            reads=histogram(),
            running=histogram(),
        )
        made = Buckets.of(
            traffic, rows=rows, chunk=chunk, context=context, page_size=page_size, mixed=True
        )
        assert made.rows[-1] == rows
        assert made.lengths[-1] == chunk
        assert made.pages[-1] == -(-context // page_size)
        assert all(0 <= share < 1 for share in made.padding.values()), made.padding
        largest, positions = draw.randint(1, 40), draw.randint(1, 4000)
        shapes = Shapes(
            largest=largest,
            positions=positions,
            traffic=Traffic(lengths=histogram(), examples=histogram()),
        )
        for linear in (False, True):
            grid = choose(shapes, longest=512, linear=linear)
            assert (grid.rows[-1], grid.lengths[-1]) == (largest, 512)
            assert len(grid.all) <= 16
            assert 0 <= grid.padding_share < 1
            assert max(one.positions for one in grid.all) <= max(positions, 512 * grid.rows[0])


@pytest.mark.slow
def test_padding_is_what_was_expected_of_the_traffic(tmp_path: Path) -> None:
    """An engine that is asked what its sizes were chosen for, and records it again."""
    small, draw, metrics = shared(), random.Random(1), Metrics()
    requests = [
        TextRequest(
            tokens=[number, *range(1, draw.choice([3, 11, 14, 60]))],
            max_tokens=draw.choice([2, 5, 9]),
            sampling=SamplingParams(temperature=0.0),
            ignore_ends=True,
        )
        for number in range(24)
    ]
    prompts, answers = (
        {str(size): float(often) for size, often in sorted(Counter(sizes).items())}
        for sizes in ([len(one.tokens) for one in requests], [one.max_tokens for one in requests])
    )
    section = {"prompt_tokens": prompts, "output_tokens": answers, "read_tokens": prompts}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"m": section}))
    sizes = replace(SIZES, rows=1, programs=(1, 2, 1), traffic=read_traffic(given)["m"].text)
    book = TrafficBook(tmp_path / "saved.json")
    watcher = RecordedEngine(inner=TextMetrics(metrics).of("m"), recorder=book.text("m"))
    engine = open_engine(small.steps, small.params, small.rest, sizes, watcher)
    assert engine.runner.buckets.lengths == [16, 24]
    streams = [engine.submit(one) for one in requests]
    engine.start()
    for stream in streams:
        assert list(stream)[-1].finish == "length"
    assert engine.drain(20)
    at = {"model_name": "m", "version": "1", "engine": "0"}
    useful, padding = (
        metrics.registry.get_sample_value(f"systolic:{name}_tokens_total", at) or 0.0
        for name in ("useful", "padding")
    )
    expected = engine.runner.buckets.padding["all"]
    assert expected > 0.05
    assert padding / (useful + padding) == pytest.approx(expected, abs=0.005)
    # What it saves is what it was given.
    book.save()
    saved = json.loads(book.path.read_text())["m"]
    assert list(saved.pop("decode_rows")) == ["1"]
    assert saved == section
