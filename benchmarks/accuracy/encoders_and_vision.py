"""Models of published results beside decoders: encoders with masked tokens, residual networks with groups of batch norm.

What the records leave open comes from the submissions' own start scripts and configurations, named here.
"""

import re
from collections.abc import Mapping
from typing import Any

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    r"200b parameter dense": {"vocab": 32000, "mlp": "relu"},
    r"480b parameter dense": {"mlp": "swiglu"},
    r"bert": {"mlp": "gelu-tanh"},
}
"""By model: tensorflow/lingvo, lingvo/jax/tasks/lm/params/bert.py (BertSpmdL66H12kBiggerBatch8x8x16); the record's
inference from the number of parameters; google-research/bert, modeling.py, whose GELU is the tanh approximation."""
SHARE = 0.15
"""Of tokens that are masked, where a record does not say how many."""

PAIRED = "paired"
NORMS: Mapping[str, tuple[int, str]] = {
    "mlperf-v0.6-resnet50-tpu-v3-2048": (8, "imagenet"),
    "mlperf-v0.6-resnet50": (1, "imagenet"),
    "mlperf-v0.7-resnet50-tpu-v3-32-TF2.0": (1, "imagenet"),
    "mlperf-v0.7-resnet50-tpu-v4-512-TF": (4, PAIRED),
    "mlperf-v1.0-resnet50-tpu-v4-128-TF": (1, PAIRED),
    "mlperf-v1.0-resnet50-tpu-v4": (4, PAIRED),
}
"""Beginning of a record's name to replicas that share batch norm's statistics and the stem: distributed_group_size and
use_space_to_depth in Google/benchmarks/resnet/*/run_and_time.sh of mlcommons/training_results_v0.6, v0.7 and v1.0; the
TF2.0 submission has Keras' norm of a replica's own examples. The first that fits."""


def encoder(record: Mapping[str, Any], departures: list[str]) -> dict[str, Any]:
    """Options of the ``mlm`` recipe for the model and the predictions; ``vocab`` 0 where it is not known."""
    arch = {k: v for k, v in (record.get("arch") or {}).items() if v is not None}
    name = str(record.get("model")).lower()
    facts = next((f for pattern, f in ENCODERS.items() if re.search(pattern, name)), {})
    departures.append("no next-sentence loss and no dropout here")
    if "parameter dense" in name:
        departures.append("norms after sums here; theirs is Lingvo's transformer")
    sequence = record["seq_len"]
    places = arch.get("mlm_positions_per_sequence") or int(SHARE * sequence)
    sizes = {key: arch[key] for key in ("layers", "d_model", "d_ff", "heads")}
    vocab = arch.get("vocab") or facts.get("vocab") or 0
    rounded = -(-vocab // 128) * 128
    if rounded != vocab:
        departures.append(f"vocabulary {vocab} rounded up to {rounded}")
    model = {**sizes, "vocab": rounded, "mlp": facts.get("mlp", "gelu"), "positions": sequence}
    return {"model": model, "sequence": sequence, "predictions": places}


def residual(record: Mapping[str, Any], batch: int, departures: list[str]) -> dict[str, Any]:
    """Options of the ``image`` recipe for the network and its batch norm."""
    replicas = record["parallelism"]["ici"]["data"]
    known = next((v for name, v in NORMS.items() if record["id"].startswith(name)), None)
    if known is None:
        departures.append("batch norm over a replica's own examples: the group is not stated")
    group, stem = known or (1, "imagenet")
    return {
        "path": "imagenet",
        "classes": record["arch"]["classes"],
        "model": "resnet50",
        "stem": stem,
        "norm_examples": group * batch // replicas,
        "label_smoothing": 0.1,
    }
