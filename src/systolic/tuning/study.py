"""The study that several processes share: trials of one search in Optuna's storage, each claimed by one worker at a time.

A trial is a row of the storage. It waits, it runs while its worker sends heartbeats, and it ends once. Moves between
waiting and running are single statements that compare before they set, so that no trial is claimed twice; one whose
worker is gone waits again with its values and its run, so that none is lost.
"""

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, MissingExtraError, OptionError, RunError
from systolic.tuning.engine import optuna, settled, sqlalchemy
from systolic.tuning.worker import is_gone

DEFINITION = "systolic"
"""Attribute of a study: what it searches."""
CONTENTS = ("recipe file", "modules", "data", "precision", "devices")
"""Parts of a definition that no command says."""
WORKER = "worker"
"""Attribute of a trial: the process that has it, or had it last."""
GRANTED = "granted"
"""Attribute of a trial: the budget has its dollars."""
BUSY_SECONDS = 60
"""Longest wait for another process's write to an SQLite file."""
_OWNED = (
    "trial_id=:trial AND state='RUNNING' AND :worker = COALESCE("
    "(SELECT value_json FROM trial_user_attributes WHERE trial_id=:trial AND key=:key), '\"\"')"
)
"""Whether a trial runs in a worker; the name "" stands for none."""
OWN = {"studies", "alembic_version", "version_info"}
"""Tables that a file of Optuna has from its first moment on."""
MAKING = ("already exists", "UNIQUE constraint", "duplicate key", "no such table", "does not exist")
"""Words of databases on tables that another process makes at this moment."""
OPENED = 10
"""Times that a storage is opened while another process makes its tables."""
DAMAGED = ("malformed", "not a database")
"""Words of SQLite on a damaged file."""
_ELSE = "restore it from a copy, or give --study another folder (and --storage, where it is given, another database)"
BEATS = 4
"""Heartbeats in the time after which a trial without any is taken over."""


@dataclass(frozen=True, kw_only=True)
class StudyAddress:
    """Where a study is kept."""

    url: str
    name: str

    @property
    def shown(self) -> str:
        """The address without a password."""
        return sqlalchemy().engine.make_url(self.url).render_as_string(hide_password=True)


def address(storage: str | None, folder: Path, name: str) -> StudyAddress:
    """The address of ``--storage``; by default an SQLite file in the study's folder.

    Raises:
        OptionError: it is no address of a database.
    """
    optuna()
    if storage is None:
        return StudyAddress(url=f"sqlite:///{folder / 'study.db'}", name=name)
    for plain in ("postgresql://", "postgres://"):
        if storage.startswith(plain):
            storage = f"postgresql+psycopg://{storage.removeprefix(plain)}"
    try:
        sqlalchemy().engine.make_url(storage).get_dialect()
    except sqlalchemy().exc.NoSuchModuleError as error:
        kind = storage.partition(":")[0]
        raise OptionError(
            f"--storage names the database {kind}, which SQLAlchemy does not know; use postgresql or sqlite"
        ) from error
    except sqlalchemy().exc.ArgumentError as error:
        raise OptionError(
            "--storage is no address of a database; it takes one such as postgresql://user@host/tuning or sqlite:///study.db"
        ) from error
    return StudyAddress(url=storage, name=name)


