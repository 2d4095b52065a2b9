"""Best learning rate by width, with and without muP: ``python benchmarks/width_transfer.py ROWS [SEEDS] [SECONDS]``.

Trains the recipe ``lm`` on the bytes of the standard library at widths of 64 to 512, all else equal. Rows are appended to ROWS
(JSON lines) and not computed again: a call ends after SECONDS, and the next continues. Each width compiles once for all
learning rates. ``python benchmarks/width_transfer.py --draw ROWS PICTURE.svg`` prints the tables and draws the losses.
"""

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from records import lines

from systolic.job import Guard, GuardRule, Job, Optimizer, Read, Schedule, Split
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.options import Mup
from systolic.recipes.lm import lm
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget

WIDTHS = (64, 128, 256, 512)
RATES = tuple(range(-11, -3))
"""Learning rates as logarithms to base 2."""
STEPS, BATCH, SEQUENCE, HEAD, EVALUATED = 100, 8, 64, 32, 8

Key = tuple[int, bool, int, int]
"""Width, whether muP is on, seed, logarithm of the rate to base 2."""
Losses = Mapping[tuple[int, bool], Mapping[int, list[float]]]


class RatedSteps(StepFunctions):
    """Steps of a job with a learning rate of 1, with updates times a rate that is an argument: AdamW's update is linear in it."""

    rate: Any = 1.0

    def updates(self, gradients: Any, state: Any) -> Any:
        made, optimizer = super().updates(gradients, state)
        return {path: update * self.rate for path, update in made.items()}, optimizer


def job_of(width: int, mup: bool) -> Job:
    model = Decoder(
        layers=2,
        d_model=width,
        d_ff=2 * width,
        heads=width // HEAD,
        kv_heads=width // HEAD,
        head_dim=HEAD,
        mup=Mup(base_width=WIDTHS[0] if mup else 0),
    )
    return lm(
        model=model,
        sequence=SEQUENCE,
        batch=BATCH,
        steps=STEPS,
        optimizer=Optimizer(learning_rate=1.0),
        schedule=Schedule(warmup=10, final=0.0),
        guard=Guard(rule=GuardRule.ignore, jump=0),
    ).on(1)


class Trial:
    """Compiled programs of a width."""

    def __init__(self, width: int, mup: bool) -> None:
        self.job = job_of(width, mup)
        self.steps = RatedSteps(self.job, MeshTarget.of(self.job, "cpu", jax.devices()[:1]))
        self.init = jax.jit(self.steps.init)
        self.train = jax.jit(self._train, donate_argnums=1)
        self.evaluate = jax.jit(self._evaluate)

    def _train(self, rate: Any, state: Any, batch: Any) -> Any:
        self.steps.rate = rate
        state, metrics = self.steps.train(state, batch)
        return state, metrics["loss"]

    def _evaluate(self, state: Any, batch: Any) -> Any:
        return self.steps.evaluate(state.params, state.model_state, batch)["loss"]

    def loss(self, seed: int, rate: float) -> float:
        """Validation loss after all steps; infinity if training diverged."""
        read = Read(split=Split.train, batch=BATCH, seed=seed)
        source = self.job.data.open(read)
        state = self.init(jax.random.key(seed))
        for _ in range(STEPS):
            state, _ = self.train(jnp.float32(rate), state, next(source))
        source.close()
        held = self.job.data.open(Read(split=Split.validation, batch=8 * BATCH, shuffle=False))
        means = [self.evaluate(state, next(held)) for _ in range(EVALUATED)]
        held.close()
        total = sum(float(mean.total) for mean in means)
        loss = total / sum(float(mean.weight) for mean in means)
        return loss if math.isfinite(loss) else math.inf


def keys(seeds: int) -> list[Key]:
    """Keys of all rows; at the base width both parametrisations are the same."""
    return [
        (width, mup, seed, rate)
        for seed in range(seeds)
        for width in WIDTHS
        for mup in ((False,) if width == WIDTHS[0] else (False, True))
        for rate in RATES
    ]


def key_of(row: Mapping[str, Any]) -> Key:
    return row["width"], row["mup"], row["seed"], row["rate_log2"]


def main(rows: Path, seeds: int, seconds: float) -> None:
    begun, trials = time.monotonic(), {}
    done = {key_of(row) for row in read(rows)} if rows.exists() else set()
    for key in keys(seeds):
        if key in done or time.monotonic() - begun > seconds:
            continue
        width, mup, seed, rate = key
        if (width, mup) not in trials:
            trials[width, mup] = Trial(width, mup)
        start = time.process_time()
        loss = trials[width, mup].loss(seed, 2.0**rate)
        row = {"width": width, "mup": mup, "seed": seed, "rate_log2": rate}
        row |= {"loss": loss if math.isfinite(loss) else None}
        row |= {"cpu_seconds": round(time.process_time() - start, 1)}
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def read(rows: Path) -> list[dict[str, Any]]:
    return lines(rows, "width", "mup", "seed", "rate_log2", "loss")


