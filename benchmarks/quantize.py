"""Size, quality and speed of a model in each format of quantized weights.

    python benchmarks/quantize.py MODEL [--data FILE] [--calibrate FILE] [--formats int8 int4/32 nf4 …]

MODEL is a run, a Bundle, a Hugging Face folder, a GGUF file or torchvision's weights. A format is int8, fp8, int4 or nf4, with a group
as in int4/32; ``+`` after it fits the codes to the inputs of ``--calibrate``, as in int4/64+. Each is written as a Bundle, opened
again and measured:

- language models: perplexity of ``--data`` (``--batches`` of it), tokens a second of a prompt and of greedy generation;
- models of embeddings: cosines of the vectors of the lines of ``--data`` with those of the plain model, and how often the line
  that is nearest to each is the same;
- image models: accuracy of ``--data``, or of a run's own held-out data; for pictures without labels (a folder) how often the first
  class is that of the plain model;
- speech: word error rate on recordings as of whisper_wer.py.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import systolic
from systolic.core.errors import SystolicError
from systolic.core.units import si
from systolic.inference.latency import CallSizes, medians, timed_call
from systolic.inference.model import TrainedModel
from systolic.job import MatrixFormat, WeightFormat
from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.whisper.config import Whisper
from systolic.quantizing.quantize import Evaluated, QuantizedModel, quantize

FORMATS = ("int8", "fp8", "int4/32", "int4/64", "int4/128", "nf4/64")
SIZES = CallSizes(rows=1, prompt_tokens=64, output_tokens=32)
ROWS = 8
"""Of a call of models that write no text."""


def format_of(text: str) -> MatrixFormat:
    """``int4/32`` and the like."""
    name, _, group = text.removesuffix("+").partition("/")
    kind = WeightFormat(name)
    return MatrixFormat(format=kind, group=int(group) if group else kind.group)


Judge = Callable[[TrainedModel], str]
"""A quantized model's quality in words."""


def judge_of(model: TrainedModel, options: argparse.Namespace) -> Judge | None:
    """What measures quality that :func:`quantize_model` does not."""
    kind = model.job.model
    if isinstance(kind, Encoder) and not kind.head and options.data:
        return _vectors(model, Path(options.data).read_text().splitlines()[: options.lines])
    if isinstance(kind, Whisper):
        return _words(options.recordings)
    if options.pictures:
        return _classes(model, sorted(Path(options.pictures).iterdir()))
    return None


def _vectors(model: TrainedModel, lines: Sequence[str]) -> Judge:
    texts = [line for line in lines if line.strip()]

    def of(one: TrainedModel) -> np.ndarray:
        return np.array([answer["embedding"] for answer in one.predict(texts)])

    def nearest(vectors: np.ndarray) -> np.ndarray:
        return (vectors @ vectors.T - 2 * np.eye(len(texts))).argmax(1)

    plain = of(model)

    def judge(one: TrainedModel) -> str:
        made = of(one)
        cosines = (made * plain).sum(1)
        same = (nearest(made) == nearest(plain)).mean()
        return f"cosine {cosines.mean():.5f}, least {cosines.min():.5f}, same nearest of {len(texts)} {same:.1%}"

    return judge


def _classes(model: TrainedModel, files: Sequence[Path]) -> Judge:
    plain = [answer.get("label") for answer in model.predict(files)]

    def judge(one: TrainedModel) -> str:
        made = [answer.get("label") for answer in one.predict(files)]
        seen = [(a, b) for a, b in zip(plain, made, strict=True) if a is not None]
        return f"same class {sum(a == b for a, b in seen)} of {len(seen)}"

    return judge


def _words(count: int) -> Judge:
    from whisper_wer import SOUNDS, lines, rate

    known = {name: text for name, text in lines().items() if "[" not in text and "<" not in text}
    there = [name for name in known if (SOUNDS / f"{name}.wav").is_file()]
    short = [name for name in there if (SOUNDS / f"{name}.wav").stat().st_size <= 30 * 16_000]
    names = short[:: max(1, len(short) // count)][:count]

    def judge(one: TrainedModel) -> str:
        answers = one.predict([SOUNDS / f"{name}.wav" for name in names])
        share, wrong, words = rate(
            [known[name] for name in names], [answer["text"] for answer in answers]
        )
        return f"word error rate {share:.2%} ({wrong} of {words}, {len(names)} recordings)"

    return judge


def speed(model: TrainedModel, repeats: int) -> str:
    """Tokens or rows a second here."""
    if not repeats:
        return ""
    decoder = isinstance(model.job.model, Decoder)
    sizes = SIZES if decoder else CallSizes(rows=ROWS, prompt_tokens=64, output_tokens=1)
    call = timed_call(model.setup.steps, model.weights, sizes)
    (found,) = medians([call], repeats)
    if decoder:
        prompt = SIZES.prompt_tokens / found["prefill"]
        return f"{prompt:.0f} prompt, {1 / found['decode']:.1f} new tokens/s"
    return f"{call.sizes()['rows'] / found['call']:.1f} rows/s"


def told(made: QuantizedModel, model: TrainedModel, judge: Judge | None) -> str:
    """Quality of a quantized model beside the plain one's."""
    parts = []
    if made.before is not None and made.after is not None:
        lost = made.after.lost(made.before)
        change = f"{-100 * lost:+.2f} points" if made.before.name == "accuracy" else f"{lost:+.2%}"
        parts.append(f"{made.after.name} {made.after.value:.4f} ({change})")
    if judge is not None:
        parts.append(judge(model))
    return ", ".join(parts)


def row(text: str, plain: TrainedModel, judge: Judge | None, options: argparse.Namespace) -> str:
    """A format's cells."""
    on = Evaluated(
        data=None if isinstance(plain.job.model, Encoder) else options.data,
        batches=options.batches,
        calibration=options.calibrate if text.endswith("+") else None,
    )
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "bundle"
        made = quantize(options.model, out, to=format_of(text), on=on)
        model = systolic.open(out)
        share = f"{made.bytes_after / made.bytes_before:.1%}"
        size = si(made.bytes_after, "B")
        return f"| {text} | {size} | {share} | {told(made, model, judge)} | {speed(model, options.repeats)} |"


def main() -> None:
    """Prints a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder of pictures without labels")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--recordings", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5, help="0 times nothing")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    options = parser.parse_args()
    plain = systolic.open(options.model)
    judge = judge_of(plain, options)
    arrays: dict[str, Any] = {**plain.weights.params, **plain.weights.model_state}
    size = sum(array.nbytes for array in arrays.values())
    print("| format | weights | of before | quality | speed |\n|---|---|---|---|---|")
    own = "" if judge is None else judge(plain)
    print(f"| plain | {si(size, 'B')} | | {own} | {speed(plain, options.repeats)} |", flush=True)
    for text in options.formats:
        try:
            print(row(text, plain, judge, options), flush=True)
        except SystolicError as error:
            print(f"| {text} | {error} |", flush=True)
            print(f"{text}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
