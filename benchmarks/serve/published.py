"""Forecasts of served models against what others measured.

    python benchmarks/serve/published.py FILE.json [--out rows.jsonl] [--half fit|judge] [--exact] [--engine CLONE]
    python benchmarks/serve/published.py FILE.json --table rows.jsonl

FILE.json holds records of published results: ``kind`` (``measured_engine``: a static batch without a server; ``measured``: a
server under load; ``measured_step``: one step of a server, as in ``steps.json``), model, slice, lengths, batch or concurrency. A static batch is one compiled step: its decode step is compiled for
the same slice, batch and context, simulated, and compared by the seconds of a token; the result beside it is its distance from the
bandwidth floor (bytes of weights and of keys and values over the memory's rate). With
``--engine`` DeepSeek's rows and those of Llama 3.1 70B are forecast by the code that was measured (``engine_code.py``), and the rebuilt program's seconds stand beside. A server's row is compared with the forecast of continuous
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
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from known import Row, expressed
from records import check_out, lines, refuse, tabled
from static_batch import forecast_static

from systolic.chips import Slice
from systolic.chips.flags import resolved
from systolic.compiling import Compiler
from systolic.core.errors import SystolicError
from systolic.forecasting import forecast_program
from systolic.forecasting.serving.capacity import floor_seconds, forecast_serving
from systolic.forecasting.serving.forecast import (
    Load,
    ServingForecast,
    ServingPoint,
    StepTimes,
    burst_seconds,
)
from systolic.forecasting.serving.layout import placed
from systolic.forecasting.serving.server_steps import EngineSteps
from systolic.job import ExpertAxis, Served, ServedCache, ServedWeights

HOSTS = (
    (("SGLang-JAX", "0.1.0"), 5.5e-3, True),
    (("SGLang-JAX", "2026-07"), 2.75e-3, False),
    (("SGLang-JAX", ""), 5.5e-3, True),
)
"""Seconds of the host for each step, where they were published apart from the device's, and whether the device waits for them: system and a part
of the version, in order. SGLang-JAX, Qwen3-8B on v6e-4 with 16 at once: 5.5 ms that could not be hidden behind 5 ms of the device
(sgl-project/sglang-jax issue 293, 2025-10-30), later 2.6 to 2.9 ms that are (pull request 1484, 2026-07-27). Not fitted."""
CHUNK = 2048
"""Prompt tokens of a step where a record has no flag for it."""
ENGINE, SERVER, STEP = "measured_engine", "measured", "measured_step"
OWN_CODE = ("DeepSeek", "Llama-3.1-70B")
"""Models whose engine's own code is forecast."""
PAGE_SIZE = 64


def half(row_id: Any) -> str:
    """``fit`` or ``judge``."""
    digit = int(hashlib.sha256(str(row_id).encode()).hexdigest()[0], 16)
    return "judge" if digit % 2 else "fit"


def served_of(row: Row) -> Served:
    """Formats of a record's weights and cache; experts and heads lie over the same devices."""
    engine = "jax-llm-examples" in row["system"]
    narrow = engine or "int8" in str(row.get("dtype", ""))
    return Served(
        weights=ServedWeights.int8 if narrow else ServedWeights.plain,
        cache=ServedCache.int8 if engine else ServedCache.plain,
        expert_axis=ExpertAxis.heads,
    )


def compiler_for(on: Slice, quick: bool) -> Compiler:
    """The flags that jobs share on a chip."""
    compiler = Compiler(flags=resolved("", on.chip))
    return compiler.quick() if quick else compiler


