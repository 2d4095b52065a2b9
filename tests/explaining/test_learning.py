"""Real short runs with planted faults: each is named with its evidence, and a healthy run is left alone."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest

import systolic
from systolic import recipes
from systolic.cli.forms import request
from systolic.cli.main import VERBS, main
from systolic.core.errors import RunError
from systolic.data.text.documents import StandardLibrary
from systolic.explaining import layers
from systolic.explaining.display.text import HEIGHT, lines
from systolic.explaining.layers import noise_scale
from systolic.explaining.learning import (
    diverged,
    full_experts,
    learning,
    overfitting,
    plateau,
    unknown,
    vitals,
)
from systolic.explaining.runs import checkpoints, evaluation, speed
from systolic.explaining.settings import Settings, advise, render
from systolic.explaining.step import Cause
from systolic.job import Evaluation, GuardRule, Job, Layout, Optimizer, OptimizerKind
from systolic.recipes.jobs import source_of
from systolic.runs import Run
from systolic.runs.access import Access
from systolic.runs.job_record import JobRecord
from systolic.runs.metrics import EvalRecord, EventRecord, ProbeRecord, TrainRecord
from systolic.runs.record import RunRecord, load_run
from systolic.setup import first_state, set_up
from systolic.steps.programs import training
from systolic.training.diagnosis import Probe
from systolic.training.ledger import Ledger
from systolic.training.resuming import finished
from tests.explaining import planted
from tests.explaining.planted import Fault
from tests.tiers import some
from tests.training.sessions import Crash, CrashAt, assert_same, train

RECIPE = f"{Path(planted.__file__)}:job"
TEXTS = Path(systolic.__file__).parent / "data"


def explained(job: Job, path: Path, every: int = 20) -> dict[str, Cause]:
    train(job, path, diagnose=every)
    return {cause.name: cause for cause in learning(load_run(path))}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run without a fault, with a probe at every twentieth step."""
    path = tmp_path_factory.mktemp("healthy")
    train(planted.job(), path, diagnose=20)
    return load_run(path)


def test_a_healthy_run_raises_no_alarm(healthy: RunRecord):
    history = healthy
    assert learning(history) == []
    figures = vitals(history)
    assert 1e-4 < figures["update_ratio"] < 0.1
    assert figures["noise_scale"] > 32 / 4
    assert figures["epochs"] == pytest.approx(240 * 32 / 8192)
    assert figures["training_loss"] == pytest.approx(figures["validation_loss"], rel=0.2)
    assert unknown(history) == []


def test_a_learning_rate_far_too_high_diverges(tmp_path: Path):
    high = Optimizer(kind=OptimizerKind.sgd, learning_rate=30.0, clip=0.0)
    found = explained(planted.job(optimizer=high, steps=60), tmp_path)
    assert list(found) == ["divergence"]
    cause = found["divergence"]
    assert cause.title.startswith("The loss went bad at step ")
    assert float(cause.evidence[-2].split()[3].rstrip(",")) > 1e3, "it grew before it was no number"
    assert cause.advice[0].startswith("learning rate 10 ")


def test_a_loss_that_blew_up_and_ends_where_it_began_has_diverged(tmp_path: Path):
    """As digits does with a learning rate of 1: up, and back to a guess, with all units dead."""
    curve = [2.32, 45.1, 26.1, 5.7, 4.4, 13.9, 6.1, 6.6, 5.4, 2.4, *[2.31, 2.3] * 20]
    by_name = {}
    for name, losses in {
        "blown": curve,
        "spiked": [2.32, *[2.31, 2.3] * 20, 45.1, *[2.3] * 9],
    }.items():
        with Run.create(tmp_path / name, {"job": {"name": "made"}, "options": {}}) as run:
            for step, loss in enumerate(losses, 1):
                figures = {
                    "loss": loss,
                    "grad_norm": 1.0,
                    "learning_rate": 1.0,
                    "step_seconds": 1.0,
                }
                run.append(
                    {"kind": "train", "step": step, "time": step, "data_wait": 0.0} | figures
                )
        by_name[name] = learning(load_run(tmp_path / name))
    (cause,) = by_name["blown"]
    assert cause.title == "The loss blew up: 2.32 at the start, 45.1 at step 2, 2.3 at the end"
    assert cause.advice[0].startswith("learning rate 0.333")
    assert [cause.name for cause in by_name["spiked"]] == ["loss-spikes", "plateau"]


