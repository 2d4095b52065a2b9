"""Causes of poor learning, from a run's records alone: divergence, spikes, a plateau, overfitting, too few steps."""

import math
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from systolic.explaining import layers
from systolic.explaining.settings import changes, inspecting, settings_of
from systolic.explaining.step import Cause
from systolic.runs.metrics import loss_of, norm_of, rate_of
from systolic.runs.record import RunRecord, State

FEW = 12
"""Fewest records from which a curve is judged."""

SPIKE = 1.4
"""Ratio of a loss to the median before it that makes it a spike, unless the curve is noisier."""

SPREADS = 8.0
"""Standard deviations of the log loss around its median that make a spike."""

BEFORE = 20
"""Preceding records that a record is compared with."""

RISE = 1.05
"""Ratio to the best validation loss within which losses count as equal."""

BLOWN_UP = 2.0
"""Ratio of a smoothed loss to the first record's from which a run that ends no better has diverged."""

GAP = 1.5
"""Ratio of validation to training loss that counts as a gap."""

EPOCHS = 4.0
"""Passes over a text that are worth about as much as new text (Muennighoff et al. 2023)."""

TOKENS_PER_PARAMETER = 20
"""Compute-optimal training tokens per parameter (Hoffmann et al. 2022)."""

DROPPED = 0.02
"""Share of dropped expert choices from which the experts are reported as uneven."""

RISING = 0.9
"""Share of the peak learning rate below which a run has not left its warm-up."""

FALL = 0.08
"""Relative fall of the loss in as many steps again from which a run counts as too short."""
EVERY = 50
"""Steps between probes in advice."""


def causes(history: RunRecord) -> list[Cause]:
    """Causes that the curves show, worst first."""
    shown = [diverged(history)]
    if shown[0] is None:
        shown += [spikes(history), plateau(history)]
        shown += [overfitting(history), repeats(history), full_experts(history)]
    if not any(shown):
        shown.append(short(history))
    return [cause for cause in shown if cause is not None]


