"""A model is served in the precision that is asked for, whatever its files have."""

import io
import json
from pathlib import Path

import torch

from systolic.job import Precision
from systolic.serving.http.metrics import BatchMetrics, Metrics, TextMetrics
from systolic.serving.http.telemetry import EventLog
from systolic.serving.server import ServeSettings, open_served, targets
from systolic.serving.text.opening import EngineSizes
from tests.formats import folders


def test_files_in_bfloat16_are_served_in_the_precision_that_is_asked_for(tmp_path: Path) -> None:
    model = folders.llama(num_hidden_layers=1)
    target = targets([str(folders.folder(tmp_path / "tiny", model, dtype=torch.bfloat16))])[0]

    sizes = EngineSizes(rows=1, context=64, chunk=64)
    settings, metrics, log = (
        ServeSettings(sizes=sizes, precision=Precision.bf16),
        Metrics(),
        io.StringIO(),
    )
    assert ServeSettings().precision is Precision.auto
    open_served(target, settings, TextMetrics(metrics), BatchMetrics(metrics), EventLog(log))
    events = [json.loads(line) for line in log.getvalue().splitlines()]
    memory = next(event for event in events if event["event"] == "memory")
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    # Keys and values of two bytes each, where a CPU by default has four.
    assert memory["page_bytes"] == 64 * 2 * config.num_key_value_heads * head * 2
    # Its products of few rows are of float32 on a CPU, which is said with both sizes.
    said = [event["message"] for event in events if event["event"] == "warning"]
    assert sum("weights are held as float32" in line for line in said) == 1