def test_layers_that_a_high_learning_rate_has_killed(tmp_path: Path):
    high = Optimizer(learning_rate=0.5)
    found = explained(planted.job(optimizer=high, steps=60), tmp_path, every=5)
    first, second = found["learning-rate-high"].evidence
    assert "about 1e-03 is usual" in first
    assert "most " in second
    died = found["dead-gradients"]
    assert died.evidence[1].endswith("so they died in training")
    assert died.advice[0].startswith("learning rate 0.167 ")


def test_a_loss_that_ends_far_above_its_best_has_diverged(tmp_path: Path):
    curve = [2.0 * 0.95**n for n in range(30)] + [0.5 * 1.1**n for n in range(20)]
    with Run.create(tmp_path, {"job": {"name": "made"}, "options": {}}) as run:
        for step, loss in enumerate(curve, 1):
            figures = {"loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "step_seconds": 1.0}
            run.append({"kind": "train", "step": step, "time": step, "data_wait": 0.0} | figures)
    (cause,) = learning(load_run(tmp_path))
    assert cause.title.startswith("The loss diverged: 0.4")


@pytest.mark.slow
def test_a_guard_that_stopped_the_run_is_the_first_thing(tmp_path: Path):
    job = planted.job(rule=GuardRule.stop, spoiled=(100,), steps=120)
    with pytest.raises(RunError):
        train(job, tmp_path)
    cause = learning(load_run(tmp_path))[0]
    assert cause.name == "divergence"
    assert cause.title == "The loss went bad at step 100"
    assert f"systolic train --replay {tmp_path}/bad/step-100.npz" in cause.advice


def test_a_spike_is_placed_measured_and_seen_to_recover(tmp_path: Path):
    found = explained(planted.job(spoiled=(100,)), tmp_path)  # by the programs of the healthy one
    assert list(found) == ["loss-spikes"]
    (line,) = found["loss-spikes"].evidence
    assert line.startswith("step 100: ")
    assert "back at step 101; learning rate 0.00" in line
    peak, usual = float(line.split()[2]), float(line.split()[4])
    assert 15 < peak / usual < 60


@pytest.mark.slow
def test_a_dead_layer_is_named(tmp_path: Path):
    found = explained(planted.job(fault=Fault.dead), tmp_path)
    cause = found["dead-gradients"]
    # Nothing reaches the first layer through the dead second one, nor does the last one see anything.
    assert cause.title == "3 of 3 weight matrices get no gradient"
    for name in ("first/kernel", "second/kernel", "out/kernel"):
        assert name in cause.evidence[0]


def test_updates_below_the_rounding_of_bf16_weights_are_counted(tmp_path: Path):
    small = Optimizer(learning_rate=1e-6, weight_decay=0.0)
    found = explained(planted.job(fault=Fault.bf16, optimizer=small, steps=60), tmp_path)
    cause = found["lost-updates"]
    share = float(cause.title.split()[-5])
    assert 90 <= share <= 100, "nearly all weights are larger than 500 updates"
    assert "bfloat16" in cause.title
    # The planted job was made without a recipe, so there is no option to type.
    assert "with precision bf16" in cause.advice[0]
    assert cause.advice[0].endswith("(the recipe has no option for it; change it there)")
    assert "learning-rate-low" in found


@pytest.mark.slow
def test_the_same_weights_in_float32_lose_nothing(tmp_path: Path):
    small = Optimizer(learning_rate=1e-6, weight_decay=0.0)
    found = explained(planted.job(optimizer=small, steps=60), tmp_path)
    assert "lost-updates" not in found
    assert "plateau" in found


@pytest.mark.slow
def test_little_data_read_often_is_learnt_by_heart(tmp_path: Path):
    strong = Optimizer(learning_rate=1e-2, weight_decay=0.0)
    found = explained(planted.job(examples=64, optimizer=strong), tmp_path)
    cause = found["overfitting"]
    assert "the training data was read 120 times" in cause.evidence
    assert cause.evidence[1].startswith("at step 60: validation loss ")
    assert cause.advice[0].startswith("steps 60 ")


@pytest.mark.parametrize("sizes", some([(1024, 1), (1024, 8), (64, 1)], [(1024, 8), (64, 1)]))
def test_the_noise_scale_is_that_of_the_gradients(tmp_path: Path, sizes: tuple[int, int]):
    """Of gradients drawn from a normal distribution it is known; by the batch, and the passes of a step."""
    batch, accumulate = sizes
    train(planted.noisy(100.0, batch, accumulate), tmp_path, diagnose=1)
    history = load_run(tmp_path)
    assert noise_scale(history) == pytest.approx(100.0, rel=0.1 if batch > 100 else 0.5)
    named = [cause.name for cause in learning(load_run(tmp_path))]
    assert ("large-batch" in named) is (batch > 400)


def test_one_example_a_device_has_no_noise_scale_and_says_how_to_get_it(tmp_path: Path):
    train(planted.noisy(100.0, 1), tmp_path, diagnose=4)
    history = load_run(tmp_path)
    assert noise_scale(history) is None
    assert [note for note in unknown(history) if "--layout.accumulate 2" in note]


def mixture(steps: int, **sizes: float) -> Job:
    recipe = recipes.find("lm")
    small = {"layers": 1, "d_model": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "d_ff": 64}
    options = {"model": small | {"experts": 4} | sizes, "sequence": 64, "batch": 8, "steps": steps}
    made = recipe(recipes.typed(recipe, options))
    # A sample takes as long as the steps, and so does a look at all files of the standard library.
    return replace(made, sample=None, data=StandardLibrary(sequence=64, root=TEXTS))


@pytest.mark.slow
def test_experts_without_room_are_seen(tmp_path: Path):
    # 80 slots for 128 choices: 48 are dropped, however evenly they are chosen.
    found = explained(mixture(steps=24, capacity_factor=0.6), tmp_path, every=0)
    (cause,) = (found[name] for name in ("full-experts", "uneven-experts") if name in found)
    dropped = float(cause.evidence[0].split("%")[0])
    assert 37 < dropped < 60
    known = Run.open(tmp_path).records("train")
    assert all(0.37 < record["dropped"] < 1 for record in known)
    assert "capacity factor" in cause.advice[-1]
    assert cause.evidence[1].startswith("balancing loss 1")


@pytest.mark.parametrize(
    ("factor", "dropped", "name"),
    [
        (1.25, 0.01, None),
        (1.25, 0.1, "uneven-experts"),
        (0.6, 0.405, "full-experts"),
        (0.6, 0.5, "uneven-experts"),
    ],
)
def test_uneven_experts_are_told_from_too_few_slots(
    factor: float, dropped: float, name: str | None
):
    records = [
        TrainRecord(step=n, loss=1.0, learning_rate=0.1, terms={"dropped": dropped})
        for n in range(20)
    ]
    history = RunRecord(
        path=Path("runs/m"),
        job=JobRecord(options={"model": {"capacity_factor": factor, "router_loss": 0.01}}),
        train=records,
    )
    cause = full_experts(history)
    assert (cause and cause.name) == name
    if cause is not None:
        assert ("--model.router-loss 0.03" in cause.advice) == (name == "uneven-experts")
        assert cause.advice[-1].startswith(f"--model.capacity-factor {1.25 * factor:.3g}")


@pytest.mark.slow
def test_looks_change_nothing(tmp_path: Path):
    """With a probe at every step, across a crash and a resume, the run is bit for bit the one without."""
    setup = set_up(planted.job(steps=24, evaluation=Evaluation(every=8)))
    train(setup, tmp_path / "without", diagnose=0)
    assert not (tmp_path / "without" / "diagnoses.jsonl").exists()
    train(setup, tmp_path / "with", diagnose=1)
    assert_same(setup, tmp_path / "without", tmp_path / "with")
    with pytest.raises(Crash):
        train(setup, tmp_path / "cut", watchers=[CrashAt(20)], diagnose=1)
    train(setup, tmp_path / "cut", resume=True, diagnose=1)
    assert_same(setup, tmp_path / "without", tmp_path / "cut")

    def probes(name: str) -> list[dict[str, Any]]:
        clocks = ("time", "seconds")
        found = Run.open(tmp_path / name).diagnoses()
        return [{k: v for k, v in look.items() if k not in clocks} for look in found]

    assert [record["step"] for record in probes("with")] == list(range(1, 25))
    assert probes("cut") == probes("with")


def test_a_look_tells_what_the_step_then_does(healthy: RunRecord):
    run = Run.open(healthy.path)
    steps = {record["step"]: record for record in run.records("train")}
    for look in run.diagnoses():
        record = steps[look["step"]]
        assert look["loss"] == pytest.approx(record["loss"], rel=1e-3)
        assert look["big_square"] ** 0.5 == pytest.approx(record["grad_norm"], rel=1e-3)
        assert look["learning_rate"] == pytest.approx(record["learning_rate"], rel=1e-3)
        whole = sum(part["gradient"] ** 2 for part in look["parameters"].values())
        assert whole == pytest.approx(look["big_square"], rel=1e-3)


def test_by_default_a_short_run_is_not_slowed_but_looked_at_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / ("a run with a long name " * 4).strip()
    run = str(path)
    assert main(["train", RECIPE, "--fault", "dead", "--steps", "60", "--run", run, "--json"]) == 0
    assert not (path / "diagnoses.jsonl").exists()
    before = sorted(path.rglob("*"))
    capsys.readouterr()
    assert main(["explain", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["kind"]) == (run, "run")
    causes = {cause["name"]: cause for cause in found["causes"]}
    # Nothing reaches the first layer through the dead second one, nor does the last one see anything.
    assert causes["dead-gradients"]["title"] == "3 of 3 weight matrices get no gradient"
    for name in ("first/kernel", "second/kernel", "out/kernel"):
        assert name in causes["dead-gradients"]["evidence"][0]
    assert sorted(path.rglob("*")) == before
    assert main(["explain", run, "--json", "--quick"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "dead-gradients" not in [cause["name"] for cause in found["causes"]]
    # The run is finished, and --resume would do nothing.
    assert f"systolic explain '{run}'" in "\n".join(found["notes"])
    assert main(["explain", run, "--quick"]) == 0
    out = capsys.readouterr().out
    assert f"systolic explain '{run}'" in out
    assert out.startswith(f"{run}: ")
    assert len(out.splitlines()) <= HEIGHT


def test_looks_nobody_asked_for_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """By a clock of the test's own; and where the program does not fit, the run continues without probes."""
    now, told = [0.0], []
    ledger = Ledger(lambda: now[0])
    setup = set_up(planted.job())
    probe = Probe(setup, ledger, lambda *event: told.append(event), None)
    state = first_state(setup.steps, 0)
    with training(setup.job, setup.steps, 0) as feed:
        batch = next(feed)
    assert not probe.due(4)
    now[0] = 250.0
    assert [probe.due(step) for step in (2, 4, 6, 8)] == [False, True, False, True]

    def slow(*arguments: Any) -> Any:
        now[0] += 2.0
        return program(*arguments)

    program = probe._program
    monkeypatch.setattr(probe, "_program", slow)
    found = probe.measure(4, state, batch)
    assert found is not None
    assert found["seconds"] == 2.0
    assert not probe.due(8), "one more would be 4 of 252 seconds"
    now[0] = 401.0
    assert probe.due(8)

    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nlong story")

    monkeypatch.setattr(probe, "_program", full)
    assert probe.measure(8, state, batch) is None
    assert told[-1][2] == "no further gradient probe: RESOURCE_EXHAUSTED: out of memory"
    now[0] = 1e6
    assert not probe.due(12)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(tmp_path / "nothing")]) == 2
    assert "nothing is no recipe, run, profile or forecast" in capsys.readouterr().err


def session_causes(run: Run) -> list[Cause]:
    return speed(load_run(run.path, last_session=True))


def fabricated(path: Path, time: dict[str, float], **train: float) -> Run:
    """A run whose records say where the time went."""
    description = {"job": {"name": "made"}, "options": {"evaluation": {"every": 10, "batches": 0}}}
    with Run.create(path, description) as run:
        run.append(
            {"kind": "start", "step": 0, "time": 0.0, "devices": "4 x TPU v5 lite", "batch": 8}
        )
        for step in (10, 20, 30, 40):
            found = {"split": "validation", "metrics": {"loss": 1.0}, "seconds": 3.75}
            read = {"batches": 96, "of": 96} | ({"final": True} if step == 40 else {})
            run.append({"kind": "eval", "step": step, "time": step} | found | read)
        for step in range(1, 41):
            figures = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "step_seconds": 1.0}
            waits = {"data_wait": 0.0, "device_wait": 0.9, "tokens_per_second": 8.0}
            run.append({"kind": "train", "step": step, "time": step} | figures | waits | train)
        detail = "train step: x was float32[16,8] and is float32[8,8]"
        event = {"name": "recompile", "seconds": 9.0, "detail": detail}
        run.append({"kind": "event", "step": 30, "time": 30.0} | event)
        run.write_summary({"steps": 40, "time": time})
    return Run.open(path)


def test_speed_names_what_took_the_time_most_first(tmp_path: Path):
    time = {"compile": 10.0, "step": 50.0, "data_wait": 20.0, "eval": 15.0, "checkpoint": 5.0}
    found = session_causes(fabricated(tmp_path / "slow", time, data_wait=0.3))
    assert [cause.name for cause in found] == [
        "input-wait",
        "evaluation",
        "recompilation",
        "checkpoints",
    ]
    assert [cause.share for cause in found] == pytest.approx([0.2, 0.15, 0.09, 0.05])
    assert "systolic data pack" in found[0].advice[1]
    assert found[1].advice == ["--evaluation.every 30", "--evaluation.batches 32"]
    assert "x was float32[16,8]" in found[2].evidence[0]


@pytest.mark.parametrize(
    ("every", "evals", "advice"),
    [
        # One evaluation, at the end: another period leaves it where it is.
        (50, [(40, 15, True)], ["--evaluation.final-batches 5", "more steps"]),
        (50, [(40, 1, True)], ["more steps"]),
        (30, [(30, 15, False), (40, 15, True)], ["--evaluation.every 0", "--evaluation.batches 5"]),
        (10, [(n, 0, n == 40) for n in (10, 20, 30, 40)], ["--evaluation.every 30"]),
    ],
    ids=["the end", "one batch", "rarely", "often"],
)
def test_advice_about_evaluations_leaves_fewer_of_them(
    every: int, evals: list[tuple[int, int, bool]], advice: list[str]
):
    options = {"evaluation": {"every": every, "batches": 15, "final_batches": None}}
    if len(evals) > 1:
        options["evaluation"]["batches"] = 0
    records = [
        EvalRecord(step=step, split="validation", batches=read, final=last)
        for step, read, last in evals
    ]
    history = RunRecord(
        path=Path("runs/e"), job=JobRecord(options=options, job={"steps": 40}), evals=records
    )
    cause = evaluation(history, {"eval": 15.0}, 100.0)
    assert cause is not None
    assert [one.partition(":")[0] for one in cause.advice] == advice
    options["checkpoints"] = {"every": 50}
    saved = [EventRecord(name="checkpoint", step=40)]
    cause = checkpoints(replace(history, events=saved), {"checkpoint": 15.0}, 100.0)
    assert cause is not None
    assert [one.partition(":")[0] for one in cause.advice] == [
        "a faster disk for --run",
        "more steps",
    ]


def test_advice_is_a_change_of_the_present_settings():
    """Options that have the value already, or go further than it, are not advised."""
    settings = Settings({"optimizer": {"clip": 0.5, "b2": 0.95}, "steps": 10, "decay": 0})
    assert settings.change("optimizer.b2", value=0.95) == ""
    assert settings.lower("optimizer.clip", value=1.0) == ""
    assert settings.lower("optimizer.clip", value=0.1) == "--optimizer.clip 0.1"
    assert settings.lower("decay", value=1.0) == "--decay 1", "0 is no limit"
    assert settings.higher("steps", value=10) == ""
    assert settings.higher("steps", value=20) == "--steps 20"

    options = {
        "optimizer": {"learning_rate": 1e-3, "clip": 1.0},
        "schedule": {"warmup": 800},
        "guard": {"rule": "skip"},
        "batch": 1,
    }
    flat = [
        TrainRecord(step=n, loss=5.0, grad_norm=1.0, learning_rate=1e-3 * n / 800)
        for n in range(1, 101)
    ]
    event = EventRecord(name="skip", step=90, detail="the loss of step 90 is not a number")
    history = RunRecord(
        path=Path("runs/s"), job=JobRecord(options=options, job={"steps": 1000}), train=flat
    )
    broken = diverged(replace(history, events=[event]))
    assert broken is not None
    rate, replayed = broken.advice
    assert rate.startswith("--optimizer.learning-rate")
    assert replayed.startswith("systolic train --replay")
    # The warm-up has not ended: a higher rate than the one asked for is not what it lacks.
    still = plateau(history)
    assert still is not None
    assert still.advice[0] == "--schedule.warmup 10"
    assert len(still.advice) == 1, "no recipe, whose data a command could show"
    probe = ProbeRecord(
        step=50, batch=1, parts=2, big_square=1.0, small_square=1.0, learning_rate=1e-3
    )
    probes = [probe, msgspec.structs.replace(probe, step=100)]
    assert layers.batch(replace(history, diagnoses=probes)) is None, "one example is the least"


def test_a_plateau_advises_one_direction_and_a_command_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("words " * 50)
    given = {"path": tmp_path / "some.txt", "steps": 9, "field": "a b", "layout": Layout(fsdp=2)}
    record = JobRecord(
        recipe="lm",
        options=recipes.plain(source_of("lm", given).options),
        job={"steps": 100},
    )
    for slope, first, then in ((1e-4, "3e-05", "0.003"), (-1e-4, "0.003", "3e-05")):
        flat = [
            TrainRecord(step=n, loss=5.0 + slope * n, grad_norm=1.0, learning_rate=3e-4)
            for n in range(1, 101)
        ]
        found = plateau(RunRecord(path=tmp_path, job=record, train=flat))
        assert found is not None
        rate, inspected = found.advice
        option = "--optimizer.learning-rate"
        said = rf"{option} {first} first; where the loss then [a-z ]+, {option} {then}"
        assert re.fullmatch(said, rate)
    command = shlex.split(inspected.removesuffix(", to see what the model sees"))
    assert command[:4] == ["systolic", "data", "inspect", "lm"]
    assert command[4:] == ["--path", str(tmp_path / "some.txt"), "--field", "a b"]
    options = VERBS["data"].forms[2].options.read
    asked = request(command[3], command[4:], "data inspect", options)
    assert asked.job.data.path == given["path"]


def test_an_accelerator_that_waits_for_the_host_is_seen(tmp_path: Path):
    time = {"compile": 0.0, "step": 100.0, "data_wait": 0.0, "eval": 0.0, "checkpoint": 0.0}
    names = [
        cause.name for cause in session_causes(fabricated(tmp_path / "a", time, device_wait=0.01))
    ]
    assert sorted(names) == ["host-synchronisation", "recompilation"]
    assert [cause.name for cause in session_causes(fabricated(tmp_path / "b", time))] == [
        "recompilation"
    ]


@pytest.mark.parametrize("counted", [True, False])
def test_steps_before_a_resume_are_no_time_of_the_session_after_it(tmp_path: Path, counted: bool):
    """Records of 40 slow steps, a kill, a resume from step 400, of which nothing was on record."""
    figures = {"loss": 1.0, "data_wait": 0.0, "device_wait": 0.9}
    more = {"num_steps": 1} if counted else {}
    with Run.create(tmp_path / "run", {"job": {"name": "made"}}) as run:
        run.append({"kind": "start", "step": 0, "time": 0.0, "resumed_from": None})
        for step in range(1, 41):
            train = {"kind": "train", "step": step, "time": step, "step_seconds": 5.0}
            run.append(train | figures | more)
        run.append({"kind": "start", "step": 400, "time": 900.0, "resumed_from": 400})
        for step in range(401, 421):
            seconds = 0.157 if step == 401 else 0.0107
            train = {"kind": "train", "step": step, "time": step + 500, "step_seconds": seconds}
            run.append(train | figures | more)
        for kind, time in (("killed", None), ("ended", {"step": 0.4, "compile": 2.6})):
            if time is not None:
                rest = dict.fromkeys(("data_wait", "eval", "checkpoint"), 0.0)
                run.write_summary({"steps": 420, "time": time | rest})
            found = {cause.name: cause for cause in session_causes(run)}
            if kind == "killed":
                # 0.157 s of 0.157 + 19 * 0.0107 s, less a usual step.
                assert found["stalls"].seconds == pytest.approx(0.157 - 0.0107)
                assert found["stalls"].share == pytest.approx(0.1463 / 0.3603)
            else:
                assert "stalls" not in found
            assert all((cause.share or 0.0) <= 1.0 for cause in found.values())


@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
def test_a_damaged_summary_is_named_and_the_rest_is_read(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
):
    time = {"compile": 10.0, "step": 50.0, "data_wait": 20.0, "eval": 15.0, "checkpoint": 5.0}
    run = fabricated(tmp_path / "run", time, data_wait=0.3)
    with Run.open(run.path, access=Access.write) as opened:
        opened.append({"kind": "end", "step": 40, "time": time, "steps": 40})
    whole = session_causes(run)
    (run.path / "summary.json").write_text(content)
    assert session_causes(run) == whole
    assert main(["explain", str(run.path), "--quick", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "summary.json is damaged" in shown["notes"][0]
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(lines[:-1]))
    # 9 s of compiling again, the 40 steps of a second, and the 15 s of evaluations.
    assert {c.name: c.share for c in session_causes(run)}["recompilation"] == pytest.approx(9 / 64)
    assert finished(run, planted.job(), changed=False) is None, "a resume writes it anew"


def test_the_screen_holds_many_causes_and_begins_with_the_verdict():
    many = [
        Cause(
            name=f"cause-{n}",
            title=f"Trouble {n}",
            share=0.1,
            seconds=3.0,
            evidence=["word " * 30] * 3,
            advice=["--option 1"] * 3,
        )
        for n in range(12)
    ]
    shown = [line.plain for line in lines("runs/x", many, 80)]
    assert shown[0] == "runs/x: 12 problems found"
    assert len(shown) <= HEIGHT
    assert all(len(line) <= 80 for line in shown)
    assert [line.split("  ")[0] for line in shown if "Trouble" in line] == [
        f"{n + 1}. Trouble {n}" for n in range(12)
    ]
    few = [line.plain for line in lines("runs/x", many[:1], 80)]
    assert sum(line.startswith("    try") for line in few) == 1
    assert next(line.plain for line in lines("runs/x", [], 80)).endswith("no problem found")


def test_looks_at_the_end_of_a_decay_tell_nothing_of_updates(healthy: RunRecord):
    history = healthy
    # Rounding takes a cosine below zero one step past its end, where a probe of the last checkpoint is.
    ended = [msgspec.structs.replace(look, learning_rate=-1.6e-9) for look in history.diagnoses]
    decayed = replace(history, diagnoses=ended)
    assert "lost-updates" not in {cause.name for cause in layers.causes(decayed)}
    assert any(line.startswith("updates by layer were") for line in unknown(decayed))
    # Ratios of updates are scaled to the peak's rate and judged; what rounding loses is not.
    late = [msgspec.structs.replace(look, learning_rate=1e-5) for look in history.diagnoses]
    scaled = replace(history, diagnoses=late)
    assert layers.ratios(scaled)
    (line,) = (line for line in unknown(scaled) if "has decayed" in line)
    assert line.startswith("whether rounding loses updates: they were probed only where")
    assert not any("has decayed" in line for line in unknown(history))
    running = replace(history, path=Path("a run"), diagnoses=(), summary=None)
    assert unknown(running)[0].endswith("; systolic train --resume 'a run' --diagnose 50")
    done = replace(running, summary=history.summary)
    assert unknown(done)[0].endswith("; systolic explain 'a run'")
    assert unknown(done, probed=True)[0].endswith("; train a new run with --diagnose 50")


def test_a_validation_loss_below_the_training_loss_is_not_learnt_by_heart(tmp_path: Path):
    def history(validation: list[float]) -> RunRecord:
        steps = range(1, 101)
        train = [TrainRecord(step=n, loss=0.3 if n < 50 else 0.06) for n in steps]
        evals = [
            EvalRecord(step=step, split="validation", metrics={"loss": loss})
            for step, loss in zip((50, 75, 100), validation, strict=True)
        ]
        return RunRecord(path=Path("run"), train=train, evals=evals)

    assert overfitting(history([0.035, 0.038, 0.042])) is None
    assert overfitting(history([0.135, 0.138, 0.242])) is not None


def test_advice_names_options_only_where_the_recipe_has_them():
    mesh = advise("a smaller {} with more {}", "layout.fsdp", "layout.data")
    advice = [mesh, "--flags=x", advise("{} bf16", "precision")]
    typed = ["a smaller --layout.fsdp with more --layout.data", "--flags=x", "--precision bf16"]
    known = Settings({"layout": {"fsdp": 1, "data": 1}, "precision": "auto"})
    for settings in (known, None):
        assert [render(one, settings) for one in advice] == typed
    told = "(the recipe has no option for it; change it there)"
    assert [Settings({"layout": {"data": 1}}).render(one) for one in advice] == [
        f"a smaller layout.fsdp with more --layout.data {told}",
        "--flags=x",
        f"precision bf16 {told}",
    ]