def engine_row(row: Row, quick: bool, own_code: bool) -> dict[str, Any]:
    """A static batch: its decode step, of the engine's own code where there is a clone of it, and rebuilt."""
    job, on, departure = expressed(row)
    rate = row.get("decode_tok_s_per_sequence")
    if rate is None:
        raise SystolicError("the record has no tokens per second of a sequence")
    context = -(-int(row["context_len"]) // 128) * 128
    sizes = (int(row["batch"]), context)
    made = forecast_static(job, on, sizes, served_of(row), compiler_for(on, quick))
    if not made.fits:
        raise SystolicError(f"does not fit: {made.hbm_bytes:.0f} bytes")
    seconds, own = made.seconds, None
    if own_code and any(part in row["model"] for part in OWN_CODE):
        from engine_code import forecast_engine

        seconds = own = forecast_engine(row["model"], *sizes, on.name, job.layout.data, quick)
    measured = 1 / float(rate)
    return {
        "measured_seconds": measured,
        "forecast_seconds": seconds,
        "rebuilt_seconds": made.seconds,
        "own_seconds": own,
        "floor_seconds": made.floor_seconds,
        "hbm_bytes": made.hbm_bytes,
        "error": seconds / measured - 1,
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
        host_seconds=host_of(row)[0],
    )
    asked = row["concurrency"] if isinstance(row["concurrency"], int) else None
    wanted = () if asked is None else (asked,)
    engine: dict[str, Any] = {"served": served_of(row), "compiler": compiler_for(on, quick)}
    made = forecast_serving(job, on, load, concurrency=wanted, **engine)
    if not made.points:  # More requests than fit: the others queue.
        made = forecast_serving(job, on, load, concurrency=(max(made.concurrency, 1),), **engine)
    if not made.points:
        raise SystolicError("does not fit")
    point = made.points[-1]
    step = max((one for one in made.steps if one.tokens == 1), key=lambda one: one.rows)
    state, rate = point.state, point.output_tokens_per_second
    if host_of(row)[1] and point.host_after is not None:
        state, rate = point.host_after, point.host_after_output_tokens_per_second or rate
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
        "forecast_token_seconds": state.token_seconds,
        "step_seconds": step.seconds,
        "step_floor_seconds": step.floor_seconds,
        "host_beside_tokens_per_second": point.output_tokens_per_second,
        "host_after_tokens_per_second": point.host_after_output_tokens_per_second,
        "measured_first_token_seconds": _first(row, "mean_ttft_ms"),
        "forecast_first_token_seconds": first_token(row, made, point),
        "departure": departure,
    }


def step_row(row: Row, quick: bool) -> dict[str, Any]:
    """One step of a server, timed alone: of prompts' tokens, or one token of each text."""
    job, on, departure = expressed(row)
    tokens, context = int(row["tokens"]), int(row["context_len"])
    load = Load(prompt_tokens=context, output_tokens=1, chunk=max(tokens, 1))
    job = replace(job, layout=placed(job.layout, on))
    steps = EngineSteps(job=job, on=on, load=load, page_size=PAGE_SIZE)
    program = steps.program((int(row["batch"]), tokens))
    made = forecast_program(program, job.name, on, compiler=compiler_for(on, quick))
    if made.step_seconds is None:
        raise SystolicError("does not fit")
    measured = float(row["measured_ms"]) / 1e3
    return {
        "measured_seconds": measured,
        "forecast_seconds": made.step_seconds,
        "floor_seconds": floor_seconds(made),
        "error": made.step_seconds / measured - 1,
        "departure": departure,
    }


def host_of(row: Row) -> tuple[float | None, bool]:
    """Published seconds of the host for each step of a record's system, None where there are none; whether the device waits for them."""
    for (system, version), seconds, waits in HOSTS:
        if system in row["system"] and version in str(row.get("version", "")):
            return seconds, waits
    return None, False


