"""The study shared by processes: claims, releases, heartbeats."""

import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from optuna import create_study, delete_study
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial

from systolic.core.errors import DataError, OptionError, RunError
from systolic.job import Mode
from systolic.runs.access import is_held
from systolic.tuning import sampling
from systolic.tuning.claims import is_gone, this_worker
from systolic.tuning.objective import ENOUGH, Aim, _mean_shares, _shares, importance
from systolic.tuning.results import rows_of
from systolic.tuning.search import Searched
from systolic.tuning.study import SharedStudy, address
from tests.tiers import some
from tests.tuning.databases import with_tables

LEARNED = Searched(name="rate", spec="", low=1e-4, high=1e-2, log=True)
LAYERS = Searched(name="layers", spec="", low=1, high=4, whole=True)


def study(folder: Path, stale_seconds: int = 120) -> SharedStudy:
    with_tables(folder / "study.db")
    return SharedStudy(address(None, folder, "s"), {"recipe": "r"}, ["minimize"], stale_seconds)


def test_each_trial_is_claimed_once_whoever_asks(tmp_path: Path) -> None:
    study(tmp_path)
    claimed: list[int] = []

    def work(name: str, shared: SharedStudy) -> None:
        while (record := shared.claim(10, name)) is not None:
            claimed.append(record.number)

    # Opened here, since threads share the filter of warnings.
    opened = [(f"elsewhere/{i}/0", study(tmp_path)) for i in range(3)]
    threads = [threading.Thread(target=work, args=each) for each in opened]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert Counter(claimed) == Counter(range(10))
    assert len(study(tmp_path).trials(10)) == 10


def test_a_trial_whose_process_is_gone_waits_with_its_values(tmp_path: Path) -> None:
    shared = study(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = this_worker().replace(f"/{os.getpid()}/", f"/{child.pid}/")
    assert is_gone(name), "the process of that number started at another time"
    record = shared.claim(2, name)
    trial = shared.drawn(record, sampling.build(sampling.Sampler.tpe, [LEARNED], 0, 0), None)
    value = LEARNED.suggest(trial)
    # The sampler learns from the rounded number, which is trained with.
    assert shared.trials(2)[0].params == {"rate": value}
    child.communicate()
    again = shared.claim(2, this_worker())
    assert again.number == record.number == 0
    sampler = sampling.build(sampling.Sampler.random, [LEARNED], 7, 0)
    assert LEARNED.suggest(shared.drawn(again, sampler, None)) == value
    # The first worker was only slow: its result no longer counts.
    assert not shared.finish(trial, name, [1.0], "")
    assert shared.finish(trial, this_worker(), [2.0], "")
    assert shared.trials(2)[0].values == [2.0]
    assert shared.claim(2, this_worker()).number == 1
    assert shared.claim(2, "elsewhere/1/0") is None


def test_a_worker_elsewhere_is_gone_without_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = study(tmp_path, stale_seconds=60)
    record = shared.claim(1, "elsewhere/1/0")
    assert not is_gone("elsewhere/1/0")
    # The clocks of machines may differ: heartbeats have the database's.
    ahead = time.time() + 9000
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: ahead)
        assert shared.claim(1, this_worker()) is None
        assert shared.beat(0, "elsewhere/1/0")
    made_stale(shared)
    # It was only slow, and sends a heartbeat in time.
    assert shared.beat(0, "elsewhere/1/0")
    assert shared.claim(1, this_worker()) is None
    made_stale(shared)
    assert shared.claim(1, this_worker()).number == record.number
    assert shared.claim(1, "elsewhere/2/0") is None
    assert not shared.release(record.number, "elsewhere/1/0")
    assert shared.release(record.number, this_worker())
    assert not shared.release(record.number, this_worker())


def test_two_that_find_a_worker_gone_do_not_both_get_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second claims the trial after the first has found its worker dead and before it releases it."""
    first, second = study(tmp_path), study(tmp_path)
    assert first.claim(1, "elsewhere/1/0").number == 0
    taken: list[Any] = []

    def gone(worker: str) -> bool:
        if not taken:
            taken.append(worker)
            taken.append(second.claim(1, "elsewhere/2/0"))
        return worker == "elsewhere/1/0"

    monkeypatch.setattr("systolic.tuning.study.is_gone", gone)
    assert first.claim(1, "elsewhere/3/0") is None
    assert second.owns(taken[1].number, "elsewhere/2/0")


CHILD = """
import sys
from pathlib import Path
from systolic.runs.access import Lock
from systolic.tuning.study import SharedStudy, address
from systolic.tuning.claims import this_worker

