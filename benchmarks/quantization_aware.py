"""Training with rounded matrices beside rounding afterwards: ``python benchmarks/quantization_aware.py TEXT [SEEDS] [FORMAT]``.

A small language model of bytes is trained on a text in bf16 and with ``--precision qat-FORMAT``, each with the same seeds; both runs are
quantized to the format as ``systolic quantize`` does it, and the perplexities are those of the validation split.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import systolic
from systolic.job import MatrixFormat, WeightFormat
from systolic.models.decoder.config import Decoder

STEPS, BATCHES = 200, 8
MODEL = Decoder(layers=2, d_model=64, d_ff=192, heads=4, kv_heads=2, head_dim=16, vocab=264)


def perplexities(
    text: str, seed: int, precision: str, kind: WeightFormat, home: Path
) -> tuple[float, float]:
    """Of a run and of its quantized Bundle."""
    run, out = home / f"{precision}-{seed}", home / f"{precision}-{seed}-{kind.value}"
    given = {"model": MODEL, "sequence": 64, "batch": 16, "steps": STEPS}
    systolic.train("lm", run=run, path=text, precision=precision, seed=seed, **given)
    how = MatrixFormat(format=kind, group=kind.group)
    made = systolic.quantize_model(run, out, to=how, batches=BATCHES)
    assert made.before is not None
    assert made.after is not None
    return made.before.value, made.after.value


def main(text: str, seeds: str = "3", name: str = "int4") -> None:
    """Prints a row for each seed, and the mean difference."""
    kind, ratios = WeightFormat(name), []
    print(f"| seed | bf16 | bf16, then {name} | qat-{name} | qat-{name}, then {name} |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(seeds)):
            each = [
                figure
                for precision in ("bf16", f"qat-{name}")
                for figure in perplexities(text, seed, precision, kind, Path(folder))
            ]
            print(f"| {seed} | {' | '.join(f'{one:.4f}' for one in each)} |", flush=True)
            ratios.append(each[3] / each[1] - 1)
    spread = statistics.stdev(ratios) if len(ratios) > 1 else float("nan")
    print(
        f"\nperplexity with qat over that without: {statistics.mean(ratios):+.2%}, deviation {spread:.2%}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