def losses_of(rows: Sequence[Mapping[str, Any]]) -> Losses:
    found: dict[tuple[int, bool], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for mup in (False, True) if row["width"] == WIDTHS[0] else (row["mup"],):
            loss = math.inf if row["loss"] is None else row["loss"]
            found[row["width"], mup][row["rate_log2"]].append(loss)
    return found


def best(of: Mapping[int, list[float]]) -> tuple[int, float]:
    """The rate with the lowest mean loss, and that loss."""
    rate = min(of, key=lambda one: statistics.mean(of[one]))
    return rate, statistics.mean(of[rate])


def table(losses: Losses, mup: bool) -> str:
    base, _ = best(losses[WIDTHS[0], mup])
    rates = sorted({rate for of in losses.values() for rate in of})
    head = " | ".join(f"2^{rate}" for rate in rates)
    made = [
        f"| width | {head} | best | loss at the best rate of width {WIDTHS[0]} minus the lowest |"
    ]
    made.append("|---" * (len(rates) + 3) + "|")
    for width in WIDTHS:
        if not (of := losses[width, mup]):
            continue
        rate, least = best(of)
        cells = [f"{statistics.mean(of[one]):.3f}" if one in of else "" for one in rates]
        lost = f"{statistics.mean(of[base]) - least:.3f}" if base in of else ""
        made.append(f"| {width} | {' | '.join(cells)} | 2^{rate} | {lost} |")
    return "\n".join(made)


WIDE, HIGH, LEFT, TOP, GAP = 380, 300, 56, 44, 44
TICK = 0.25
SHADES = ("#9dc3e6", "#5b9bd5", "#2e6da4", "#12365c")
PANELS = {False: "standard parametrisation", True: f"muP, base width {WIDTHS[0]}"}


def drawn(losses: Losses) -> str:
    """SVG of losses over rates: a line per width with its best rate marked, a panel per parametrisation."""
    values = [statistics.mean(one) for of in losses.values() for one in of.values()]
    low = math.floor(min(values) / TICK) * TICK
    top = math.ceil(min(max(one for one in values if math.isfinite(one)), low + 1.5) / TICK) * TICK
    size = (2 * (WIDE + LEFT) + GAP, HIGH + TOP + 52)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="13">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for mup, title in PANELS.items():
        parts += panel(losses, mup, title, (low, top))
    return "\n".join([*parts, "</svg>\n"])


def panel(losses: Losses, mup: bool, title: str, span: tuple[float, float]) -> list[str]:
    left, (low, top) = LEFT + (WIDE + LEFT + GAP - 16 if mup else 0), span

    def x(rate: float) -> float:
        return left + (rate - RATES[0] + 0.4) / (RATES[-1] - RATES[0] + 0.8) * WIDE

    def y(loss: float) -> float:
        return TOP + HIGH - (min(loss, top) - low) / (top - low) * HIGH

    made = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{title}</text>']
    for loss in (low + TICK * number for number in range(round((top - low) / TICK) + 1)):
        made.append(
            f'<path d="M{left},{y(loss):.1f}h{WIDE}" stroke="#dddddd"/><text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#444444">{loss:.2f}</text>'
        )
    for rate in RATES:
        made.append(
            f'<text x="{x(rate):.1f}" y="{TOP + HIGH + 18}" text-anchor="middle" fill="#444444">2<tspan dy="-5" font-size="10">{rate}</tspan></text>'
        )
    made.append(
        f'<text x="{left + WIDE / 2}" y="{TOP + HIGH + 40}" text-anchor="middle">learning rate</text>'
    )
    for number, (width, shade) in enumerate(zip(WIDTHS, SHADES, strict=True)):
        if not (of := losses[width, mup]):
            continue
        points = [(x(rate), y(statistics.mean(of[rate]))) for rate in sorted(of)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        rate, least = best(of)
        made.append(f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="2"/>')
        made.append(
            f'<circle cx="{x(rate):.1f}" cy="{y(least):.1f}" r="5.5" fill="{shade}" stroke="white" stroke-width="1.5"/>'
        )
        place = left + WIDE - 108, TOP + 14 + 18 * number
        made.append(
            f'<path d="M{place[0]},{place[1]}h22" stroke="{shade}" stroke-width="3"/><text x="{place[0] + 30}" y="{place[1] + 4}">width {width}</text>'
        )
    if not mup:
        made.append(f'<text x="8" y="{TOP - 18}" fill="#444444">loss</text>')
    return made


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--draw"]:
        found = losses_of(read(Path(words[1])))
        for mup, title in PANELS.items():
            print(f"{title}:\n\n{table(found, mup)}\n")
        Path(words[2]).write_text(drawn(found))
    elif words:
        seeds, seconds = (*words[1:], *("2", "inf")[len(words) - 1 :])
        main(Path(words[0]), int(seeds), float(seconds))
    else:
        sys.exit(__doc__)