def first_token(row: Row, made: ServingForecast, point: ServingPoint) -> float:
    """Mean seconds to the first token, by how the record was driven.

    All prompts at once, or as many as there are places and each next one when another ends. SGLang reads prompts before it
    goes on with answers, and texts of one length end together: in its rows as many begin at once again.
    """
    decode = {one.rows / point.replicas: one.seconds for one in made.steps if one.tokens == 1}
    prompts = [one for one in made.steps if one.tokens > 1]
    whole = max(prompts, key=lambda one: one.tokens)
    least = min(prompts, key=lambda one: one.tokens)
    load = made.load
    chunk = max(least.seconds, whole.seconds * min(load.chunk / whole.tokens, 1.0))
    times = StepTimes(decode=decode, chunk=chunk, host=load.host_seconds or 0.0)
    if "output_len=1" in str(row.get("notes", "")) or "sgl_jax" in str(row.get("client", "")):
        return load.chunks * chunk * (point.state.requests + 1) / 2
    count = int(row.get("num_prompts") or 0)
    if not isinstance(row["concurrency"], int):
        return burst_seconds(load, times, point.state, count // point.replicas)
    held = round(point.state.requests)
    begun = min(held * point.replicas / count, 1.0) if count else 0.0
    burst = burst_seconds(load, times, point.state, held)
    return begun * burst + (1 - begun) * point.state.first_token_seconds


def _first(row: Row, *names: str) -> float | None:
    return next((row[name] / 1e3 for name in names if row.get(name) is not None), None)


def forecast(row: Row, quick: bool, own_code: bool = False) -> dict[str, Any]:
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
        if row["kind"] == ENGINE:
            return line | engine_row(row, quick, own_code)
        if row["kind"] == STEP:
            return line | step_row(row, quick)
        return line | server_row(row, quick)
    except SystolicError as error:
        return line | {"reason": str(error)}


def _case(row: Row) -> str:
    if row["kind"] != SERVER:
        many = f", {row['tokens']:,} tokens of a prompt" if row.get("tokens", 1) > 1 else ""
        return f"batch {row.get('batch')}, context {row.get('context_len')}{many}"
    return f"{row.get('input_len')}/{row.get('output_len')}, {row.get('concurrency')} at once"


def table(found: Sequence[dict[str, Any]]) -> str:
    """All lines in Markdown: static batches, servers, and what can't be expressed."""
    engines = [row for row in found if row["kind"] != SERVER and "error" in row]
    servers = [row for row in found if row["kind"] == SERVER and "error" in row]
    text = [
        "| static batch | case | half | measured, ms | forecast, ms | error | program | rebuilt, ms | error | floor, ms | measured over floor | forecast over floor |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in engines:
        measured, made, floor = (
            row[name] for name in ("measured_seconds", "forecast_seconds", "floor_seconds")
        )
        program = "rebuilt" if row.get("own_seconds") is None else "engine's own"
        rebuilt = row.get("rebuilt_seconds", made)
        text.append(
            f"| {row['name']} | {row['case']} | {row['half']} | {measured * 1e3:.2f} | {made * 1e3:.2f} | {row['error']:+.0%} | {program} | {rebuilt * 1e3:.2f} | {rebuilt / measured - 1:+.0%} | {floor * 1e3:.2f} | {measured / floor:.2f} | {made / floor:.2f} |"
        )
    text += ["", *summary("static batches", engines), ""]
    text += [
        "| server | case | half | measured, tokens/s | forecast | error | host beside each step | host after it | at the floor | per token, ms: measured | forecast | its step alone | first token, ms: measured | forecast |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in servers:
        text.append(
            f"| {row['name']} | {row['case']} | {row['half']} | {row['measured_tokens_per_second']:.0f} | {row['forecast_tokens_per_second']:.0f} | {row['error']:+.0%} | {_rate(row['host_beside_tokens_per_second'])} | {_rate(row['host_after_tokens_per_second'])} | {row['floor_tokens_per_second']:.0f} | {_ms(row['measured_token_seconds'])} | {_ms(row['forecast_token_seconds'])} | {_ms(row['step_seconds'])} | {_ms(row['measured_first_token_seconds'])} | {_ms(row['forecast_first_token_seconds'])} |"
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


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


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
    parser.add_argument("--kind", choices=(ENGINE, SERVER, STEP))
    parser.add_argument(
        "--engine", type=Path, help="a clone of jax-llm-examples, whose code is forecast"
    )
    parser.add_argument("--exact", action="store_true", help="full compiles, minutes a row")
    options = parser.parse_args()
    if options.table is not None:
        print(tabled(options.table, lines(options.table, "id", "kind", "half"), table))
        return
    check_out(options.out)
    if options.engine is not None:
        import engine_code

        engine_code.unpacked(options.engine)
    there = options.out is not None and options.out.exists()
    known = {line["id"]: line for line in lines(options.out, "id")} if there else {}
    only = set(options.only.split(",")) if options.only else None
    found = []
    for row in rows_of(options.published):
        if options.half not in (None, half(row["id"])) or options.kind not in (None, row["kind"]):
            continue
        if only is not None and str(row["id"]) not in only:
            continue
        line = known.get(row["id"]) or forecast(row, not options.exact, options.engine is not None)
        found.append(line)
        if options.out is not None and row["id"] not in known:
            with options.out.open("a") as out:
                out.write(json.dumps(line) + "\n")
        print(json.dumps(line), file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