class SharedStudy:
    """A study in its storage, opened or made.

    Args:
        where: Its address.
        definition: What it searches, plain values; a study of another is refused.
        directions: Of its objectives, as Optuna has them.
        stale_seconds: Time without a heartbeat after which a trial's worker counts as gone.

    Raises:
        OptionError: the storage has a study of this name that searches something else.
        RunError: the storage can't be reached.
        MissingExtraError: its driver is not installed.
    """

    def __init__(
        self,
        where: StudyAddress,
        definition: Mapping[str, Any],
        directions: Sequence[str],
        stale_seconds: int = 120,
    ) -> None:
        self.where = where
        self.beat_seconds = max(stale_seconds // BEATS, 1)
        self._storage = _storage(where, self.beat_seconds, stale_seconds)
        self._study = self._open(directions)
        self.settle(definition)

    def _open(self, directions: Sequence[str]) -> Any:
        with _reported(self.where):
            return optuna().create_study(
                storage=self._storage,
                study_name=self.where.name,
                directions=list(directions),
                load_if_exists=True,
            )

    def settle(self, definition: Mapping[str, Any]) -> None:
        """Compares what the study has of a definition, and keeps the rest: a study of an earlier version has less of it.

        Raises:
            OptionError: the study has something else.
        """
        kept = self._study.user_attrs.get(DEFINITION, {})
        for name, value in definition.items():
            if kept.get(name, value) != value:
                had, has = _different(kept[name], value)
                own = "the same" if name in CONTENTS else "its own command"
                raise OptionError(
                    f"the study {self.where.name} has the {name} {had}, not {has}; continue it with {own}, or give --study another folder"
                )
        if set(definition) - set(kept):
            self._study.set_user_attr(DEFINITION, {**kept, **definition})

    def close(self) -> None:
        """Closes the connections to the storage."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Context that reports in one line a storage that can't be reached or written.

        Raises:
            RunError: the storage can't be reached or written.
            DataError: it is damaged.
        """
        return _reported(self.where)

    @property
    def study(self) -> Any:
        """Optuna's study."""
        return self._study

    def trials(self, total: int) -> list[Any]:
        """Optuna's records of the study's trials: the first ``total``, and later ones that have ended under a larger total."""
        with _reported(self.where):
            found = self._study.get_trials(deepcopy=False)
        return [one for one in found if one.number < total or one.state.is_finished()]

    # Claims

    def claim(
        self, total: int, worker: str, is_busy: Callable[[int], bool] = lambda _: False
    ) -> Any:
        """The next of ``total`` trials, which now is this worker's: Optuna's record; None where none waits.

        Trials whose worker is gone wait again first. Fewer trials than ``total`` are filled up.

        Args:
            total: Trials of the study.
            worker: Who asks.
            is_busy: Whether a trial of this number is being trained, whatever its heartbeats say; it is left alone.
        """
        waiting = optuna().trial.TrialState.WAITING
        while True:
            trials = self.trials(total)
            if self._release_gone(trials, is_busy):
                trials = self.trials(total)
            ids = [
                one._trial_id for one in trials if one.state is waiting and not is_busy(one.number)
            ]
            if not ids and len(trials) < total:
                new = optuna().create_trial(state=waiting)
                # Through Optuna's cache of the study, which has to know a trial before it draws its values.
                ids = [self._study._storage.create_new_trial(self._study._study_id, new)]
                # A process that does the same at this moment makes one too many, which waits for a larger total.
                if self._storage.get_trial(ids[0]).number >= total:
                    continue
            for each in ids:
                if self._take(each, worker):
                    return self._storage.get_trial(each)
            if not ids:
                return None

    def drawn(self, record: Any, sampler: Any, pruner: Any) -> Any:
        """A claimed trial as Optuna's own, to draw values for and to report to."""
        self._study.sampler, self._study.pruner = sampler, pruner
        return optuna().trial.Trial(self._study, record._trial_id)

    def _take(self, trial_id: int, worker: str) -> bool:
        """Moves a trial from waiting to running; False where another process was faster."""
        # Before the move, since a trial without a heartbeat would never be found stale.
        self.beat(trial_id)
        text = sqlalchemy().text
        with self._storage.engine.begin() as connection:
            moved = connection.execute(
                text(
                    "UPDATE trials SET state='RUNNING', datetime_start=:now WHERE trial_id=:trial AND state='WAITING'"
                ),
                {"trial": trial_id, "now": datetime.datetime.now()},
            ).rowcount
            if moved:
                # In one transaction with the move: no process sees it run under the name of its last worker.
                _keep(connection, trial_id, WORKER, worker)
        return bool(moved)

    def beat(self, trial_id: int) -> None:
        """Records that the trial's worker lives."""
        self._storage.record_heartbeat(trial_id)

    def owns(self, trial_id: int, worker: str) -> bool:
        """Whether a running trial is still this worker's."""
        with self._storage.engine.connect() as connection:
            query = f"SELECT 1 FROM trials WHERE {_OWNED}"
            return bool(
                connection.execute(sqlalchemy().text(query), _named(trial_id, worker)).all()
            )

    def release(self, trial_id: int, worker: str) -> bool:
        """Moves a trial whose worker stops, or has ended, from running to waiting; not one that another has claimed since."""
        with self._storage.engine.begin() as connection:
            change = f"UPDATE trials SET state='WAITING' WHERE {_OWNED}"
            made = connection.execute(sqlalchemy().text(change), _named(trial_id, worker))
            return bool(made.rowcount)

    def _release_gone(self, trials: Sequence[Any], is_busy: Callable[[int], bool]) -> list[Any]:
        """Releases trials whose worker has ended: a process of this machine that is not there, or one without heartbeats."""
        running = [one for one in trials if one.state is optuna().trial.TrialState.RUNNING]
        if not running:
            return []
        with _reported(self.where):
            stale = set(self._storage._get_stale_trial_ids(self._study._study_id))
        found = []
        for one in running:
            worker = one.user_attrs.get(WORKER, "")
            gone = one._trial_id in stale or is_gone(worker)
            if gone and not is_busy(one.number) and self.release(one._trial_id, worker):
                found.append(one)
        return found

    def grant(self, record: Any, dollars: float, budget_usd: float, total: int) -> float:
        """Lets a trial begin that costs no more than is left; returns what is left without it.

        One process after another, so that of two that ask for the last dollars one gets them.
        """
        with self._storage.engine.begin() as connection:
            # Changes nothing, and makes others wait here until the end of the block.
            alone = "UPDATE studies SET study_name=study_name WHERE study_id=:study"
            connection.execute(sqlalchemy().text(alone), {"study": self._study._study_id})
            others = [one for one in self.trials(total) if one.number != record.number]
            left = budget_usd - sum(map(_spent, others))
            if dollars <= left:
                _keep(connection, record._trial_id, GRANTED, True)
        return left

    # Results

    def note(self, trial_id: int, **values: Any) -> None:
        """Keeps attributes of a trial that runs, in one transaction; another worker may have taken it over and ended it."""
        # Changes nothing, and others wait: a transaction that begins by reading could not write after another's.
        there = "UPDATE trials SET state=state WHERE trial_id=:trial AND state IN ('RUNNING', 'WAITING')"
        with self._storage.engine.begin() as connection:
            if connection.execute(sqlalchemy().text(there), {"trial": trial_id}).rowcount:
                for name, value in values.items():
                    _keep(connection, trial_id, name, value)

    def finish(self, trial: Any, worker: str, values: Sequence[float] | None, reason: str) -> bool:
        """Ends a trial once, with its values, or stopped early without them; False where it is no longer this worker's."""
        if not self.owns(trial._trial_id, worker):
            return False
        states = optuna().trial.TrialState
        finite = values is not None and all(math.isfinite(value) for value in values)
        if values is not None and not finite:
            reason = "failed: a value that it is judged by is not a number"
        if reason:
            self.note(trial._trial_id, reason=reason)
        state = states.COMPLETE if finite and not reason else states.PRUNED
        # After the last point of a grid Optuna stops its own loop, and there is none.
        with contextlib.suppress(RuntimeError):
            self._study.tell(trial, values if state is states.COMPLETE else None, state=state)
        return True

    def fail(self, trial: Any, worker: str, reason: str) -> None:
        """Ends a trial that has no result, for a reason that says nothing about its values."""
        if self.owns(trial._trial_id, worker):
            self.note(trial._trial_id, reason=reason)
            self._study.tell(trial, state=optuna().trial.TrialState.FAIL)


def _named(trial_id: int, worker: str) -> dict[str, Any]:
    return {"trial": trial_id, "key": WORKER, "worker": json.dumps(worker)}


def _keep(connection: Any, trial_id: int, key: str, value: Any) -> None:
    """Keeps an attribute of a trial in a transaction of its caller."""
    for statement in (
        "DELETE FROM trial_user_attributes WHERE trial_id=:trial AND key=:key",
        "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (:trial, :key, :value)",
    ):
        values = {"trial": trial_id, "key": key, "value": json.dumps(value)}
        connection.execute(sqlalchemy().text(statement), values)


def _spent(one: Any) -> float:
    """Dollars of a trial: of the steps that it made, and of all while it runs and was let begin."""
    kept, state = one.user_attrs, one.state.name
    if state == "RUNNING":
        share = float(GRANTED in kept or "begun" in kept)
    else:
        share = kept.get("share", 0.0 if state == "WAITING" else 1.0)
    return kept.get("dollars", 0.0) * share


def _storage(where: StudyAddress, beat_seconds: int, stale_seconds: int) -> Any:
    made = optuna().storages.RDBStorage
    arguments: dict[str, Any] = {"pool_pre_ping": True}
    if where.url.startswith("sqlite"):
        arguments = {"connect_args": {"timeout": BUSY_SECONDS}}
    times = {"heartbeat_interval": beat_seconds, "grace_period": stale_seconds}
    with _driven(where), _reported(where), settled():
        _check_own(where)
        for tries in reversed(range(OPENED)):
            try:
                storage = made(where.url, engine_kwargs=arguments, **times)
                break
            except sqlalchemy().exc.DatabaseError as error:
                # Another process makes the tables at this moment.
                if not tries or not any(words in str(error) for words in MAKING):
                    raise
                time.sleep(0.5)
        if where.url.startswith("sqlite"):
            sqlalchemy().event.listen(storage.engine, "connect", _log_ahead)
            storage.engine.dispose()
    return storage


def _log_ahead(connection: Any, _: Any) -> None:
    """Lets readers read while a trial writes, and a write wait for no disk: only a power cut can lose the last ones."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


@contextlib.contextmanager
def _driven(where: StudyAddress) -> Generator[None]:
    """Reports in one line a driver that is missing."""
    try:
        yield
    except ImportError as error:
        if where.url.startswith("postgresql"):
            raise MissingExtraError(f"the storage {where.shown}", "postgresql") from error
        cause = error.__cause__
        driver = cause.name if isinstance(cause, ImportError) else error.name
        raise OptionError(
            f"the storage {where.shown} needs the Python package {driver}, which is not installed; install it, or use postgresql or sqlite"
        ) from error


@contextlib.contextmanager
def _reported(where: StudyAddress) -> Generator[None]:
    """Reports in one line a storage that can't be reached or written, or that is no study's."""
    try:
        yield
    except (sqlalchemy().exc.DatabaseError, optuna().exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        if any(words in reason for words in DAMAGED):
            raise DataError(f"the storage {where.shown} is damaged ({reason}); {_ELSE}") from error
        if "disk is full" in reason:
            raise RunError(
                f"the storage {where.shown} could not be written ({reason}); free space and rerun: the study goes on"
            ) from error
        if isinstance(
            cause, sqlalchemy().exc.OperationalError | optuna().exceptions.StorageInternalError
        ):
            raise RunError(
                f"the storage {where.shown} does not answer ({reason}); start the database, or check --storage"
            ) from error
        raise DataError(
            f"the storage {where.shown} holds no study of this version of Optuna; {_ELSE}"
        ) from error


def _check_own(where: StudyAddress) -> None:
    """Checks that a file is not another program's: its tables would be mixed with those of studies.

    Raises:
        DataError: it is.
    """
    database = sqlalchemy().engine.make_url(where.url).database
    if not where.url.startswith("sqlite") or not database or not Path(database).is_file():
        return
    engine = sqlalchemy().create_engine(where.url)
    try:
        tables = sqlalchemy().inspect(engine).get_table_names()
    finally:
        engine.dispose()
    if tables and not OWN & set(tables):
        raise DataError(
            f"the storage {where.shown} has tables of another program ({', '.join(tables[:3])}); {_ELSE}"
        )


def _different(had: Any, has: Any) -> tuple[str, str]:
    """Two values as text; of mappings the entries that differ."""
    if isinstance(had, Mapping) and isinstance(has, Mapping):
        names = [name for name in {**had, **has} if had.get(name) != has.get(name)]
        both = [" ".join(f"{name}={one.get(name)}" for name in names) for one in (had, has)]
        return both[0], both[1]
    return _text(had), _text(has)


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "none"
    return str(value) or "none"
