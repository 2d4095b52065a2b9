"""``systolic serve`` as a process, with models that compute."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

import systolic
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError, SystolicError
from systolic.data import fingerprint
from systolic.data.text.text_data import TextData
from systolic.formats import outline
from systolic.formats.outline import contents_of, weight_bytes
from systolic.formats.source import open_source
from systolic.inference.model import open_model, prepare_model
from systolic.planning.serving import plan_serving
from systolic.serving.command import NewKey
from systolic.serving.http.keys import HttpLimits
from systolic.serving.http.metrics import Metrics
from systolic.serving.http.process import Address
from systolic.serving.http.state import ServerState
from systolic.serving.registry import ModelLoad, ModelRegistry
from systolic.serving.request import ModelKind
from systolic.serving.server import ServeSettings, _changes, serve, targets
from systolic.serving.text.opening import EngineSizes, context_of
from tests.formats import folders
from tests.formats.test_sentences import folder as encoder_folder
from tests.serving.http.running import toy_model

ROOT = Path(__file__).parents[2]
SMALL = ("--rows", "4", "--context", "192", "--chunk", "64")


def test_names_and_versions(tmp_path: Path) -> None:
    for name in ("a", "b/1", "b/12", "c/1", "c/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "c" / "config.json").write_text("{}")  # a model, which may have folders
    found = targets([str(tmp_path / "a"), f"bees={tmp_path / 'b'}", str(tmp_path / "c")])
    assert [(one.name, one.version, one.path.name) for one in found] == [
        ("a", 1, "a"),
        ("bees", 1, "1"),
        ("bees", 12, "12"),
        ("c", 1, "c"),
    ]
    with pytest.raises(NotFoundError, match="does not exist"):
        targets([str(tmp_path / "nothing")])
    with pytest.raises(OptionError, match="no name for a model"):
        targets([f"a b={tmp_path}"])
    (tmp_path / "my run").mkdir()
    with pytest.raises(OptionError, match=f"write NAME='{tmp_path}/my run' with letters"):
        targets([str(tmp_path / "my run")])
    with pytest.raises(OptionError, match="two models are called a"):
        targets([str(tmp_path / "a"), f"a={tmp_path / 'b'}"])


@pytest.mark.parametrize("stray", ["3.tmp/", ".DS_Store", "README.md", "4"])
def test_something_else_among_versions_retires_none(tmp_path: Path, stray: str) -> None:
    for version in ("1", "2"):
        (tmp_path / "m" / version).mkdir(parents=True)
    models = [toy_model(ModelKind.tensors, "m", version) for version in (1, 2)]
    state = ServerState(registry=ModelRegistry(models), limits=HttpLimits(), metrics=Metrics())

    def changes() -> Any:
        found = _changes(
            [str(tmp_path / "m")], state, lambda target: pytest.fail(str(target)), str, None
        )
        return found.added, found.gone

    assert changes() == ([], [])
    path = tmp_path / "m" / stray
    path.mkdir() if stray.endswith("/") else path.write_text("")
    assert changes() == ([], [])


def test_names_that_paths_can_not_have(tmp_path: Path) -> None:
    (one,) = targets([f"org/model={tmp_path}"])
    assert one.name == "org/model"
    for name in ("/a", "a/", "a//b", "a/../b", "a/.b", "a:b", "a" * 129):
        with pytest.raises(OptionError, match="is no name for a model"):
            targets([f"{name}={tmp_path}"])
    with pytest.raises(OptionError, match="'org/ready' has the part 'ready', which follows"):
        targets([f"org/ready={tmp_path}"])


def test_a_folder_with_other_contents_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "m", folders.llama(num_hidden_layers=1)
    folders.folder(path, model)
    weights = path / "model.safetensors"
    served = replace(toy_model(ModelKind.tensors, "m"), contents=contents_of(path, "best"))
    state = ServerState(registry=ModelRegistry([served]), limits=HttpLimits(), metrics=Metrics())

    def changed() -> bool:
        found = _changes(
            [str(path)],
            state,
            lambda target: ModelLoad(key=(target.name, target.version), open=lambda: served),
            lambda target: contents_of(target.path, "best"),
            "m",
        )
        assert [*found.unchanged, *(one.key for one in found.added)] == [("m", 1)]
        assert not found.gone
        return bool(found.added)

    before = {file: file.read_bytes() for file in path.iterdir()}
    assert not changed()
    os.utime(weights)
    assert not changed()
    for file, other in (
        (weights, before[weights][:-1] + b"\1"),
        (weights, before[weights][:100]),  # it is being copied
        (path / "tokenizer_config.json", b"{}"),
    ):
        file.write_bytes(other)
        assert changed()
        file.write_bytes(before[file])
        assert not changed()
    # Where only a sample is read, the time of a large file counts.
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", fingerprint.BLOCK_BYTES)
    monkeypatch.setattr(outline, "LARGE_BYTES", 1 << 16)
    object.__setattr__(served, "contents", contents_of(path, "best"))
    assert not changed()
    sampled = open_source(path).fingerprint()
    weights.write_bytes(before[weights][:-1] + b"\1")
    assert open_source(path).fingerprint() == sampled
    assert changed()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--page-size", "7"], "--chunk is 256 and --page-size 7; give a --chunk that is a multiple of --page-size [option]"),
        (["--context", "1"], "--context is 1; it must be 0, or at least 2 [range]"),
        (["--deadline-seconds", "-5"], "--deadline-seconds is -5.0; it must be above 0 [range]"),
        (["--deadline-seconds", "nan"], "--deadline-seconds is nan, not a finite number; it must be above 0 [range]"),
    ],
)  # fmt: skip
def test_options_are_judged_before_the_server_listens(
    tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    assert main(["serve", str(tmp_path), *words]) == 2
    assert capsys.readouterr().err.splitlines() == [f"systolic: {told}"]


@pytest.mark.parametrize(
    ("scaling", "context", "longest"),
    [
        (None, 257, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1025, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 513, 512),
    ],
)
def test_a_context_beyond_the_models_is_refused_before_a_compile(
    tmp_path: Path,
    scaling: dict[str, Any] | None,
    context: int,
    longest: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folders.folder(tmp_path / "tiny", folders.llama(num_hidden_layers=1))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    steps = prepare_model(path).setup.steps
    data = steps.job.data
    assert isinstance(data, TextData)
    assert context_of(steps, data, EngineSizes(context=longest)) == longest
    told = f"--context is {context} and the model was made for texts of {longest} tokens; give --context {longest} or less"
    with pytest.raises(OptionError, match=told):
        context_of(steps, data, EngineSizes(context=context))
    # What is planned for a server refuses what the server does, before it compiles.
    told = f"prompt_tokens {longest} and output_tokens 1 are a context of {context} and the model was made for texts of {longest} tokens; give two that make {longest} or less"
    for target in (path, path / "config.json"):
        with pytest.raises(OptionError, match=told):
            plan_serving(
                str(target),
                on="v5e-1",
                requests_per_second=1,
                prompt_tokens=longest,
                output_tokens=1,
            )
        words = ["--on", "v5e-1", "--prompt-tokens", str(longest), "--output-tokens", "1"]
        assert main(["forecast", "--serve", str(target), *words]) == 2
        line = told.replace("prompt_t", "--prompt-t").replace("output_t", "--output-t")
        assert line in capsys.readouterr().err


@contextmanager
def served(*words: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server of a command line, ready, on a free port; its address and its process."""
    line = [sys.executable, "-m", "systolic", "serve", *words, "--port", "0", "--json"]
    # Its log goes where pytest shows it.
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        while httpx.get(f"{url}/health").status_code != 200:
            assert process.poll() is None, "it ended before it was ready"
            time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_that_is_told_to_end_while_it_compiles(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "tiny")
    line = [sys.executable, "-m", "systolic", "serve", str(path), "--port", "0", "--log", "json"]
    environment = {**os.environ, "SYSTOLIC_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for told in process.stderr:
            if json.loads(told)["event"] == "compiled":
                break
        process.terminate()
        events = [json.loads(told)["event"] for told in process.stderr]
    assert process.returncode == 0
    assert events[-1] == "ended"


@pytest.mark.slow
def test_a_language_model_and_vectors(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "tiny")
    encoder = tmp_path / "vectors"
    encoder_folder(encoder)
    prompts = ["the capital of", "a question", "yes or no, " * 9]
    model = open_model(path)
    expected = model.generate(prompts, tokens=16, sampling=greedy())
    assert weight_bytes(path) > weight_bytes(encoder)
    with served(str(path), f"org/vec={encoder}", *SMALL) as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        # The smaller one was ready first.
        assert [one.id for one in client.models.list()] == ["org/vec", "tiny"]
        ask: Any = {"model": "tiny", "max_tokens": 16, "temperature": 0}
        # All in one request, and so in one batch.
        made = client.completions.create(prompt=prompts, **ask)
        assert [one.text for one in made.choices] == expected
        parts = client.completions.create(prompt=prompts[2], stream=True, **ask)
        assert "".join(one.choices[0].text for one in parts) == expected[2]
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=16
        )
        said = model.generate("hi", tokens=16, sampling=greedy(), chat=True)
        assert [chat.choices[0].message.content] == said
        scored = client.completions.create(prompt=prompts[0], echo=True, logprobs=1, **ask)
        assert scored.choices[0].logprobs is not None
        assert scored.choices[0].logprobs.tokens is not None
        assert scored.choices[0].logprobs.tokens[:3] == ["the", " capital", " of"]
        vectors = client.embeddings.create(model="org/vec", input=["yes or no", "Rome"])
        alone = open_model(encoder).predict(["yes or no", "Rome"])
        for one, other in zip(vectors.data, alone, strict=True):
            assert one.embedding == pytest.approx(other["embedding"], abs=1e-5)
        text = httpx.get(f"{url}/metrics").text
        for name in ("tiny", "org/vec"):
            assert (
                f'recompile_after_ready_total{{engine="0",model_name="{name}",version="1"}} 0.0'
                in text
            )
        # It ends when its requests have, and says that all is well.
        texts: list[str] = []

        def last() -> None:
            texts.append(
                client.completions.create(prompt=prompts[0], **ask | {"max_tokens": 180})
                .choices[0]
                .text
            )

        asking = threading.Thread(target=last)
        asking.start()
        while "systolic:http_requests_in_flight 2.0" not in httpx.get(f"{url}/metrics").text:
            assert asking.is_alive(), "it was answered before the signal"
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert texts[0].startswith(expected[0])
        assert process.wait(20) == 0