folder = Path(sys.argv[1])
shared = SharedStudy(address(None, folder, "s"), {"recipe": "r"}, ["minimize"])
record = shared.claim(1, this_worker())
(folder / "run").mkdir()
lock = Lock(folder / "run")
print(this_worker(), flush=True)
input()
shared.note(record.number, owned=shared.owns(record.number, this_worker()))
"""


def child(folder: Path, *before: str) -> subprocess.Popen[str]:
    """A process that holds the study's trial and its run until it reads a line."""
    line = [*before, sys.executable, "-c", CHILD, str(folder)]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def earlier(folder: Path, workers: Sequence[str]) -> None:
    """A study as versions without a table of claims left it, with a running trial of each worker."""
    url = f"sqlite:///{folder / 'study.db'}"
    storage = RDBStorage(url)
    made = create_study(storage=storage, study_name="s")
    made.set_user_attr("systolic", {"recipe": "r"})
    for place, worker in enumerate(workers):
        made.add_trial(create_trial(state=TrialState.WAITING))
        trial = made.ask()
        LEARNED.suggest(trial)
        kept = {"worker": worker, "dollars": 2.0, "granted": True, "begun": [place, 1]}
        for name, value in kept.items():
            trial.set_user_attr(name, value)
        trial.report(0.5, 3)
    made.add_trial(create_trial(state=TrialState.WAITING, user_attrs={"worker": "elsewhere/9/0"}))
    storage.remove_session()


def test_a_study_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its running trials have no claims: one of a process that has ended, one of another machine, one of Optuna's own program."""
    gone = this_worker().replace(f"/{os.getpid()}/", f"/{2**22 + 1}/")
    earlier(tmp_path, [gone, "elsewhere/1/0", ""])
    shared = study(tmp_path)
    before = shared.trials(4)
    assert [one.state.name for one in before] == ["RUNNING"] * 3 + ["WAITING"]
    taken = [shared.claim(4, this_worker()) for _ in range(3)]
    assert [one and one.number for one in taken] == [0, 3, None]
    assert shared.grant(taken[1], 1.0, 10.0) == 4.0
    # The worker elsewhere may live, and has the usual time for a heartbeat.
    assert shared.beat(1, "elsewhere/1/0")
    made_stale(shared)
    assert shared.beat(0, this_worker())
    again = [shared.claim(4, "elsewhere/2/0") for _ in range(3)]
    assert [one.number for one in again] == [1, 2, 3]
    assert not shared.beat(1, "elsewhere/1/0")
    for one in (taken[0], *again[:2]):
        assert one.params == before[one.number].params
        assert one.intermediate_values == {3: 0.5}
        assert one.user_attrs["begun"] == [one.number, 1]
    trial = shared.drawn(taken[0], sampling.build(sampling.Sampler.tpe, [LEARNED], 0, 0), None)
    assert shared.finish(trial, this_worker(), [1.0], "")
    assert shared.trials(4)[0].values == [1.0]


