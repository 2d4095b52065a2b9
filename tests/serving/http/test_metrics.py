"""The documented metrics are those that there are."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from systolic.serving.http.metrics import PREFIX, BatchMetrics, Metrics, TextMetrics

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"


def test_documented_names_are_those_of_the_page() -> None:
    metrics = Metrics()
    TextMetrics(metrics), BatchMetrics(metrics)
    families = list(text_string_to_metric_families(metrics.page().decode()))
    own = {
        one.name.removeprefix(PREFIX) + ("_total" if one.type == "counter" else ""): one
        for one in families
        if one.name.startswith(PREFIX)
    }
    text = DOCS.read_text().partition("## Metrics")[2]
    named = re.findall(r"`([a-z0-9_]+)(?:\{([a-z_,]+)\})?`", text)
    documented = {name for name, _ in named if "_" in name or name == "ready"}
    labels = {"model_name"}
    assert documented - labels == set(own)
