"""A study shared by several processes: trials of one search in Optuna's storage, each claimed by one worker at a time.

A trial is a row of the storage that waits, runs while its worker sends heartbeats, and ends once. It moves between
waiting and running by single compare-and-set statements, so that no trial is claimed twice. A trial whose worker
died waits again with its values and its run, so that none is lost.
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
from systolic.core.files import write_json
from systolic.tuning.engine import optuna, settled, sqlalchemy
from systolic.tuning.folder import DATABASE
from systolic.tuning.worker import is_gone

DEFINITION = "systolic"
"""Study attribute: the definition of the search."""
CONTENTS = ("recipe file", "modules", "data", "precision", "devices")
"""Parts of a definition that are not in the command."""
WORKER = "worker"
"""Trial attribute: the worker that has it, or had it last."""
GRANTED = "granted"
"""Trial attribute: its dollars are reserved in the budget."""
BUSY_SECONDS = 60
"""Timeout for another process's write to an SQLite file."""
_OWNED = (
    "trial_id=:trial AND state='RUNNING' AND :worker = COALESCE("
    "(SELECT value_json FROM trial_user_attributes WHERE trial_id=:trial AND key=:key), '\"\"')"
)
"""SQL condition: the trial is running in the worker; the name "" stands for no worker."""
OWN = {"studies", "alembic_version", "version_info"}
"""Tables that identify a file as Optuna's."""
MAKING = ("already exists", "UNIQUE constraint", "duplicate key", "no such table", "does not exist")
"""Database errors while another process creates the tables."""
OPENED = 10
"""Attempts to open a storage while another process creates its tables."""
DAMAGED = ("malformed", "not a database")
"""SQLite errors for a damaged file."""
UNKNOWN = ("no such table", "no such column", "has no column")
"""SQLite errors for tables of another version, which are OperationalErrors like those of a file that can't be opened."""
_ELSE = "restore it from a backup, or give --study another folder (and --storage, if given, another database)"
BEATS = 4
"""Heartbeats within the time after which a trial without any is taken over."""


@dataclass(frozen=True, kw_only=True)
class StudyAddress:
    """Storage and name of a study."""

    url: str
    """URL with the driver that is used."""
    name: str
    given: str = ""
    """URL as the user gave it; empty for a file in the study's folder."""

    @property
    def shown(self) -> str:
        """The URL as given, without passwords."""
        url = sqlalchemy().engine.make_url(self.given or self.url)
        return url.difference_update_query(["password"]).render_as_string(hide_password=True)


def address(storage: str | None, folder: Path, name: str) -> StudyAddress:
    """Parses ``--storage``; the default is an SQLite file in the study's folder.

    Raises:
        OptionError: it is not a database URL.
    """
    optuna()
    if storage is None:
        return StudyAddress(url=f"sqlite:///{folder / DATABASE}", name=name)
    given = storage
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
            "--storage is not a database URL; it takes one such as postgresql://user@host/tuning or sqlite:///study.db"
        ) from error
    return StudyAddress(url=storage, name=name, given=given)