def test_a_result_whose_worker_dies_before_optuna_has_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, other = study(tmp_path), study(tmp_path)
    ended = {0: ([1.0], ""), 1: (None, "refused: too large")}
    for number, (values, reason) in ended.items():
        record = shared.claim(2, "elsewhere/1/0")
        trial = shared.drawn(record, sampling.build(sampling.Sampler.random, [], 0, 0), None)
        with monkeypatch.context() as patch:
            patch.setattr(shared.study, "tell", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                shared.finish(trial, "elsewhere/1/0", values, reason)
        assert not shared.finish(trial, "elsewhere/1/0", [5.0], "")
        assert not other.release(number, "elsewhere/1/0")
    assert [one.state.name for one in other.trials(2)] == ["RUNNING"] * 2
    assert other.claim(2, this_worker()) is None
    made_stale(shared)
    assert other.claim(2, this_worker()) is None
    for one in shared.trials(2):
        assert (one.values, one.user_attrs.get("reason", "")) == ended[one.number]
    assert [one.state.name for one in shared.trials(2)] == ["COMPLETE", "PRUNED"]


def test_a_damaged_claim_or_attribute_is_one_line(tmp_path: Path) -> None:
    shared = study(tmp_path)
    record = shared.claim(1, this_worker())
    database = tmp_path / "study.db"
    for text, reason in {
        "{": r"Expecting property name .*",
        '{"state": "LOST"}': r"Invalid enum value 'LOST' - at `\$.state`",
        '{"state": "COMPLETE", "values": ["a"]}': r"Expected `float`, got `str` - at .*",
    }.items():
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE systolic_claims SET outcome = ? WHERE trial != ''", (text,))
        with pytest.raises(DataError, match=rf"a damaged outcome .* \({reason}\) in its table"):
            shared.trials(1)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE systolic_claims SET outcome = NULL")
    assert len(shared.trials(1)) == 1
    shared.note(record.number, share="half")
    line = r"trial 0 of the study has a damaged attribute \(Expected `float . null`, got `str` - at"
    with pytest.raises(DataError, match=line):
        shared.trials(1)


def test_a_study_that_was_deleted_and_made_again_has_no_claims(tmp_path: Path) -> None:
    shared = study(tmp_path)
    record = shared.claim(1, this_worker())
    trial = shared.drawn(record, sampling.build(sampling.Sampler.random, [], 0, 0), None)
    assert shared.finish(trial, this_worker(), [1.0], "")
    shared.close()
    delete_study(study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}")
    again = study(tmp_path)
    assert again.trials(1) == []
    assert again.claim(1, this_worker()).number == 0
    assert again.claim(1, this_worker()) is None


def made_stale(shared: SharedStudy) -> None:
    """Puts all heartbeats an hour back."""
    database = shared.where.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE systolic_claims SET beat = beat - 3600")


def test_a_worker_that_was_suspended_keeps_the_trial_that_it_trains(tmp_path: Path) -> None:
    """It has sent no heartbeats for a long time, and its process holds the run's lock."""
    shared, run = study(tmp_path), tmp_path / "run"
    with child(tmp_path) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        made_stale(shared)
        assert shared.claim(1, this_worker(), lambda _: is_held(run)) is None
        (before,) = shared.trials(1)
        assert (before.state.name, before.user_attrs["worker"]) == ("RUNNING", name)
        other.communicate("\n")
    assert shared.trials(1)[0].user_attrs["owned"]
    # It has ended, and the next worker gets the trial.
    assert shared.claim(1, this_worker(), lambda _: is_held(run)).number == 0


@pytest.mark.slow
def test_a_worker_that_sees_other_processes_is_not_gone(tmp_path: Path) -> None:
    """Two containers can share a machine's name and have their own process ids."""
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("user namespaces are not available")
    with child(tmp_path, *alone) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        host, *_, pid, _ = name.split("/")
        assert host == socket.gethostname()
        assert int(pid) < 10
        shared = study(tmp_path)
        assert shared.claim(1, this_worker()) is None
        other.communicate("\n")
    assert shared.trials(1)[0].user_attrs["owned"]


def test_two_that_ask_for_the_last_dollars_do_not_both_go_without(tmp_path: Path) -> None:
    """Both have stored their trial's cost before either asks; one gets the dollars."""
    shared = study(tmp_path)
    records = [shared.claim(2, f"elsewhere/{number}/0") for number in range(2)]
    for one in records:
        shared.note(one.number, dollars=3.0)
    left: list[float] = []

    def ask(own: SharedStudy, record: Any) -> None:
        left.append(own.grant(record, 3.0, 5.0))

    # Opened here, since threads share the filter of warnings.
    threads = [threading.Thread(target=ask, args=(study(tmp_path), one)) for one in records]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(left) == [2.0, 5.0]


def test_a_result_that_is_not_a_number_is_a_failure(tmp_path: Path) -> None:
    shared = study(tmp_path)
    record = shared.claim(1, this_worker())
    trial = shared.drawn(record, sampling.build(sampling.Sampler.random, [], 0, 0), None)
    assert shared.finish(trial, this_worker(), [float("nan")], "")
    (row,) = rows_of(shared, 1, [], [Aim(name="loss", mode=Mode.min)], tmp_path)
    assert (row.state, row.reason.partition(":")[2]) == (
        "failed",
        " the value of an objective is not finite",
    )


@pytest.mark.parametrize(
    "name",
    some(
        {one.value: one for one in sampling.Sampler},
        [one.value for one in sampling.Sampler if one is not sampling.Sampler.random],
    ),
)
def test_every_sampler_draws_the_same_whichever_process_asks(
    name: sampling.Sampler, tmp_path: Path
) -> None:
    searched = [
        LAYERS,
        Searched(name="kind", spec="", choices={"a": 1, "b": 2}),
    ]
    if name is sampling.Sampler.cmaes:
        searched = [LEARNED, LAYERS]
    drawn = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        shared = study(tmp_path / folder)
        found = []
        while (record := shared.claim(8, this_worker())) is not None:
            sampler = sampling.build(name, searched, 3, record.number)
            pruner = sampling.pruner(sampling.Pruner.hyperband, 5, 40)
            trial = shared.drawn(record, sampler, pruner)
            found.append(tuple(one.suggest(trial) for one in searched))
            assert shared.finish(trial, this_worker(), [float(found[-1][0])], "")
        drawn.append(found)
        numbers = [one.name for one in searched if one.is_range]
        kept = [tuple(each.params[one] for one in numbers) for each in shared.trials(8)]
        assert kept == [values[: len(numbers)] for values in found]
    assert drawn[0] == drawn[1]
    if name is sampling.Sampler.grid:
        assert sorted(drawn[0]) == [(i, k) for i in range(1, 5) for k in (1, 2)]


def answered(
    aims: Sequence[Aim],
    searched: Sequence[Searched],
    settings: Sequence[Any],
    values: Sequence[float],
) -> tuple[Any, dict[str, float]]:
    """Optuna's study with these results and its importances; checks that there are none before the last."""
    made = create_study(directions=[one.direction for one in aims])
    found = []
    for number, (each, value) in enumerate(zip(settings, values, strict=True)):
        if number == len(settings) - 1:
            found.append(importance(made, aims, searched))
        made.add_trial(
            create_trial(
                params=dict(zip([one.name for one in searched], each, strict=True)),
                distributions={one.name: one.distribution for one in searched},
                values=[value, 1.0][: len(aims)],
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of databases that other tests leave
        found.append(importance(made, aims, searched))
    assert found[0] == {}
    return made, found[1]


@pytest.mark.slow
def test_the_same_options_matter_beside_a_second_objective() -> None:
    """One option ranks the good trials, the other makes outliers: only the first matters for the best."""
    chance, found = random.Random(0), []
    accuracy, seconds = Aim(name="accuracy", mode=Mode.max), Aim(name="seconds", mode=Mode.min)
    settings = [(chance.random(), chance.random()) for _ in range(ENOUGH)]
    values = [0.9 + 0.09 * (1 - abs(a - 0.5) * 2) - 0.6 * (b > 0.85) for a, b in settings]
    searched = [Searched(name=name, spec="0..1", low=0, high=1) for name in "ab"]
    for aims in ((accuracy,), (accuracy, seconds)):
        found.append(answered(aims, searched, settings, values)[1])
    assert found[0] == found[1]
    assert found[0]["a"] > found[0]["b"]
    assert sum(found[0].values()) == pytest.approx(1)


def test_the_same_settings_again_do_not_matter_more() -> None:
    """All settings of a search over choices, the first of which decides, with the best trained many times."""
    aim = Aim(name="loss", mode=Mode.min)
    searched = [
        Searched(name="a", spec="", choices={"1": 1, "2": 2, "3": 3}),
        Searched(name="b", spec="", choices={"x": "x", "y": "y", "z": "z", "w": "w"}),
    ]
    every = [(a, b) for b in ("x", "y", "z", "w") for a in (3, 2, 1)]
    noise = [0.003 * (7 * place % 5) for place in range(len(every))]
    values = [0.1 * a + more for (a, _), more in zip(every, noise, strict=True)]
    # The best setting is drawn thirty more times.
    settings = [*every[:-1], *[(1, "z")] * 30, every[-1]]
    values = [*values[:-1], *[values[8]] * 30, values[-1]]
    _, found = answered([aim], searched, settings, values)
    assert found["a"] > 0.9


def test_importances_hardly_depend_on_the_forests_seeds() -> None:
    """Noisy results, for which single forests differ by several per cent."""
    aim, chance = Aim(name="loss", mode=Mode.min), random.Random(0)
    searched = [Searched(name=name, spec="0..1", low=0, high=1) for name in "ab"]
    settings = [(chance.random(), chance.random()) for _ in range(ENOUGH)]
    values = [a * a + 0.5 * b + 0.2 * chance.random() for a, b in settings]
    made, found = answered([aim], searched, settings, values)
    single = [_shares(made, seed)["a"] for seed in range(8)]
    assert max(single) - min(single) > 0.04
    assert abs(found["a"] - _mean_shares(made, 100)["a"]) < 0.02


@pytest.mark.parametrize(
    "by",
    some(
        {
            f"{name.value}-{kind.value}": (name, kind)
            for kind in (sampling.Pruner.none, sampling.Pruner.hyperband)
            for name in (sampling.Sampler.tpe, sampling.Sampler.random)
        },
        ["tpe-hyperband", "random-none"],
    ),
)
def test_no_settings_are_drawn_twice_while_there_are_others(
    by: tuple[sampling.Sampler, sampling.Pruner], tmp_path: Path
) -> None:
    """One of twelve settings is much better, which attracts a sampler."""
    name, kind = by
    searched = [LAYERS, Searched(name="width", spec="", low=0.1, high=0.3, step=0.1)]
    assert sampling.check(name, searched, 1) == 12
    shared, found = study(tmp_path), []
    pruner = sampling.pruner(kind, 5, 40)
    while (record := shared.claim(13, this_worker())) is not None:
        sampler = sampling.build(name, searched, 3, record.number)
        trial = shared.drawn(record, sampler, pruner)
        found.append(tuple(one.suggest(trial) for one in searched))
        best = found[-1] == found[0]
        if record.number == 4:  # unrelated to its settings, which may be drawn again
            shared.fail(trial, this_worker(), "the disk is full")
        else:
            assert shared.finish(trial, this_worker(), [0.0 if best else 1.0], "")
    told = [each for number, each in enumerate(found) if number != 4]
    assert len(set(told)) == 12
    assert found[4] in told
    # One more than there are settings: a repeat.
    extra = shared.claim(14, this_worker())
    trial = shared.drawn(extra, sampling.build(name, searched, 3, 13), pruner)
    assert tuple(one.suggest(trial) for one in searched) in told


def test_an_interrupted_trial_costs_what_it_made(tmp_path: Path) -> None:
    shared = study(tmp_path)
    record = shared.claim(2, this_worker())
    shared.note(record.number, dollars=4.0)
    assert shared.grant(record, 4.0, 10.0) == 10.0
    other = shared.claim(2, "elsewhere/1/0")
    # While it runs, its full cost is reserved.
    assert shared.grant(other, 1.0, 10.0) == 6.0
    shared.note(record.number, share=0.25, steps=5, seconds=3.0)
    assert shared.release(record.number, this_worker())
    assert shared.grant(other, 1.0, 10.0) == 9.0
    aims = [Aim(name="loss", mode=Mode.min)]
    row = rows_of(shared, 2, [LEARNED], aims, tmp_path)[0]
    assert (row.state, row.dollars, row.seconds, row.step) == ("waiting", 1.0, 3.0, 5)
    again = shared.claim(2, this_worker())
    assert again.number == 0
    assert shared.grant(other, 1.0, 10.0) == 6.0


def test_a_killed_trial_keeps_its_dollars_whatever_the_total(tmp_path: Path) -> None:
    """It could not note its steps, so all of them count until it ends."""
    shared = study(tmp_path)
    record = shared.claim(3, "elsewhere/1/0")
    shared.note(record.number, dollars=4.0, begun=(0, 1))
    assert shared.release(record.number, "elsewhere/1/0")
    other = shared.claim(3, this_worker())
    assert other.number == 0
    third = shared.claim(3, this_worker())
    assert shared.release(other.number, this_worker())
    assert shared.grant(third, 1.0, 10.0) == 6.0
    aims = [Aim(name="loss", mode=Mode.min)]
    assert rows_of(shared, 3, [LEARNED], aims, tmp_path)[0].dollars == 4.0


def test_runs_beside_another_database_keep_their_study(tmp_path: Path) -> None:
    def opened(name: str, **definition: str) -> SharedStudy:
        where = address(f"sqlite:///{tmp_path / name}", tmp_path, "s")
        return SharedStudy(where, definition, ["minimize"], runs=tmp_path / "trials")

    opened("a.db", recipe="r", options="1").agree_on({"precision": "f32"})
    opened("b.db", recipe="r", options="1")
    with pytest.raises(OptionError, match=r"trials has runs of a study with the options 1, not 2"):
        opened("c.db", recipe="r", options="2")
    with pytest.raises(OptionError, match="the precision f32, not bf16"):
        opened("b.db", recipe="r", options="1").agree_on({"precision": "bf16"})
    (tmp_path / "trials.json").write_text("{")
    with pytest.raises(DataError, match=r"trials.json is damaged .*; remove it if"):
        opened("a.db", recipe="r", options="1")


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("a text that is long enough to be no database at all\n" * 90)
    with pytest.raises(DataError, match=r"is damaged .file is not a database"):
        study(tmp_path)


def test_a_file_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE bank (account)")
        connection.commit()
    before = file.read_bytes()
    with pytest.raises(DataError, match=r"has tables of another program .bank.; restore it"):
        study(tmp_path)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


def test_a_study_whose_pages_are_damaged_is_told(tmp_path: Path) -> None:
    study(tmp_path).close()
    file = tmp_path / "study.db"
    damaged = bytearray(file.read_bytes())
    damaged[4096 * 3 : 4096 * 12] = b"\xff" * 4096 * 9
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"is damaged .*malformed"):
        study(tmp_path)


def filled(folder: Path) -> None:
    """A study that grows to 5 MB."""
    with closing(study(folder)) as shared, shared.reported():
        for number in range(100):
            record = shared.claim(100, this_worker())
            shared.note(record.number, text="x" * 1000 * number)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_and_the_study_goes_on(tmp_path: Path) -> None:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "none", tmp_path], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"tmpfs can't be mounted: {made.stderr.decode().strip()}")
    try:
        with pytest.raises(RunError, match=r"disk is full.; free space and rerun"):
            filled(tmp_path)
        subprocess.run(["mount", "-o", "remount,size=10m", tmp_path], check=True)
        shared = study(tmp_path)
        trials = shared.trials(100)
        assert [one.number for one in trials] == list(range(len(trials)))
        assert shared.claim(100, this_worker()) is not None
        shared.close()
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    study(tmp_path)
    with pytest.raises(OptionError, match="has the recipe r, not other"):
        SharedStudy(address(None, tmp_path, "s"), {"recipe": "other"}, ["minimize"])


