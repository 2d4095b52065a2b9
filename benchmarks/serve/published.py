"""Forecasts of served models against what others measured.

    python benchmarks/serve/published.py FILE.json [--out rows.jsonl] [--half fit|judge] [--exact] [--list]
    python benchmarks/serve/published.py FILE.json --table rows.jsonl

FILE.json holds records of published results: ``kind`` (``measured_engine``: a static batch without a server; ``measured``: a
server under load), model, slice, lengths, batch or concurrency. A static batch is one compiled step: its decode step is compiled for
the same slice, batch and context, simulated, and compared by the seconds of a token; the result beside it is its distance from the
bandwidth floor (bytes of weights and of keys and values over the memory's rate). jax-llm-examples' rows hold weights and
cache in int8; here the weights are in int8 and the cache in bf16. A server's row is compared with the forecast of continuous
batching, and its decode step alone says what scheduling, prompts in the step and tokenising add.

Rows are in two halves by the first hexadecimal digit of the SHA-256 of their id, even ``fit`` and odd ``judge``: causes of errors are looked
for in ``fit`` only. ``--out`` gets a JSON line a row; a rerun continues.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from known import Row, expressed
from records import check_out, lines, refuse, tabled

from systolic.aot import Compiler, ServingProgram
from systolic.chips import Slice
from systolic.chips.flags import resolved
from systolic.core.errors import SystolicError
from systolic.forecasting import forecast_program
from systolic.forecasting.serving import Load
from systolic.job import ServedWeights
from systolic.session.capacity import floor_seconds, forecast_serving, with_heads_for

CHUNK = 2048
"""Prompt tokens of a step where a record has no flag for it."""
ENGINE, SERVER = "measured_engine", "measured"


def half(row_id: Any) -> str:
    """``fit`` or ``judge``."""
    digit = int(hashlib.sha256(str(row_id).encode()).hexdigest()[0], 16)
    return "judge" if digit % 2 else "fit"


def weights_of(row: Row) -> ServedWeights:
    """The format of a record's weights."""
    quantised = "jax-llm-examples" in row["system"] or "int8" in str(row.get("dtype", ""))
    return ServedWeights.int8 if quantised else ServedWeights.plain


def compiler_for(on: Slice, quick: bool) -> Compiler:
    """The flags that jobs share on a chip."""
    compiler = Compiler(flags=resolved("", on.chip))
    return compiler.quick() if quick else compiler