def test_python_gives_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, keys = folders.folder(tmp_path / "tiny"), tmp_path / "keys.txt"
    capsys.readouterr()
    made = systolic.serve(keys=keys, new_key="alice")
    assert isinstance(made, NewKey)
    assert (made.name, capsys.readouterr()) == ("alice", ("", ""))
    assert made.key not in keys.read_text()
    assert main(["serve", "--keys", str(keys), "--new-key", "bob", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "bob"
    assert [line.split()[0] for line in keys.read_text().splitlines()] == ["alice", "bob"]

    found = systolic.serve(model, check_cache=True, rows=4, context=192, chunk=64)
    assert isinstance(found, list)
    assert capsys.readouterr() == ("", "")
    assert main(["serve", str(model), "--check-cache", "--json", *SMALL]) == 0
    shown = json.loads(capsys.readouterr().out)["models"]
    assert shown == [json.loads(json.dumps(one.to_json())) for one in found]
    assert len(shown[0]["programs"]) > 1
    for asked, told in (
        ({}, "systolic serve needs a model; give a run"),
        ({"new_key": "carol"}, "new_key needs the file that it is added to"),
        ({"models": "nowhere"}, "nowhere does not exist; give a run"),
        ({"models": [model, model]}, "two models are called tiny"),
        ({"models": model, "port": 70000}, "port is 70000; it must be at least 0"),
        ({"models": model, "precision": "f16"}, "precision is 'f16'; it takes 'auto'"),
    ):
        with pytest.raises(SystolicError) as raised:
            systolic.serve(**asked)
        assert str(raised.value).startswith(told)


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        # Said before a model is opened, in one line.
        assert main(["serve", str(tmp_path / "tiny"), "--port", str(port)]) == 1
        told = f"systolic: 127.0.0.1:{port} can't be listened on: another process listens there; choose another --port, or 0 for a free one [run]"
        assert capsys.readouterr().err.splitlines() == [told]
        with pytest.raises(NotFoundError, match=r"is no run, .*it holds models, give .*/tiny$"):
            serve([str(tmp_path)], ServeSettings(address=Address(port=port)))


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("nowhere.invalid", "is no address and no name that resolves here ("),
        # Of a net for documentation (RFC 5737), which no machine has.
        ("192.0.2.1", "is no address of this machine; give 127.0.0.1, 0.0.0.0 for all"),
    ],
)
def test_a_host_that_can_not_be_listened_on_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str, told: str
) -> None:
    (tmp_path / "config.json").touch()
    assert main(["serve", str(tmp_path), "--port", "0", "--host", host]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"systolic: --host {host} {told}")