class SharedStudy:
    """A study in its storage, opened or created.

    Args:
        where: Its address.
        definition: Definition of the search, JSON values; a study with another one is refused.
        directions: Optuna's directions of the objectives.
        stale_seconds: Seconds without a heartbeat after which a trial's worker counts as dead.
        runs: Folder of the trials' runs. A file beside it (``trials.json``) also keeps the definition: another database does not make
            them another study's.

    Raises:
        OptionError: the storage has a study of this name with another definition, or the folder has runs of one.
        RunError: the storage can't be reached.
        MissingExtraError: its driver is not installed.
    """

    def __init__(
        self,
        where: StudyAddress,
        definition: Mapping[str, Any],
        directions: Sequence[str],
        stale_seconds: int = 120,
        runs: Path | None = None,
    ) -> None:
        self.where = where
        self._kept = None if runs is None else runs.with_suffix(".json")
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
        """Checks a definition against the stored one; parts that the study lacks are added, since earlier versions stored fewer.

        Raises:
            OptionError: a part differs.
        """
        kept = self._study.user_attrs.get(DEFINITION, {})
        _compare(f"the study {self.where.name} has", kept, definition)
        if set(definition) - set(kept):
            self._study.set_user_attr(DEFINITION, {**kept, **definition})
        if self._kept is None:
            return
        beside = _beside(self._kept)
        folder = self._kept.with_suffix("")
        _compare(f"{folder} has runs of a study with", beside, definition)
        if set(definition) - set(beside):
            write_json(self._kept, {**beside, **definition})

    def close(self) -> None:
        """Closes the connections to the storage."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def reported(self) -> contextlib.AbstractContextManager[None]:
        """Context that turns errors of the storage into one-line messages.

        Raises:
            RunError: the storage can't be reached or written.
            DataError: it is damaged, or holds no study.
        """
        return _reported(self.where)

    @property
    def study(self) -> Any:
        """Optuna's study."""
        return self._study

    def trials(self, total: int) -> list[Any]:
        """Optuna's records of the study's trials: the first ``total``, and those beyond that ended under a larger total."""
        with _reported(self.where):
            found = self._study.get_trials(deepcopy=False)
        return [one for one in found if one.number < total or one.state.is_finished()]

    # Claims

    def claim(
        self, total: int, worker: str, is_busy: Callable[[int], bool] = lambda _: False
    ) -> Any:
        """Claims the next waiting trial for a worker and returns Optuna's record; None if none waits.

        Trials whose worker died are released first. Missing trials are created, up to ``total``.

        Args:
            total: Number of trials of the study.
            worker: Name of the claiming worker.
            is_busy: Whether the trial of this number is being trained; it is then left alone, even without heartbeats.
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
                # Through Optuna's cached storage, which must know a trial before it draws its values.
                ids = [self._study._storage.create_new_trial(self._study._study_id, new)]
                # Two processes at once may create one too many, which waits for a larger total.
                if self._storage.get_trial(ids[0]).number >= total:
                    continue
            for each in ids:
                if self._take(each, worker):
                    return self._storage.get_trial(each)
            if not ids:
                return None

    def drawn(self, record: Any, sampler: Any, pruner: Any) -> Any:
        """A claimed trial as an Optuna trial, which draws values and takes reports."""
        self._study.sampler, self._study.pruner = sampler, pruner
        return optuna().trial.Trial(self._study, record._trial_id)

    def _take(self, trial_id: int, worker: str) -> bool:
        """Moves a trial from waiting to running; False if another process was faster."""
        # Before the move, since a running trial without any heartbeat is never considered stale.
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
                # In the same transaction, so that no process sees it running under its last worker's name.
                _keep(connection, trial_id, WORKER, worker)
        return bool(moved)

    def beat(self, trial_id: int) -> None:
        """Records a heartbeat of the trial's worker."""
        self._storage.record_heartbeat(trial_id)

    def owns(self, trial_id: int, worker: str) -> bool:
        """Whether a trial is running and is still this worker's."""
        with self._storage.engine.connect() as connection:
            query = f"SELECT 1 FROM trials WHERE {_OWNED}"
            return bool(
                connection.execute(sqlalchemy().text(query), _named(trial_id, worker)).all()
            )

    def release(self, trial_id: int, worker: str) -> bool:
        """Moves a trial from running back to waiting; False if it is no longer this worker's."""
        with self._storage.engine.begin() as connection:
            change = f"UPDATE trials SET state='WAITING' WHERE {_OWNED}"
            made = connection.execute(sqlalchemy().text(change), _named(trial_id, worker))
            return bool(made.rowcount)

    def _release_gone(self, trials: Sequence[Any], is_busy: Callable[[int], bool]) -> list[Any]:
        """Releases trials whose worker died: a process of this machine that has ended, or a worker without heartbeats."""
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

    def grant(self, record: Any, dollars: float, budget_usd: float) -> float:
        """Reserves a trial's dollars if the budget covers them; returns the dollars left without this trial.

        Processes take turns, so that of two that ask for the last dollars only one gets them.
        """
        with self._storage.engine.begin() as connection:
            # A no-op write that takes the lock: other processes wait here until the block ends.
            alone = "UPDATE studies SET study_name=study_name WHERE study_id=:study"
            connection.execute(sqlalchemy().text(alone), {"study": self._study._study_id})
            with _reported(self.where):
                trials = self._study.get_trials(deepcopy=False)
            others = [one for one in trials if one.number != record.number]
            left = budget_usd - sum(map(_spent, others))
            if dollars <= left:
                _keep(connection, record._trial_id, GRANTED, True)
        return left

    # Results

    def note(self, trial_id: int, **values: Any) -> None:
        """Stores attributes of a trial in one transaction; does nothing if another worker has taken it over and ended it."""
        # A no-op write that takes the lock: a transaction that reads first could not write after another's write.
        there = "UPDATE trials SET state=state WHERE trial_id=:trial AND state IN ('RUNNING', 'WAITING')"
        with self._storage.engine.begin() as connection:
            if connection.execute(sqlalchemy().text(there), {"trial": trial_id}).rowcount:
                for name, value in values.items():
                    _keep(connection, trial_id, name, value)

    def finish(self, trial: Any, worker: str, values: Sequence[float] | None, reason: str) -> bool:
        """Ends a trial once: complete with its values, or pruned for a reason; False if it is no longer this worker's."""
        if not self.owns(trial._trial_id, worker):
            return False
        states = optuna().trial.TrialState
        finite = values is not None and all(math.isfinite(value) for value in values)
        if values is not None and not finite:
            reason = "failed: the value of an objective is not finite"
        if reason:
            self.note(trial._trial_id, reason=reason)
        state = states.COMPLETE if finite and not reason else states.PRUNED
        # After the last point of a grid, Optuna stops its optimize loop, which is not used here.
        with contextlib.suppress(RuntimeError):
            self._study.tell(trial, values if state is states.COMPLETE else None, state=state)
        return True

    def fail(self, trial: Any, worker: str, reason: str) -> None:
        """Ends a trial without a result, for a reason unrelated to its values."""
        if self.owns(trial._trial_id, worker):
            self.note(trial._trial_id, reason=reason)
            self._study.tell(trial, state=optuna().trial.TrialState.FAIL)