def engine_row(row: Row, quick: bool) -> dict[str, Any]:
    """A static batch: its decode step."""
    job, on, departure = expressed(row)
    job = with_heads_for(job, job.layout.on(on.num_devices, on.num_slices).tensor)
    rate = row.get("decode_tok_s_per_sequence")
    if rate is None:
        raise SystolicError("the record has no tokens per second of a sequence")
    context = -(-int(row["context_len"]) // 128) * 128
    made = forecast_program(
        ServingProgram(
            job=job, rows=int(row["batch"]), tokens=1, context=context, weights=weights_of(row)
        ),
        job.name,
        on,
        compiler=compiler_for(on, quick),
    )
    if not made.fits or made.step_seconds is None:
        raise SystolicError(f"does not fit: {(made.rejected or {}).get('need_bytes')} bytes")
    measured, floor = 1 / float(rate), floor_seconds(made)
    assert floor is not None
    return {
        "measured_seconds": measured,
        "forecast_seconds": made.step_seconds,
        "floor_seconds": floor,
        "error": made.step_seconds / measured - 1,
        "departure": departure,
    }


def server_row(row: Row, quick: bool) -> dict[str, Any]:
    """A server under load: continuous batching, and its decode step alone."""
    job, on, departure = expressed(row)
    measured = row.get("output_tok_s")
    if measured is None or not isinstance(row.get("input_len"), int):
        raise SystolicError("the record has no output tokens per second, or no lengths")
    flags = str(row.get("server_flags", "")).replace("=", " ").split()
    chunk = CHUNK
    for name in ("--max-num-batched-tokens", "--chunked-prefill-size"):
        if name in flags:
            chunk = int(flags[flags.index(name) + 1])
    load = Load(
        prompt_tokens=row["input_len"],
        output_tokens=int(row["output_len"]),
        chunk=min(chunk, row["input_len"]),
    )
    asked = row["concurrency"] if isinstance(row["concurrency"], int) else None
    wanted = () if asked is None else (asked,)
    engine: dict[str, Any] = {"weights": weights_of(row), "compiler": compiler_for(on, quick)}
    made = forecast_serving(job, on, load, concurrency=wanted, **engine)
    if not made.points:  # More requests than fit: the others queue.
        made = forecast_serving(job, on, load, concurrency=(max(made.concurrency, 1),), **engine)
    if not made.points:
        raise SystolicError("does not fit")
    point = made.points[-1]
    step = max((one for one in made.steps if one.tokens == 1), key=lambda one: one.rows)
    rate = point.output_tokens_per_second
    floor = point.floor_output_tokens_per_second
    assert floor is not None
    assert step.floor_seconds is not None
    return {
        "concurrency": point.concurrency,
        "measured_tokens_per_second": measured,
        "forecast_tokens_per_second": rate,
        "floor_tokens_per_second": floor,
        "error": rate / measured - 1,
        "measured_token_seconds": _first(row, "mean_tpot_ms", "itl_ms"),
        "forecast_token_seconds": point.state.token_seconds,
        "step_seconds": step.seconds,
        "step_floor_seconds": step.floor_seconds,
        "measured_first_token_seconds": _first(row, "mean_ttft_ms"),
        "forecast_first_token_seconds": point.state.first_token_seconds,
        "departure": departure,
    }


def _first(row: Row, *names: str) -> float | None:
    return next((row[name] / 1e3 for name in names if row.get(name) is not None), None)


def forecast(row: Row, quick: bool) -> dict[str, Any]:
    """A record's line."""
    line = {
        "id": row["id"],
        "half": half(row["id"]),
        "kind": row["kind"],
        "name": f"{row.get('model', row['system'])} {row.get('slice', '')}".strip(),
        "case": _case(row),
        "mode": "quick" if quick else "exact",
    }
    try:
        return line | (engine_row if row["kind"] == ENGINE else server_row)(row, quick)
    except SystolicError as error:
        return line | {"reason": str(error)}


def _case(row: Row) -> str:
    if row["kind"] == ENGINE:
        return f"batch {row.get('batch')}, context {row.get('context_len')}"
    return f"{row.get('input_len')}/{row.get('output_len')}, {row.get('concurrency')} at once"


def table(found: Sequence[dict[str, Any]]) -> str:
    """All lines in Markdown: static batches, servers, and what can't be expressed."""
    engines = [row for row in found if row["kind"] == ENGINE and "error" in row]
    servers = [row for row in found if row["kind"] == SERVER and "error" in row]
    text = [
        "| static batch | case | half | measured, ms | forecast, ms | error | floor, ms | measured over floor | forecast over floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in engines:
        measured, made, floor = (
            row[name] for name in ("measured_seconds", "forecast_seconds", "floor_seconds")
        )
        text.append(
            f"| {row['name']} | {row['case']} | {row['half']} | {measured * 1e3:.2f} | {made * 1e3:.2f} | {row['error']:+.0%} | {floor * 1e3:.2f} | {measured / floor:.2f} | {made / floor:.2f} |"
        )
    text += ["", *summary("static batches", engines), ""]
    text += [
        "| server | case | half | measured, tokens/s | forecast | error | at the floor | per token, ms: measured | forecast | its step alone | first token, ms: measured | forecast |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in servers:
        text.append(
            f"| {row['name']} | {row['case']} | {row['half']} | {row['measured_tokens_per_second']:.0f} | {row['forecast_tokens_per_second']:.0f} | {row['error']:+.0%} | {row['floor_tokens_per_second']:.0f} | {_ms(row['measured_token_seconds'])} | {_ms(row['forecast_token_seconds'])} | {_ms(row['step_seconds'])} | {_ms(row['measured_first_token_seconds'])} | {_ms(row['forecast_first_token_seconds'])} |"
        )
    text += ["", *summary("servers", servers), "", "Not expressed:", ""]
    reasons: dict[str, list[str]] = {}
    for row in found:
        if "reason" in row:
            reasons.setdefault(row["reason"], []).append(str(row["id"]))
    text += [f"- {reason}: {', '.join(ids)}" for reason, ids in reasons.items()]
    return "\n".join(text)


def summary(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Mean absolute errors of all rows and of each half."""
    text = []
    for part in ("all", "fit", "judge"):
        errors = [abs(row["error"]) for row in rows if part in ("all", row["half"])]
        if errors:
            text.append(
                f"{name}, {part}: {len(errors)} rows, mean |error| {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}  "
            )
    return text


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def rows_of(path: Path) -> list[Row]:
    """The records of a file: a list, or an object with ``records``."""
    try:
        held = json.loads(path.read_text())
        found = held["records"] if isinstance(held, dict) else held
        return [row for row in found if row["id"] is not None and row["kind"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        refuse(f"{path} holds no records with id and kind ({type(error).__name__}: {error})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--half", choices=("fit", "judge"))
    parser.add_argument("--only", default="", help="ids, with commas")
    parser.add_argument("--kind", choices=(ENGINE, SERVER))
    parser.add_argument("--exact", action="store_true", help="full compiles, minutes a row")
    options = parser.parse_args()
    if options.table is not None:
        print(tabled(options.table, lines(options.table, "id", "kind", "half"), table))
        return
    check_out(options.out)
    there = options.out is not None and options.out.exists()
    known = {line["id"]: line for line in lines(options.out, "id")} if there else {}
    only = set(options.only.split(",")) if options.only else None
    found = []
    for row in rows_of(options.published):
        if options.half not in (None, half(row["id"])) or options.kind not in (None, row["kind"]):
            continue
        if only is not None and str(row["id"]) not in only:
            continue
        line = known.get(row["id"]) or forecast(row, not options.exact)
        found.append(line)
        if options.out is not None and row["id"] not in known:
            with options.out.open("a") as out:
                out.write(json.dumps(line) + "\n")
        print(json.dumps(line), file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