def diverged(history: RunRecord) -> Cause | None:
    """Divergence: a loss that is not a number or that ends far above its best."""
    settings = settings_of(history)
    lower = [
        settings.learning_rate(history.peak_rate / 3),
        settings.higher("schedule.warmup", value=_longer_warmup(history)),
        settings.lower("optimizer.clip", value=1.0),
    ]
    bad = [e for e in history.events if e.name in ("bad_step", "skip")]
    broken = [r for r in history.train if not math.isfinite(loss_of(r))]
    if bad or broken:
        step = (bad or broken)[0].step
        evidence = [e.detail for e in bad[:3]] or [f"the loss of step {step} is {'NaN'}"]
        evidence += _around(history, step)
        advice = list(lower)
        if bad:
            batch = shlex.quote(f"{history.path}/bad/step-{step}.npz")
            advice += [f"systolic train --replay {batch}"]
            if settings.change("guard.rule", value="skip"):
                advice += ["--guard.rule skip, where the batch is to blame"]
        title = f"The loss went bad at step {step}"
        return _cause("divergence", title, evidence, advice)
    if len(history.train) < FEW:
        return None
    curve = smooth(history.losses, max(3, len(history.train) // 20))
    first, last, low = curve[0], curve[-1], min(curve)
    highest = max(history.losses)
    # Medians of three records or more lie above no single spike.
    if max(curve[2:]) > BLOWN_UP * first > 0 and last >= 0.9 * first:
        index = history.losses.index(highest)
        at, rate = history.train_steps[index], rate_of(history.train[index])
        title = f"The loss blew up: {first:.4g} at the start, {highest:.4g} at step {at}, {last:.4g} at the end"
        lower[0] = settings.learning_rate(rate / 3)
        return _cause("divergence", title, _around(history, at), lower)
    if last <= 1.3 * low or last - low <= 0.3 * (first - low):
        return None
    at = history.train_steps[curve.index(low)]
    title = f"The loss diverged: {low:.4g} at step {at}, {last:.4g} at the end"
    return _cause("divergence", title, _around(history, at), lower)


def spikes(history: RunRecord) -> Cause | None:
    """Spikes: losses above the noise of the records before them."""
    jumps, losses, steps = [], history.losses, history.train_steps
    index = FEW
    while index < len(losses):
        base, limit = _normal(losses[max(0, index - BEFORE) : index])
        if losses[index] <= limit:
            index += 1
            continue
        back = next((k for k in range(index, len(losses)) if losses[k] <= 1.1 * base), None)
        jumps.append((index, base, back))
        index = len(losses) if back is None else back + 1
    if not jumps:
        return None
    evidence = []
    for at, base, back in jumps[:4]:
        end = "it did not come back" if back is None else f"back at step {steps[back]}"
        top = max(losses[at : back or len(losses)])
        rate, norm = rate_of(history.train[at]), norm_of(history.train[at])
        evidence.append(
            f"step {steps[at]}: {top:.4g} where {base:.4g} was normal, {end}; learning rate {rate:.3g}, gradient norm {norm:.3g}"
        )
    settings = settings_of(history)
    advice = [settings.learning_rate(history.peak_rate / 2)]
    clip = settings.get("optimizer.clip")
    norms = history.norms
    usual = statistics.median(norms) if norms else 1.0
    if usual > 0 and (not clip or clip > 2 * usual):
        advice.append(settings.change("optimizer.clip", value=float(f"{usual:.1g}")))
    if (settings.get("optimizer.b2") or 0.0) > 0.95:
        advice.append(settings.change("optimizer.b2", value=0.95))
    if history.reads_text and settings.get("z_loss") == 0:
        advice.append(settings.change("z_loss", value=1e-4))
    count = f"{len(jumps)} spike" + ("s" if len(jumps) > 1 else "")
    return _cause("loss-spikes", f"The loss has {count}", evidence, advice)


def plateau(history: RunRecord) -> Cause | None:
    """Plateau: a loss that has hardly changed."""
    losses = history.losses
    if len(losses) < 2 * FEW:
        return None
    quarter = len(losses) // 4
    first = statistics.median(losses[:3])
    early = statistics.median(losses[quarter : 2 * quarter])
    last = statistics.median(losses[-quarter:])
    if last < 0.9 * first or last < 0.98 * early:
        return None
    rate = history.peak_rate
    evidence = [
        f"loss {first:.4g} at the start, {early:.4g} in the second quarter, {last:.4g} in the last",
        f"learning rate at most {rate:.3g}",
    ]
    settings = settings_of(history)
    higher, lower = settings.learning_rate(rate * 10), settings.learning_rate(rate / 10)
    ratio = (
        statistics.median(layers.ratios(history).values() or [0.0]) if history.diagnoses else 0.0
    )
    # The rate may be too low or too high; probes, where there are any, tell which.
    ways = {True: [lower], False: [higher]}
    advice = ways[ratio > layers.USUAL_RATIO] if ratio else [_first_try(first, last, higher, lower)]
    meant = settings.get("optimizer.learning_rate", "learning_rate")
    if lower not in advice and meant and rate < RISING * meant:
        # The warm-up never ended, so that the rate that was asked for is not tried yet.
        advice = [settings.lower("schedule.warmup", value=max(history.train_steps[-1] // 10, 1))]
    if command := inspecting(history):
        advice.append(f"{command}, to see what the model sees")
    return _cause("plateau", "The loss has hardly moved", evidence, advice)


def _first_try(first: float, last: float, higher: str, lower: str) -> str:
    """The direction of the learning rate to try first, where no probe tells which it is: a loss that is too high rises, and with a rate that is too low it falls slowly."""
    tried, then = (lower, higher) if last > first else (higher, lower)
    word = "falls no faster" if last > first else "rises or jumps"
    return f"{tried} first; where the loss then {word}, {then}" if tried and then else tried or then


def overfitting(history: RunRecord) -> Cause | None:
    """Overfitting: the training loss falls while the validation loss rises, or lies far below it."""
    points = validation(history)
    if not points:
        return None
    best_step, best = min(points, key=lambda point: point[1])
    last_step, last = points[-1]
    then, now = history.loss_near(best_step), history.loss_near(last_step)
    first = history.loss_near(history.train_steps[0]) if history.train else None
    if now is None or then is None or first is None:
        return None
    epochs = history.epochs
    rose = last > RISE * best and now < min(then, last)
    apart = last > GAP * now and last - now > 0.1 * first and (epochs or 0) > 2
    if not rose and not apart:
        return None
    evidence = [f"at step {last_step}: validation loss {last:.4g}, training loss {now:.4g}"]
    if best_step != last_step:
        evidence.append(
            f"at step {best_step}: validation loss {best:.4g}, its best, training loss {then:.4g}"
        )
    if epochs is not None:
        evidence.append(f"the training data was read {epochs:.3g} times")
    settings = settings_of(history)
    advice = []
    if rose:
        advice += [settings.change("steps", value=best_step)]
        if not settings.get("evaluation.patience"):
            advice.append(settings.change("evaluation.patience", value=3))
    decay = settings.get("optimizer.weight_decay") or 0.0
    advice.append(settings.change("optimizer.weight_decay", value=max(3 * decay, 0.1)))
    rank = settings.get("rank") if _adapts(history) else None
    advice.append(settings.change("rank", value=rank // 2) if rank and rank > 1 else "")
    advice.append("more data" if _begun(history) else "more data, or a smaller model")
    title = f"The model overfits: validation loss {last:.4g}, training loss {now:.4g}"
    return _cause("overfitting", title, evidence, advice)


def repeats(history: RunRecord) -> Cause | None:
    """More passes over a text than about :data:`EPOCHS`, after which repeated text is worth less than new text."""
    epochs = history.epochs
    if not history.reads_text or epochs is None or epochs <= EPOCHS:
        return None
    evidence = [
        f"{epochs:.3g} passes over the training text; up to about {EPOCHS:g} are worth as much as new text, after about 16 nothing is left (Muennighoff et al. 2023)"
    ]
    settings = settings_of(history)
    steps = max(round(history.train[-1].step * EPOCHS / epochs), 1)
    source = next((f" (--{name})" for name in ("path", "data") if settings.has(name)), "")
    advice = [f"more text{source}", settings.change("steps", value=steps)]
    return _cause("data-repeats", f"The text was read {epochs:.3g} times", evidence, advice)


def full_experts(history: RunRecord) -> Cause | None:
    """Choices dropped after the first records, because experts are uneven or have too few slots."""
    known = [record for record in history.train if "dropped" in record.terms]
    late = known[len(known) // 2 :]
    if len(known) < FEW:
        return None
    dropped = statistics.fmean(record.terms["dropped"] for record in late)
    if not dropped > DROPPED:
        return None
    settings = settings_of(history)
    factor = settings.get("model.capacity_factor") or 1.25
    evidence = [
        f"{dropped:.1%} of the choices of an expert found no slot and were dropped, in steps {late[0].step} to {late[-1].step}; capacity factor {factor:g}",
    ]
    balance = [record.terms["router_loss"] for record in late if "router_loss" in record.terms]
    if balance:
        experts = settings.get("model.experts")
        most = f", {experts} where one gets all" if experts else ""
        evidence.append(
            f"balancing loss {statistics.fmean(balance):.3g} (1 where experts are chosen evenly{most})"
        )
    least = max(1 - factor, 0.0)
    if least:
        evidence.append(f"{least:.1%} would be, however evenly experts are chosen")
    uneven = dropped - least > DROPPED
    weight = settings.get("model.router_loss") or 0.01
    more = settings.change("model.capacity_factor", value=float(round(1.25 * factor, 2)))
    even = settings.change("model.router_loss", value=float(3 * weight))
    return Cause(
        name="uneven-experts" if uneven else "full-experts",
        title="experts are chosen unevenly: some are full while others have empty slots"
        if uneven
        else "experts have fewer slots than there are choices",
        share=None,
        seconds=None,
        evidence=evidence,
        advice=changes(
            [even if uneven else "", f"{more}: more slots, which cost time in proportion"]
        ),
    )


def short(history: RunRecord) -> Cause | None:
    """Loss that still falls quickly at the end."""
    losses, steps = history.losses, history.train_steps
    if len(losses) < 2 * FEW or not history.is_finished or min(losses) <= 0:
        return None
    half = len(losses) // 2
    slope, error = _slope(
        [math.log(step) for step in steps[half:]], [math.log(loss) for loss in losses[half:]]
    )
    gain = 1 - 2**slope
    last = statistics.median(losses[-max(3, half // 5) :])
    if gain < FALL or slope > -3 * error or last < 0.05 * losses[0]:
        return None
    evidence = [
        f"over the last half the loss fell to {last:.4g} as steps^{slope:.2g}: as many steps again would take off about {gain * 100:.0f} %"
    ]
    size = history.start.num_parameters
    tokens = _tokens(history)
    if size and tokens:
        evidence.append(
            f"{tokens / size:.3g} tokens a parameter; about {TOKENS_PER_PARAMETER} make the most of the compute (Hoffmann et al. 2022)"
        )
    advice = [settings_of(history).higher("steps", value=2 * steps[-1])]
    return _cause("too-short", "The loss was still falling quickly at the end", evidence, advice)


def validation(history: RunRecord) -> list[tuple[int, float]]:
    """Step and loss of each evaluation on the validation split."""
    return [
        (record.step, record.metrics["loss"])
        for record in history.evals
        if record.split == "validation" and "loss" in record.metrics
    ]


def _normal(before: Sequence[float]) -> tuple[float, float]:
    """The median of positive losses, and the loss above which a record is a spike."""
    base = statistics.median(before)
    if base <= 0:
        return base, math.inf
    away = [abs(math.log(max(loss, 1e-12) / base)) for loss in before]
    # 1.4826 converts a median absolute deviation to a normal distribution's standard deviation.
    spread = 1.4826 * statistics.median(away)
    return base, base * math.exp(max(math.log(SPIKE), SPREADS * spread))


def _around(history: RunRecord, step: int) -> list[str]:
    """Evidence from the records before a step."""
    before = [record for record in history.train if record.step <= step][-3:]
    return [
        f"step {r.step}: loss {loss_of(r):.4g}, gradient norm {norm_of(r):.3g}, learning rate {rate_of(r):.3g}"
        for r in before
    ]


def _longer_warmup(history: RunRecord) -> float:
    """Twice the warm-up, at least 100 steps and at most half of the job."""
    job = history.job.outline
    longer = max(100, 2 * job.schedule.warmup)
    return min(longer, max(job.steps // 2, 1)) if job.steps else longer


def _tokens(history: RunRecord) -> float | None:
    """Tokens seen."""
    if not history.reads_text:
        return None
    last = history.train[-1]
    return (last.tokens_per_second or 0.0) * (last.step_seconds or 0.0) * last.step


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of a straight line through points, and its standard error."""
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (len(x) - 2) / spread)


def _begun(history: RunRecord) -> bool:
    """Whether it began with the weights of a model, whose sizes are given."""
    return bool(history.job.outline.start)


def _adapts(history: RunRecord) -> bool:
    """Whether adapters train beside frozen weights."""
    return history.job.outline.adapter.kind != "none"


def _cause(name: str, title: str, evidence: Sequence[str], advice: Sequence[str]) -> Cause:
    return Cause(
        name=name, title=title, share=None, seconds=None, evidence=evidence, advice=changes(advice)
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Running medians over the last ``window`` finite values; NaN where there are none."""
    medians = []
    for end in range(1, len(values) + 1):
        part = [v for v in values[max(0, end - window) : end] if math.isfinite(v)]
        medians.append(statistics.median(part) if part else math.nan)
    return medians


def learning(history: RunRecord) -> list[Cause]:
    """Causes of poor learning, worst first; [] where the records show none."""
    curves, in_layers = causes(history), layers.causes(history)
    # What happens in the layers explains a curve, but not the length of the run.
    late = [cause for cause in curves if cause.name == "too-short"]
    return [*(cause for cause in curves if cause not in late), *in_layers, *late]


def vitals(history: RunRecord) -> dict[str, Any]:
    """Figures of a run's learning to show even without a problem; ``None`` where unknown.

    ``update_ratio`` is the median ratio of updates to weights at the peak learning rate,
    ``noise_scale`` and ``batch`` are in examples, ``epochs`` are passes over the training data.
    """
    update_ratios = sorted(layers.ratios(history).values()) if history.diagnoses else []
    points = validation(history)
    scale = layers.noise_scale(history) if history.diagnoses else None
    return {
        "update_ratio": update_ratios[len(update_ratios) // 2] if update_ratios else None,
        "noise_scale": scale if scale is None or math.isfinite(scale) else None,
        "batch": history.start.batch,
        "epochs": history.epochs,
        "training_loss": history.loss_near(history.train_steps[-1]) if history.train else None,
        "validation_loss": points[-1][1] if points else None,
    }


def unknown(history: RunRecord, *, probed: bool = False) -> list[str]:
    """Questions that the records can't answer, and the command that would, in a line each.

    Args:
        history: The run.
        probed: A probe of its newest checkpoint was tried, so that explaining it again shows no more.
    """
    where = str(history.path)
    every = max(min(EVERY, (history.steps or history.step) // 4), 1)
    afresh = f"train a new run with --diagnose {every}"
    over = history.is_finished or history.state is State.stopped
    again = shlex.join(["systolic", "train", "--resume", where, "--diagnose", str(every)])
    probing = shlex.join(["systolic", "explain", where]) if not probed else afresh
    if not history.train:
        return ["the run has no record of a step, so nothing can be judged"]
    questions = []
    if len(history.train) < FEW:
        questions.append(
            f"{len(history.train)} records are too few for a curve; train for more steps"
        )
    if not history.diagnoses:
        questions.append(
            f"gradients, updates and noise by layer were never probed; {probing if over else again}"
        )
    elif not layers.training(history):
        what = (
            "whether rounding loses updates: they" if layers.ratios(history) else "updates by layer"
        )
        questions.append(
            f"{what} were probed only where the learning rate has decayed; to probe before the end: {afresh if over else again}"
        )
    elif layers.noise_scale(history) is None:
        questions.append(
            "the gradient noise scale needs gradients of batches of two sizes: --layout.accumulate 2, or at least 2 examples a device"
        )
    elif math.isinf(layers.noise_scale(history) or 0.0):
        questions.append(
            "the gradient noise scale is far above the batch: noise hides the gradient in these probes"
        )
    if not validation(history):
        questions.append(
            f"overfitting can't be judged: the run has no evaluation of the validation split; {_evaluated(history)}"
        )
    if history.epochs is None:
        questions.append("the run has no record of how often the data was read")
    return questions


def _evaluated(history: RunRecord) -> str:
    """The change that gives a run evaluations of validation data, of which it has none so far."""
    settings = settings_of(history)
    steps = history.steps or history.step
    every = settings.get("evaluation.every")
    if history.is_finished or (every and history.step >= every):
        # The end has one wherever there is such data.
        for name, value in (("validation", "DATA"), ("validation_share", 0.05)):
            if settings.has(name) and (more := settings.change(name, value=value)):
                return f"train with data for it, {more}"
        return "give the recipe validation data"
    return settings.change("evaluation.every", value=max(min(100, steps // 2), 1)) or "train on"