def test_a_database_without_its_driver_names_it(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy.dialects.mysql")
    with pytest.raises(OptionError, match="needs the Python package MySQLdb"):
        SharedStudy(address("mysql://user@host/db", tmp_path, "s"), {}, ["minimize"])


def test_a_database_that_does_not_answer_is_told_with_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RunError) as caught:
            SharedStudy(
                address(f"postgresql://u:geheim@{place}/x", tmp_path, "s"), {}, ["minimize"]
            )
    told = str(caught.value)
    assert told.startswith(f"the storage postgresql://u:***@{place}/x does not answer (connection")
    assert told.endswith("Connection refused); start the database, or check --storage")
    assert "\n" not in told


def test_a_database_of_another_version_is_told(tmp_path: Path) -> None:
    study(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        connection.execute("ALTER TABLE studies RENAME COLUMN study_name TO label")
        connection.commit()
    with pytest.raises(DataError, match="holds no study of this version of Optuna"):
        study(tmp_path).trials(1)
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num='v3.0.0.d'")
    with pytest.raises(DataError, match="is of another version of Optuna; back it up and upgrade"):
        study(tmp_path)


def test_a_password_is_not_shown() -> None:
    where = address("postgresql://eve:secret@host/db", Path(), "s")
    assert where.url.startswith("postgresql+psycopg://")
    assert where.shown == "postgresql://eve:***@host/db"
    query = address("postgresql://host/db?password=secret", Path(), "s")
    assert query.shown == "postgresql://host/db"


def test_a_study_that_python_began_with_whole_floats_goes_on(tmp_path: Path) -> None:
    """Its search was written ``0.5,1`` for ``[0.5, 1.0]``, and the command's is ``0.5,1.0``."""
    with_tables(tmp_path / "study.db")

    def opened(search: str) -> SharedStudy:
        definition = {"recipe": "r", "search": [search]}
        return SharedStudy(address(None, tmp_path, "s"), definition, ["minimize"], 120)

    opened("scale=0.5,1")
    opened("scale=0.5,1.0")
    with pytest.raises(OptionError, match=r"not scale=0\.5,1\.5; continue it with its own command"):
        opened("scale=0.5,1.5")
