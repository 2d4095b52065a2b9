"""Output of ``systolic generate``, ``predict``, ``eval`` and ``verify``."""

import json as jsons
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from systolic.core.units import si
from systolic.report.figures import plural
from systolic.report.output import StderrReporter, or_json, print_json, warn

if TYPE_CHECKING:
    from systolic.inference.results import (
        FileAnswer,
        GeneratedTexts,
        MeasuredModel,
        Predictions,
        TextPiece,
    )
    from systolic.inference.verification import Verified

SHOWN = 4
"""Numbers of a vector that are printed."""


class TextReporter(StderrReporter):
    """Prints a prompt and the text that continues it as it comes, an empty line before all but the first."""

    def update(self, state: "TextPiece") -> None:
        """Prints what came."""
        if self._json:
            return
        if state.begins:
            prompt = state.prompt
            shown = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
            before, after = "\n" if state.number else "", "\n" if state.is_chat else ""
            sys.stdout.write(f"{before}{shown}{after}")
        elif state.ends:
            sys.stdout.write("\n")
        else:
            sys.stdout.write(state.text)
            sys.stdout.flush()


def show_texts(texts: "GeneratedTexts", *, json: bool = False) -> int:
    """Prints generated texts, which the reporter has shown; returns the exit code.

    Args:
        texts: The texts.
        json: Print one JSON object at the end instead of streaming.
    """
    if json:
        print_json(texts.to_json())
    return 0


class AnswerReporter(StderrReporter):
    """Prints the answer for a file as it comes."""

    def update(self, state: "FileAnswer") -> None:
        """Prints it, of a table a line for each row."""
        if self._json:
            return
        if "rows" not in state.answer:
            print(f"{state.file}  {values_line(state.answer)}")
            return
        for number, row in enumerate(state.answer["rows"], 1):
            print(f"{state.file} row {number}  {values_line(row)}")


def show_predictions(predictions: "Predictions", *, json: bool = False) -> int:
    """Prints what was predicted and not shown yet; returns the exit code, 1 where a file has no answer.

    Args:
        predictions: The answers.
        json: Print one JSON object.
    """
    out, failed = predictions.out, predictions.failed
    if json:
        print_json(predictions.to_json())
    elif predictions.outputs:
        arrays = predictions.outputs.items()
        print(
            f"{out}: {', '.join(f'{name} {array.dtype}{list(array.shape)}' for name, array in arrays)}"
        )
    elif out is not None:
        print(f"{out}: answers for {plural(predictions.rows, 'row')}")
    if failed and out is None:
        warn(
            f"no answer for {failed} of {len(predictions.answers)} {predictions.inputs}; see the lines above"
        )
    return 1 if failed else 0


def values_line(answer: Mapping[str, Any]) -> str:
    """The values of an answer by name; one of several numbers that another name has already is not printed twice."""
    words, seen = [], dict[str, str]()
    for name, value in answer.items():
        text = _text(value)
        several = isinstance(value, list | dict) and len(value) > 1
        same = seen.setdefault(jsons.dumps(value), name) if several else name
        words.append(f"{name} {text}" if same == name else f"{name} as {same}")
    return "  ".join(words)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, list) and len(value) > SHOWN and isinstance(value[0], float):
        return (
            f"{' '.join(map(_text, value[:SHOWN]))} ... ({len(value)} numbers, --json prints all)"
        )
    return str(value)


@or_json
def show_metrics(measured: "MeasuredModel") -> None:
    """Prints metrics."""
    step = f", step {measured.step}" if measured.step else ""
    print(f"{measured.path}{step}")
    for name, values in measured.metrics.items():
        line = "  ".join(f"{key} {value:.4f}" for key, value in sorted(values.items()))
        print(f"  {name:<10}  {line}")
    for key, value in measured.baselines.items():
        print(f"  for comparison: {key} {value:.4f}")


@or_json
def show_verified(verified: "Verified") -> None:
    """Prints a Bundle that is intact."""
    size = si(verified.bytes, "B")
    print(f"{verified.path}: {verified.files} files, {size}, all as they were written")
    replay = verified.unreplayed if verified.replay is None else verified.replay.line()
    print("\n".join(f"  {line}" for line in (replay, *_lines(verified.about))))


def _lines(about: dict[str, Any]) -> list[str]:
    """Origin, versions, evaluations and licence, a line each."""
    source, recipe = about["source"], about["recipe"]
    by = "" if recipe is None else f", recipe {recipe['name']}"
    lines = [f"from the {source['kind']} {source['name']}{by}"]
    if about["versions"]:
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines.append(f"written by {versions}")
    for record in about["evaluations"]:
        lines.append(f"{record['on']} at step {record['step']}: {_metrics(record['metrics'])}")
        if record["before"] is not None:
            lines.append(f"{record['on']} before quantization: {_metrics(record['before'])}")
    lines.append(f"licence {about['licence'] or 'not recorded'}")
    return lines


def _metrics(metrics: dict[str, float | None]) -> str:
    return "  ".join(
        f"{name} {'no number' if value is None else f'{value:.4f}'}"
        for name, value in sorted(metrics.items())
    )