def _beside(file: Path) -> dict[str, Any]:
    """The definition that a folder of runs keeps, empty if it keeps none.

    Raises:
        DataError: the file is damaged.
    """
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError, OSError) as error:
        raise DataError(
            f"{file} is damaged ({error}); remove it if the runs beside it are this study's, or give --study another folder"
        ) from error


def _compare(of: str, kept: Mapping[str, Any], definition: Mapping[str, Any]) -> None:
    """Compares parts of a definition with those that are kept.

    Raises:
        OptionError: a part differs.
    """
    for name, value in definition.items():
        if kept.get(name, value) != value:
            had, has = _different(kept[name], value)
            own = f"the same {name}" if name in CONTENTS else "its own command"
            raise OptionError(
                f"{of} the {name} {had}, not {has}; continue it with {own}, or give --study another folder"
            )


def _named(trial_id: int, worker: str) -> dict[str, Any]:
    return {"trial": trial_id, "key": WORKER, "worker": json.dumps(worker)}


def _keep(connection: Any, trial_id: int, key: str, value: Any) -> None:
    """Stores an attribute of a trial within the caller's transaction."""
    for statement in (
        "DELETE FROM trial_user_attributes WHERE trial_id=:trial AND key=:key",
        "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (:trial, :key, :value)",
    ):
        values = {"trial": trial_id, "key": key, "value": json.dumps(value)}
        connection.execute(sqlalchemy().text(statement), values)


def _spent(one: Any) -> float:
    """Dollars that a trial takes from the budget: for the steps that ran; for all steps while it runs, once they are reserved."""
    kept, state = one.user_attrs, one.state.name
    if state == "RUNNING":
        share = float(GRANTED in kept or "begun" in kept)
    else:
        # A killed trial could not note its steps.
        waits = state == "WAITING" and "begun" not in kept
        share = kept.get("share", 0.0 if waits else 1.0)
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
                # Another process is creating the tables.
                if not tries or not any(words in str(error) for words in MAKING):
                    raise
                time.sleep(0.5)
        if where.url.startswith("sqlite"):
            sqlalchemy().event.listen(storage.engine, "connect", _log_ahead)
            storage.engine.dispose()
    return storage


def _log_ahead(connection: Any, _: Any) -> None:
    """Turns on write-ahead logging, without a sync per write: readers don't wait for writers, and only a power failure can lose the last writes."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


@contextlib.contextmanager
def _driven(where: StudyAddress) -> Generator[None]:
    """Reports a missing driver in one line."""
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
    """Reports a storage that can't be reached or written, is damaged, or holds no study, in one line."""
    try:
        yield
    except (sqlalchemy().exc.DatabaseError, optuna().exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = _reason(cause)
        if any(words in reason for words in DAMAGED):
            raise DataError(f"the storage {where.shown} is damaged ({reason}); {_ELSE}") from error
        if "disk is full" in reason:
            raise RunError(
                f"the storage {where.shown} could not be written ({reason}); free space and rerun to continue the study"
            ) from error
        away = (sqlalchemy().exc.OperationalError, optuna().exceptions.StorageInternalError)
        other = any(words in reason for words in UNKNOWN)
        if not other and any(isinstance(one, away) for one in (error, cause)):
            raise RunError(
                f"the storage {where.shown} does not answer ({reason}); start the database, or check --storage"
            ) from error
        raise DataError(
            f"the storage {where.shown} holds no study of this version of Optuna; {_ELSE}"
        ) from error


def _reason(cause: BaseException) -> str:
    """First line of a database's error; where the line ends in a colon, with the ones that it announces."""
    lines = [line.strip(" -") for line in str(cause).splitlines()] or [type(cause).__name__]
    if not lines[0].endswith(":"):
        return lines[0]
    return f"{lines[0]} {'; '.join(filter(None, lines[1:]))}"


def _check_own(where: StudyAddress) -> None:
    """Checks that an SQLite file is not another program's, whose tables would be mixed with Optuna's.

    Raises:
        DataError: the file is another program's.
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
    """Two values as text; for mappings, the entries that differ."""
    if isinstance(had, Mapping) and isinstance(has, Mapping):
        names = [name for name in {**had, **has} if had.get(name) != has.get(name)]
        both = [" ".join(f"{name}={one.get(name)}" for name in names) for one in (had, has)]
        return both[0], both[1]
    return _text(had), _text(has)


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "none"
    return str(value) or "none"