def test_a_model_of_one_token_and_a_context_that_leaves_no_answer(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "tiny", folders.llama(max_position_embeddings=1))
    steps = prepare_model(path).setup.steps
    data = steps.job.data
    assert isinstance(data, TextData)
    with pytest.raises(OptionError, match="the context of tiny is 1, which leaves no token"):
        context_of(steps, data, EngineSizes())


@pytest.mark.slow
def test_versions_are_swapped_while_requests_run(tmp_path: Path) -> None:
    root, away = tmp_path / "tiny", tmp_path / "away"
    folders.folder(root / "1")
    folders.folder(tmp_path / "next")
    small = ("--rows", "2", "--context", "64", "--chunk", "64", "--model-control")
    with served(str(root), *small) as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done, problems, answers = threading.Event(), [], []

        def ask() -> None:
            while not done.is_set():
                try:
                    parts = client.completions.create(
                        model="tiny", prompt="a question", max_tokens=12, stream=True
                    )
                    answers.append(list(parts)[-1].choices[0].finish_reason)
                except Exception as error:
                    problems.append(error)

        def versions() -> list[str]:
            return httpx.get(f"{url}/v2/models/tiny").json()["versions"]

        def measured() -> set[str]:
            page = httpx.get(f"{url}/metrics").text
            return set(re.findall(r'hbm_limit_bytes.*version="(\d+)"', page))

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()
        try:
            (tmp_path / "next").rename(root / "2")
            process.send_signal(signal.SIGHUP)
            while versions() != ["1", "2"]:
                assert process.poll() is None
                time.sleep(0.1)
            assert measured() == {"1", "2"}
            (root / "1").rename(away)
            process.send_signal(signal.SIGHUP)
            while versions() != ["2"] or measured() != {"2"}:
                time.sleep(0.02)
            reloaded(url, root / "2", client)
            assert measured() == {"2"}
            before = len(answers)
            while len(answers) < before + 6 and not problems:
                time.sleep(0.02)
        finally:
            done.set()
            for thread in asking:
                thread.join()
        assert problems == []
        assert set(answers) <= {"length", "stop"}


