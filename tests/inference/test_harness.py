"""``systolic eval --harness``: lm-evaluation-harness asks a server of the run, as its users do."""

import json
import math
import os
import sys
from pathlib import Path

import httpx
import pytest

import systolic
from systolic.core.errors import MissingExtraError, OptionError
from systolic.inference.evaluation import _is_ready, _keep, _served, _tokenizer
from tests.cli.tiny import job
from tests.serving.http.running import echo_model, running

TEXTS = ["def f(x):\n    return x\n", "import os\n"]
TASK = """
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.mark.slow
def test_the_harness_finds_what_the_model_says_of_each_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    run = systolic.train(job(), run=tmp_path / "run").run
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/lines.yaml").write_text(TASK.format(rows=rows))
    made = systolic.evaluate(run, harness="lines", harness_tasks=tmp_path / "tasks")
    # By hand: each text behind the token with which texts begin, a byte a token.
    total = 0.0
    with _served(run, ()) as url, httpx.Client(base_url=url, timeout=60) as http:
        about = http.get("/tokenizer_info").json()
        start = about.get("bos_token_id") or about["eos_token_id"]
        for text in TEXTS:
            body = {"model": "model", "prompt": [start, *text.encode()], "max_tokens": 0}
            answer = http.post("/v1/completions", json={**body, "echo": True, "logprobs": 1}).json()
            total += sum(answer["choices"][0]["logprobs"]["token_logprobs"][1:])
    count = sum(map(len, TEXTS))
    assert made.metrics["lines"]["bits_per_byte"] == pytest.approx(
        -total / count / math.log(2), rel=1e-4
    )
    kept = min((run / "harness").iterdir())
    assert json.loads(kept.read_text())["results"]["lines"]
    assert made.step == 5  # of tests.cli.tiny's run
    opened = systolic.open(run, checkpoint="last")
    assert systolic.evaluate(opened, harness="lines", harness_tasks=tmp_path / "tasks").step == 5
    assert "NO_PROXY" not in os.environ
    with pytest.raises(OptionError, match="the harness has no task lanes"):
        systolic.evaluate(run, harness="lanes", harness_tasks=tmp_path / "tasks")


def test_the_extra_is_named_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        MissingExtraError, match=r"harness needs .* pip install 'systolic\[harness\]'"
    ):
        systolic.evaluate(tmp_path, harness="hellaswag")


def test_the_harness_takes_no_other_data(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has data of its own; leave out"):
        systolic.evaluate(tmp_path, harness="hellaswag", batches=2)


def test_a_harness_without_a_task_says_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"harness names no task; give some, such as"):
        systolic.evaluate(tmp_path, harness=" , ")


def test_results_of_a_bundle_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    _keep(tmp_path / "bundle", {"results": {}})
    assert list((tmp_path / "bundle").iterdir()) == []  # which lists its files, and has no others
    (kept,) = (tmp_path / "bundle.harness").iterdir()
    assert json.loads(kept.read_text()) == {"results": {}}
    (tmp_path / "file.harness").write_text("")  # no folder can be made of it: a warning
    _keep(tmp_path / "file", {"results": {}})


def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with running([echo_model()]) as server:
        assert _is_ready(server.url)
        assert _tokenizer(server.url, Path("echo"))["model_max_length"] > 0
