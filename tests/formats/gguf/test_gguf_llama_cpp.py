"""Files written here in llama.cpp: the same tokens and the same greedy text. Needs its ``llama-server`` on the PATH."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import systolic
from systolic.cli.main import main
from systolic.job import Sampling
from tests import weights
from tests.formats import folders

pytestmark = pytest.mark.slow
GREEDY = Sampling(temperature=0)
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village,",
)
TOKENS = 24
START_SECONDS = 120


class Server:
    """llama.cpp's server of a file."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(self, path: str, **body: Any) -> Any:
        """The answer of a route."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())

    def complete(self, prompt: str) -> str:
        """The greedy continuation of a prompt."""
        asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
        return self.post("/completion", **asked)["content"]

    def chat(self, message: str) -> str:
        """The greedy answer to a message, by the file's chat template."""
        messages = [{"role": "user", "content": message}]
        asked = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
        return self.post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"]

    def tokens(self, text: str) -> list[int]:
        """Ids of a text as a prompt."""
        return self.post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]


@contextlib.contextmanager
def served(file: Path) -> Iterator[Server]:
    """A server of a file, with a cache in float32."""
    binary = shutil.which("llama-server")
    if binary is None:
        pytest.skip("needs llama-server of llama.cpp on the PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [binary, "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-c", "512"]
    words += ["-np", "1", "-t", "2", "--jinja"]
    words += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    log = file.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(START_SECONDS * 5):
            assert process.poll() is None, log.read_text()[-2000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield Server(port)
    finally:
        process.terminate()
        process.wait()


def same(file: Path, model: Any, prompts: Sequence[str], texts: Sequence[str]) -> list[str]:
    """The greedy texts of a file in llama.cpp, whose tokens are compared with those of our model's tokenizer."""
    tokenizer = model.job.data.get_tokenizer()
    with served(file) as server:
        for text in texts:
            assert server.tokens(text) == tokenizer.prompt(text), text
        return [server.complete(prompt) for prompt in prompts]


TEXTS = (
    *PROMPTS,
    "  Two  spaces,\n\n\ta tab, naïve 東京 🙂 1234567 it's",
    "for (int i = 0; i < n; ++i) { a[i] += 3.14; }",
)


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_smollm2_says_the_same(tmp_path: Path, precision: str) -> None:
    systolic.import_model(weights.smollm2(), tmp_path / "smollm2", parity=False)
    file = tmp_path / "smollm2.gguf"
    made = systolic.export(tmp_path / "smollm2", file, to="gguf", precision=precision)
    assert made.parity.max_relative < (1e-6 if precision == "f32" else 2e-3)
    model = systolic.open(tmp_path / "smollm2")
    ours = model.generate(PROMPTS, tokens=TOKENS, sampling=GREEDY)
    assert same(file, model, PROMPTS, TEXTS) == ours
    with served(file) as server:
        asked = "What is the capital of France?"
        (answer,) = model.generate([asked], tokens=TOKENS, sampling=GREEDY, chat=True)
        assert server.chat(asked) == answer == "The capital of France is Paris."


def test_q8_0_of_smollm2_is_what_llama_cpp_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = shutil.which("llama-quantize")
    if quantizer is None:
        pytest.skip("needs llama-quantize of llama.cpp on the PATH")
    file, wide, theirs = (tmp_path / f"{name}.gguf" for name in ("q8_0", "f32", "theirs"))
    made = systolic.export(weights.smollm2(), file, to="gguf", precision="q8_0")
    assert made.parity.argmax_agreement > 0.95
    assert made.bytes < 1.1 * made.parameters * 34 / 32
    # The tensors are compared below: their logits need no comparison.
    monkeypatch.setattr("systolic.formats.gguf.writer.no_room", lambda elements: "left out")
    systolic.export(weights.smollm2(), wide, to="gguf", precision="f32")
    subprocess.run([quantizer, wide, theirs, "q8_0", "2"], check=True, capture_output=True)
    ours, other = ({t.name: t for t in gguf.GGUFReader(one).tensors} for one in (file, theirs))
    assert set(ours) == set(other)
    for name, tensor in ours.items():
        assert tensor.tensor_type == other[name].tensor_type, name
        np.testing.assert_array_equal(tensor.data, other[name].data)
    with served(file) as server:
        assert server.complete(PROMPTS[0]).startswith(" Paris")


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_gemma_3_says_the_same(tmp_path: Path, precision: str) -> None:
    source = weights.gemma(tmp_path)
    file = tmp_path / "made.gguf"
    made = systolic.export(source, file, to="gguf", precision=precision)
    assert made.parity.max_relative < (1e-4 if precision == "f32" else 5e-3)
    model = systolic.open(source)
    ours = model.generate(PROMPTS, tokens=TOKENS, sampling=GREEDY)
    assert same(file, model, PROMPTS, TEXTS) == ours


def test_what_was_trained_here_says_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = folders.folder(tmp_path / "words")
    text = tmp_path / "text.txt"
    text.write_text("the capital of France is Paris, the capital of Italy is Rome\n" * 200)
    options = ["--path", str(text), "--tokenizer", str(tokenizer / "tokenizer.json")]
    options += ["--steps", "60", "--sequence", "32", "--batch", "4", "--model.layers", "2"]
    options += ["--model.d-model", "64", "--model.d-ff", "128", "--model.heads", "2"]
    options += ["--model.head-dim", "32", "--model.kv-heads", "1"]
    run, file = tmp_path / "run", tmp_path / "run.gguf"
    assert main(["train", "lm", *options, "--run", str(run), "--json"]) == 0
    assert main(["export", str(run), "--to", "gguf", "--out", str(file)]) == 0
    assert "same next token at 100.0%" in capfd.readouterr().out
    model = systolic.open(run)
    prompts = ["the capital", "of Italy"]
    ours = model.generate(prompts, tokens=TOKENS, sampling=GREEDY)
    # One begins with the token that begins a text, as in training.
    assert same(file, model, prompts, [*prompts, "Rome is, 12"]) == ours
