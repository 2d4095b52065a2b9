"""``systolic batch``: killed and interrupted as a process, on a full disk, and with models that compute."""

import json
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError
from systolic.inference.model import open_model
from systolic.serving.http.metrics import TextMeter
from systolic.serving.offline import batch as batching
from systolic.serving.offline.batch import answerer_of
from systolic.serving.offline.files import LineProblem, digest_of, problem_line, result_id
from systolic.serving.server import ServeSettings, targets
from systolic.serving.text.request import TextOutput
from systolic.serving.text.sequence import EngineLoad
from tests.formats import folders
from tests.formats.test_sentences import folder as encoder_folder
from tests.serving.offline import batch_child
from tests.serving.text import test_adapters

CHILD = [sys.executable, "-m", "tests.serving.offline.batch_child"]


class Files:
    """An input of requests to a model that says the prompt again."""

    def __init__(self, folder: Path, lines: int) -> None:
        self.model, self.source, self.out = (folder / name for name in ("echo", "in.jsonl", "out"))
        self.model.mkdir()
        (self.model / "config.json").touch()
        self.lines = lines
        body = {"prompt": "hello", "max_tokens": 20}
        rows = [
            {"custom_id": f"n{n}", "url": "/v1/completions", "body": body} for n in range(lines)
        ]
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @property
    def words(self) -> list[str]:
        return [str(self.model), str(self.source), str(self.out)]

    def size(self) -> int:
        return self.out.stat().st_size if self.out.exists() else 0

    def start(self) -> "subprocess.Popen[str]":
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*CHILD, *self.words], **pipes)

    def here(self, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
        """Its exit code and what it prints, in this process."""
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batching, "open_served", batch_child.opened)
            patch.setattr(batching, "answerer_of", batch_child.answerer_of)
            code = main(["batch", *self.words, *more])
        return code, *capsys.readouterr()

    def reach(self, size: int, process: "subprocess.Popen[str]") -> None:
        """Waits until the output has so many bytes."""
        while self.size() < size and process.poll() is None:
            time.sleep(0.001)

    def finish(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Answers the rest; each line has one result then."""
        code, shown, told = self.here(capsys, "--json")
        assert code == 0, told
        summary = json.loads(shown)
        assert (summary["answered"], summary["failed"]) == (self.lines, 0)
        found = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert len(found) == self.lines
        assert {one["custom_id"] for one in found} == {f"n{n}" for n in range(self.lines)}
        assert all(one["response"]["body"]["choices"][0]["text"] for one in found)


def test_killed_at_any_moment_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, draw = Files(tmp_path, 400), random.Random(0)
    process = files.start()
    files.reach(int(files.lines * 350 * (0.2 + 0.1 * draw.random())) + 1, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 0 < files.size() < files.lines * 350
    files.finish(capsys)


def test_ctrl_c_ends_it_after_the_lines_in_flight(tmp_path: Path) -> None:
    files = Files(tmp_path, 600)
    process = files.start()
    files.reach(10_000, process)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"of {files.lines:,} lines answered" in out
    assert "run the same command again to continue" in told
    lines = [json.loads(line)["id"].split("_")[2] for line in files.out.read_text().splitlines()]
    # Those that were asked have their result: no gap before the last.
    assert sorted(map(int, lines)) == list(range(1, len(lines) + 1))
    assert 20 < len(lines) < files.lines


def test_a_full_disk_stops_it_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, limits = Files(tmp_path, 300), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        code, _, told = files.here(capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    opened, *failed = told.splitlines()
    assert opened.startswith("echo is ready after")
    assert len(failed) == 1
    assert "could not be written (File too large)" in told
    assert "run the same command again" in told
    lines = files.out.read_text().splitlines()
    assert len([json.loads(line) for line in lines]) > 50
    assert files.size() <= 30_000
    files.finish(capsys)


def test_an_output_that_is_complete_opens_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(tmp_path, 0)
    for _ in range(2):
        assert main(["batch", *files.words]) == 0
        assert capsys.readouterr() == (f"{files.out}: 0 of 0 lines answered\n", "")


def test_python_answers_what_the_command_answers_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    command, python = Files(tmp_path / "a", 5), Files(tmp_path / "b", 5)
    code, shown, told = command.here(capsys, "--quiet", "--json")
    assert (code, told) == (0, "")
    monkeypatch.setattr(batching, "open_served", batch_child.opened)
    monkeypatch.setattr(batching, "answerer_of", batch_child.answerer_of)
    done = systolic.batch(*python.words, rows=4, kv_dtype="int8")
    assert capsys.readouterr() == ("", "")
    assert (done.lines, done.answered, done.failed) == (5, 5, 0)
    assert done.completion_tokens == json.loads(shown)["completion_tokens"]

    def answers(path: Path) -> dict[str, str]:
        rows = map(json.loads, path.read_text().splitlines())
        return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}

    assert answers(command.out) == answers(python.out)
    with pytest.raises(
        OptionError, match=r"kv_dtype is 'int3'; did you mean int8\?; it takes plain, int8, fp8"
    ):
        systolic.batch(*python.words, kv_dtype="int3")  # ty: ignore[invalid-argument-type]


def test_proposals_change_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders.folder(tmp_path / "tiny", folders.llama(num_hidden_layers=1))
    body = {"prompt": "a question, a question, a question", "max_tokens": 40, "temperature": 0}
    source, accepted, texts = tmp_path / "in.jsonl", [], []
    source.write_text(json.dumps(body) + "\n")
    ended = TextMeter.ended

    def counted(self: TextMeter, output: TextOutput, load: EngineLoad) -> None:
        accepted.append(output.accepted_tokens)
        ended(self, output, load)

    monkeypatch.setattr(TextMeter, "ended", counted)
    for speculate in (0, 4):
        out = tmp_path / f"{speculate}.jsonl"
        systolic.batch(path, source, out, rows=1, context=64, chunk=64, speculate=speculate)
        texts.append(json.loads(out.read_text())["response"]["body"]["choices"])
    assert texts[0] == texts[1]
    assert accepted[0] == 0 < accepted[1]


def test_results_of_another_model_are_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folders.folder(tmp_path / "tiny")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def told(*more: str) -> str:
        capsys.readouterr()
        assert main(["batch", str(path), str(source), str(out), *more]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    answerer_of(targets([str(path)])[0], ServeSettings()).begin(out)
    problem = LineProblem("line-1", "invalid_body", "no")
    id = result_id(1, digest_of(b'{"prompt": "a"}'))
    out.write_bytes(problem_line(id, problem))
    assert "(context 0, now 64); use those again, or name another output" in told("--context", "64")
    assert "(precision f32, now bf16)" in told("--precision", "bf16")
    # A copy elsewhere is the same model; only the name is another.
    other = tmp_path / "copy"
    shutil.copytree(path, other)
    first, path = path, other
    assert "(model tiny, now copy)" in told()
    path = first
    (path / "tokenizer_config.json").rename(tmp_path / "kept")
    assert "(texts " in told()
    (tmp_path / "kept").rename(path / "tokenizer_config.json")
    model = folders.llama()
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2.0)
    model.save_pretrained(path)
    assert "(weights " in told()
    (tmp_path / "out.jsonl.model.json").unlink()
    assert "says which model gave them can't be read" in told()
    assert out.read_bytes() == problem_line(id, problem)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('systolic: 127.0.0.1 is ready\n{"prompt": 1', 'line 1 is no request (JSON is malformed'),
        ('\n{"time": "2026", "event": "ready"}\n', "line 2 is no request (there is no url; give a path"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_requests_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    """Before the model is opened: the log of a server, as text and as JSON."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    assert main(["batch", str(tmp_path / "tiny"), str(source), str(out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"systolic: {source}: {told}")
    assert 'nor is any other; each line is {"custom_id": "a", "method": "POST", "url": ' in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_language_model_and_vectors(tmp_path: Path) -> None:
    path, encoder = folders.folder(tmp_path / "tiny"), tmp_path / "vectors"
    encoder_folder(encoder)
    prompts = ["the capital of", "a question", "yes or no, " * 9, ""]
    rows = [{"prompt": text, "max_tokens": 16, "temperature": 0} for text in prompts]
    rows.append({"prompt": "yes", "max_tokens": 30, "guided_json": {"enum": ["né", 7]}})
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [sys.executable, "-m", "systolic", "batch", str(path), str(source), str(out)]
    small = ["--rows", "4", "--context", "192", "--chunk", "64"]
    done = subprocess.run([*line, *small], check=True, capture_output=True, text=True)
    phases = [f"reading {path.name} from", f"{path.name}: memory of", f"compiling {path.name}  "]
    for told in (*phases, f"{path.name} is ready after"):
        assert any(one.startswith(told) for one in done.stderr.splitlines()), told
    found = {row["custom_id"]: row["response"]["body"] for row in read(out)}
    from systolic.job import Sampling

    expected = open_model(path).generate(prompts, tokens=16, sampling=Sampling(temperature=0.0))
    assert [found[f"line-{n}"]["choices"][0]["text"] for n in (1, 2, 3, 4)] == expected
    assert json.loads(found["line-5"]["choices"][0]["text"]) in ("né", 7)
    source.write_text(json.dumps({"input": ["yes or no", "Rome"]}) + "\n")
    out = tmp_path / "vectors.jsonl"
    subprocess.run([*line[:4], str(encoder), str(source), str(out)], check=True)
    (row,) = read(out)
    alone = open_model(encoder).predict(["yes or no", "Rome"])
    for one, other in zip(row["response"]["body"]["data"], alone, strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lines_choose_adapters_by_name_and_get_what_a_server_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = folders.folder(tmp_path / "base", folders.llama(num_hidden_layers=1))
    few = test_adapters.peft_folder(tmp_path / "few", base, 1, 2, ["q_proj", "v_proj"])
    body = {"prompt": "a question", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    named = {"base": "base", "adapter": "org/few"}
    rows = {id: {"model": name, **body} for id, name in named.items()}
    rows |= {"unnamed": body, "unknown": {"model": "many", **body}}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": id, "url": "/v1/completions", "body": row} for id, row in rows.items()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", str(base), str(source), str(out)]
    small = ["--rows", "1", "--context", "64", "--chunk", "64", "--quiet"]
    adapter = ["--adapter", f"org/few={few}"]
    assert main([*words, *small, *adapter]) == 1  # For the line of a name that is not there.
    found = {row["custom_id"]: row["response"] for row in read(out)}
    assert found["unknown"]["status_code"] == 404
    message = found["unknown"]["body"]["error"]["message"]
    assert "there is no model 'many'; served are: base, org/few" in message
    texts = {id: row["body"]["choices"] for id, row in found.items() if id != "unknown"}
    assert found["adapter"]["body"]["model"] == "org/few"
    assert texts["unnamed"] == texts["base"] != texts["adapter"]
    with test_adapters.opened(base, adapters=1) as server, server.client() as client:
        place = {"lora_name": "org/few", "lora_path": str(few)}
        client.post("/v1/load_lora_adapter", json=place).raise_for_status()
        for id in named:
            response = client.post("/v1/completions", json=rows[id]).raise_for_status()
            assert response.json()["choices"] == texts[id]
    # Without the adapter, or with another one of its name, the results are those of another model.
    assert main([*words, *small]) == 1
    assert re.search(r"\(adapter org/few [0-9a-f]{16}, now none\)", capsys.readouterr().err)
    test_adapters.peft_folder(few, base, 3, 2, ["q_proj", "v_proj"])
    assert main([*words, *small, *adapter]) == 1
    told = capsys.readouterr().err
    assert re.search(r"\(adapter org/few [0-9a-f]{16}, now [0-9a-f]{16}\)", told)
    assert main([*words, *small, "--adapter", str(few)]) == 2
    assert "give NAME=DIR, such as support=" in capsys.readouterr().err


def read(out: Path) -> list[Any]:
    return [json.loads(line) for line in out.read_text().splitlines()]