def reloaded(url: str, folder: Path, client: openai.OpenAI) -> None:
    """Loads a version as it was, with other weights, and with damaged ones."""
    load, file = f"{url}/v2/repository/models/tiny/load", folder / "model.safetensors"
    asked: Any = {"model": "tiny", "prompt": "a question", "max_tokens": 12, "temperature": 0}
    said = client.completions.create(**asked).choices[0].text
    assert httpx.post(load).json()["unchanged"] == [folder.name]
    before, other = file.read_bytes(), folders.llama()
    torch.nn.init.normal_(other.lm_head.weight)
    folders.folder(folder, other)
    assert httpx.post(load, timeout=200).json()["loaded"] == [folder.name]
    assert client.completions.create(**asked).choices[0].text != said
    file.write_bytes(before)
    assert httpx.post(load, timeout=200).json()["loaded"] == [folder.name]
    os.truncate(file, 100)
    assert client.completions.create(**asked).choices[0].text == said
    assert httpx.post(load, timeout=200).status_code == 500
    (state,) = httpx.post(f"{url}/v2/repository/index").json()
    assert (state["state"], "model.safetensors" in state["reason"]) == ("READY", True)


@pytest.mark.slow
def test_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    path = folders.folder(tmp_path / "tiny")
    os.truncate(path / "model.safetensors", 100)
    line = [sys.executable, "-m", "systolic", "serve", str(path), "--port", "0"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("systolic: ")


@pytest.mark.slow
def test_a_model_that_is_loaded_again_takes_the_memory_of_one(tmp_path: Path) -> None:
    encoder_folder(tmp_path / "vectors")
    file, held = tmp_path / "vectors" / "config.json", []
    config = json.loads(file.read_text())
    with served(str(tmp_path / "vectors"), "--strict", "--model-control") as (url, process):
        for number in range(7):
            body = {"model": "vectors", "input": ["a cat", "the kitten sat"]}
            assert httpx.post(f"{url}/v1/embeddings", json=body).status_code == 200
            held.append(psutil.Process(process.pid).memory_info().rss >> 20)
            file.write_text(json.dumps({**config, "note": number}))
            load = f"{url}/v2/repository/models/vectors/load"
            assert httpx.post(load, timeout=200).json()["loaded"] == ["1"]
    # The old programs of 90 MiB may end a moment after the new ones came, but none stay of the six before.
    assert held[-1] - held[0] < 130, held


@pytest.mark.slow
def test_the_journey_of_a_server_leaves_nothing() -> None:
    """A sample of benchmarks/serve/journey.py, whose ``faults`` are all that is wrong."""
    command = [sys.executable, "benchmarks/serve/journey.py", "--requests", "500", "--pool", "40"]
    done = subprocess.run(
        [*command, "--speculate", "4", "--turns", "1"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert report["requests"] == 500
    assert {"answered", "answered as alone", "left"} <= report["outcomes"].keys()
    assert report["log"]["replaced"] == 6  # chat, words and an adapter, twice each
    assert report["counters"]["num_preemptions_total"] > 0


def greedy() -> Any:
    from systolic.job import Sampling

    return Sampling(temperature=0.0)
