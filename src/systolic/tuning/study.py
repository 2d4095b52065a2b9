"""A study shared by several processes: trials of one search in Optuna's storage, each claimed by one worker at a time.

A trial waits, runs while its worker sends heartbeats, and ends once. Who has it is in our own table of claims (see
:mod:`systolic.tuning.claims`), so that no trial is claimed twice; its values, reports and result are in Optuna's
storage, through Optuna's public interface. A trial whose worker died waits again with its values and its run, so that
none is lost. How a trial ended is written with its claim first: if the worker dies before Optuna has it, others tell Optuna.
"""

import contextlib
import copy
import json
import math
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from systolic.core.errors import DataError, MissingExtraError, OptionError, RunError, TakenError
from systolic.core.files import write_json
from systolic.tuning.claims import TABLE, Claim, Claims, TrialOutcome, is_gone
from systolic.tuning.search import optuna, sqlalchemy

DATABASE = "study.db"
TRIALS = "trials.json"
RESULTS = "study.json"
KEYS = {"recipe", "search"}
"""Entries that the JSON files of a study have."""
DEFINITION = "systolic"
"""Study attribute: the definition of the search."""
CONTENTS = ("recipe file", "modules", "data", "precision", "devices")
"""Parts of a definition that are not in the command."""
UNKNOWN_WORKER = "unknown"
"""Worker of a trial that another program has started."""
BUSY_SECONDS = 60
"""Timeout for another process's write to an SQLite file."""
OWN = {"studies", "alembic_version", "version_info", TABLE}
"""Tables that identify a file as Optuna's or ours."""
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


class _SavedRow(Struct):
    state: str


class _SavedResults(Struct):
    """``study.json``, as far as it says how many trials have a result."""

    trials: list[_SavedRow]


def check_free(folder: Path) -> None:
    """Checks that trials would not mix with files of another kind: a run's, a project's.

    Raises:
        TakenError: the folder has files, and none of them is a study's.
    """
    if not folder.is_dir() or (folder / DATABASE).exists() or not any(folder.iterdir()):
        return
    definition = folder / TRIALS
    # Opening the study reports a definition that is damaged.
    damaged = definition.is_file() and _read(definition) is None
    records = [_read(folder / name) or {} for name in (TRIALS, RESULTS)]
    if not damaged and not any(record.keys() >= KEYS for record in records):
        raise TakenError(
            f"--study {folder} has files and is no study (it has no {DATABASE}, {TRIALS} or {RESULTS} of one); give a new or an empty folder"
        )


def num_results(folder: Path) -> int:
    """Number of trials with a result in the folder's ``study.json``; 0 without a readable one."""
    try:
        results = msgspec.convert(_read(folder / RESULTS), _SavedResults)
    except msgspec.ValidationError:
        return 0
    return sum(row.state == "done" for row in results.trials)


def _read(file: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None for a file that can't be read, and an empty one for other JSON."""
    try:
        record = json.loads(file.read_text())
    except (ValueError, OSError):
        return None
    return record if isinstance(record, dict) else {}


class TrialNotes(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Attributes of a trial in Optuna's storage; those of another version have fewer or more."""

    claim: str | None = None
    """Key of its claim, unique, since a study that is deleted and made again has the same name and numbers."""
    worker: str = ""
    """The worker that has it, had it last or created it. Earlier versions kept claims here."""
    granted: bool = False
    """Whether its dollars are reserved in the budget, in earlier versions."""
    begun: tuple[int, int] | None = None
    """Step of the checkpoint that it was last started from, and how often in a row; None before its first start."""
    share: float | None = None
    """Share of its steps that ran; None until it has ended or is interrupted."""
    steps: int | None = None
    """Steps that ran."""
    seconds: float | None = None
    """Time that they took."""
    forecast_seconds: float | None = None
    """Forecast time of all steps."""
    dollars: float | None = None
    """Forecast price of all steps."""
    parameters: int | None = None
    """Size of the model."""
    reason: str = ""
    """Why it has no result."""


def notes_of(record: Any) -> TrialNotes:
    """Attributes of a trial, from Optuna's record of it.

    Raises:
        DataError: one is damaged.
    """
    try:
        return msgspec.convert(record.user_attrs, TrialNotes)
    except msgspec.ValidationError as error:
        raise DataError(
            f"trial {record.number} of the study has a damaged attribute ({error}); {_ELSE}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class StudyAddress:
    """Storage and name of a study."""

    url: str
    """URL with the driver that is used."""
    name: str
    user_url: str = ""
    """URL as the user gave it; empty for a file in the study's folder."""

    @property
    def shown(self) -> str:
        """The URL as given, without passwords."""
        url = sqlalchemy().engine.make_url(self.user_url or self.url)
        return url.difference_update_query(["password"]).render_as_string(hide_password=True)


def address(storage: str | None, folder: Path, name: str) -> StudyAddress:
    """Parses ``--storage``; the default is an SQLite file in the study's folder.

    Raises:
        OptionError: it is not a database URL.
    """
    optuna()
    if storage is None:
        return StudyAddress(url=f"sqlite:///{folder / DATABASE}", name=name)
    url = storage
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
    return StudyAddress(url=storage, name=name, user_url=url)


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
        self._keys: dict[int, str] = {}
        self._ids: dict[int, int] = {}
        self._engine, self._storage = _opened(where)
        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self.close)
            self._claims = _claims(where, self._engine, stale_seconds)
            self._study, self._study_id = self._open(directions)
            self.agree_on(definition)
            unless_open.pop_all()

    def _open(self, directions: Sequence[str]) -> tuple[Any, int]:
        """Optuna's study and its id."""
        name = self.where.name
        with _reported(self.where):
            study = optuna().create_study(
                storage=self._storage,
                study_name=name,
                directions=list(directions),
                load_if_exists=True,
            )
            return study, self._storage.get_study_id_from_name(name)

    def agree_on(self, definition: Mapping[str, Any]) -> None:
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
        self._engine.dispose()

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
        """Optuna's records of the study's trials: the first ``total``, and those beyond that ended under a larger total.

        A trial that was released is waiting here, whereas Optuna keeps it as running.
        """
        return [trial for trial, _ in self._read(total)]

    def _read(self, total: float = math.inf) -> list[tuple[Any, Claim | None]]:
        """Records of :meth:`trials` with their claims."""
        with _reported(self.where):
            # In this order: a claim is made before Optuna's trial runs.
            records = self._study.get_trials(deepcopy=False)
            claims = self._claims.read()
        trials = []
        for record in records:
            # Trials of earlier versions have no key.
            key = self._keys[record.number] = notes_of(record).claim or str(record.number)
            claim = claims.get(key)
            if record.number < total or record.state.is_finished():
                trials.append((_as_claimed(record, claim), claim))
        return trials

    def _key(self, number: int) -> str:
        """Key of a trial's claim."""
        if number not in self._keys:
            self._read()
        return self._keys[number]

    def _id(self, number: int) -> int:
        """Optuna's id of a trial."""
        if number not in self._ids:
            find = self._storage.get_trial_id_from_study_id_trial_number
            self._ids[number] = find(self._study_id, number)
        return self._ids[number]

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
            trials = self._read(total)
            if self._release_dead(trials, is_busy):
                continue
            free = [
                (trial, claim)
                for trial, claim in trials
                if trial.state is waiting and not is_busy(trial.number)
            ]
            for trial, claim in free:
                if (record := self._take(trial.number, worker, claim)) is not None:
                    return record
            if free:
                continue
            if len(trials) >= total:
                return None
            # Two processes at once may create one too many, which waits for a larger total.
            notes = msgspec.to_builtins(TrialNotes(claim=uuid.uuid4().hex, worker=worker))
            self._study.add_trial(optuna().create_trial(state=waiting, user_attrs=notes))

    def drawn(self, record: Any, sampler: Any, pruner: Any) -> Any:
        """A claimed trial as an Optuna trial, which draws values and takes reports.

        Args:
            record: The trial's record.
            sampler: Sampler of :func:`systolic.tuning.sampling.build`.
            pruner: Optuna's pruner.
        """
        sampler.study = self._study
        self._study.sampler, self._study.pruner = sampler, pruner
        return optuna().trial.Trial(self._study, self._id(record.number))

    def _take(self, number: int, worker: str, before: Claim | None) -> Any:
        """Record of a trial that this worker has taken; None if another process was faster."""
        if not self._claims.take(self._key(number), worker, before):
            return None
        with _unless_ended():
            own = self._id(number)
            self._storage.set_trial_state_values(own, state=optuna().trial.TrialState.RUNNING)
            record = self._storage.get_trial(own)
            if notes_of(record).worker != worker:
                self._storage.set_trial_user_attr(own, "worker", worker)
            return record
        return None

    def beat(self, number: int, worker: str) -> bool:
        """Records a heartbeat of a trial's worker; False if the trial is no longer this worker's."""
        return self._claims.beat(self._key(number), worker)

    def owns(self, number: int, worker: str) -> bool:
        """Whether a trial is running and is still this worker's."""
        return self._claims.owns(self._key(number), worker)

    def release(self, number: int, worker: str) -> bool:
        """Moves a trial from running back to waiting; False if it is no longer this worker's."""
        return self._claims.release(self._key(number), worker)

    def _release_dead(
        self, trials: Sequence[tuple[Any, Claim | None]], is_busy: Callable[[int], bool]
    ) -> bool:
        """Ends or releases trials whose worker died: a process of this machine that has ended, or a worker without heartbeats.

        A trial that its worker ended is told to Optuna, another one is released. One that runs without a claim was
        started by an earlier version, and gets one. Returns whether any has changed.
        """
        changed = False
        for trial, claim in trials:
            number, key = trial.number, self._key(trial.number)
            if trial.state is not optuna().trial.TrialState.RUNNING:
                continue
            if claim is None:
                self._claims.adopt(key, notes_of(trial).worker or UNKNOWN_WORKER)
                changed = True
                continue
            gone, silent = is_gone(claim.worker), self._claims.is_silent(claim)
            if not gone and not silent:
                continue
            if claim.outcome is not None:
                self._tell(number, claim.outcome)
                changed = True
            elif not is_busy(number):
                release = self._claims.release if gone else self._claims.release_silent
                changed = release(key, claim.worker) or changed
        return changed

    def grant(self, record: Any, dollars: float, budget_usd: float) -> float:
        """Reserves a trial's dollars if the budget covers them; returns the dollars left without this trial.

        Processes take turns, so that of two that ask for the last dollars only one gets them.
        """
        with self._claims.granting() as connection:
            others = [each for each in self._read() if each[0].number != record.number]
            left = budget_usd - sum(_spent(trial, claim) for trial, claim in others)
            if dollars <= left:
                self._claims.grant(connection, self._key(record.number))
        return left

    # Results

    def note(self, number: int, **values: Any) -> None:
        """Stores attributes of a trial, in their order; does nothing if another worker has taken it over and ended it."""
        with _unless_ended():
            for name, value in values.items():
                self._storage.set_trial_user_attr(self._id(number), name, value)

    def finish(self, trial: Any, worker: str, values: Sequence[float] | None, reason: str) -> bool:
        """Ends a trial once: complete with its values, or pruned for a reason; False if it is no longer this worker's."""
        finite = values is not None and all(math.isfinite(value) for value in values)
        if values is not None and not finite:
            reason = "failed: the value of an objective is not finite"
        if finite and not reason:
            return self._end(trial.number, worker, TrialOutcome(state="COMPLETE", values=values))
        return self._end(trial.number, worker, TrialOutcome(state="PRUNED", reason=reason))

    def fail(self, trial: Any, worker: str, reason: str) -> None:
        """Ends a trial without a result, for a reason unrelated to its values."""
        self._end(trial.number, worker, TrialOutcome(state="FAIL", reason=reason))

    def _end(self, number: int, worker: str, outcome: TrialOutcome) -> bool:
        if not self._claims.end(self._key(number), worker, outcome):
            return False
        self._tell(number, outcome)
        return True

    def _tell(self, number: int, outcome: TrialOutcome) -> None:
        """Tells Optuna how a trial ended, unless another process has done so."""
        if outcome.reason:
            self.note(number, reason=outcome.reason)
        states = optuna().trial.TrialState
        # After the last point of a grid, Optuna stops its optimize loop, which is not used here.
        with contextlib.suppress(RuntimeError):
            self._study.tell(
                number,
                outcome.values,
                state=states[outcome.state],
                skip_if_finished=True,
            )


def _as_claimed(record: Any, claim: Claim | None) -> Any:
    """Optuna's record of a trial, in the state that its claim has."""
    if claim is None or record.state.is_finished():
        return record
    states = optuna().trial.TrialState
    state = states.RUNNING if claim.worker else states.WAITING
    if record.state is not state:
        record = copy.copy(record)
        record.state = state
    return record


@contextlib.contextmanager
def _unless_ended() -> Generator[None]:
    """Context that ends where another worker has taken a trial over and ended it."""
    with contextlib.suppress(optuna().exceptions.UpdateFinishedTrialError):
        yield


def _beside(file: Path) -> dict[str, Any]:
    """The definition that a folder of runs keeps, empty if it keeps none.

    Raises:
        DataError: the file is damaged.
    """
    if not file.is_file():
        return {}
    try:
        return msgspec.convert(json.loads(file.read_text()), dict[str, Any])
    except (ValueError, OSError) as error:
        raise DataError(
            f"{file} is damaged ({error}); remove it if the runs beside it are this study's, or give --study another folder"
        ) from error


def _numbers(search: Any) -> list[list[str]]:
    """Searched options in parts, whole numbers without a point: Python wrote 1.0 as 1 until November 2026."""
    return [[part.removesuffix(".0") for part in str(option).split(",")] for option in search]


def _compare(of: str, kept: Mapping[str, Any], definition: Mapping[str, Any]) -> None:
    """Compares parts of a definition with those that are kept.

    Raises:
        OptionError: a part differs.
    """
    for name, value in definition.items():
        before = kept.get(name, value)
        if before != value and not (name == "search" and _numbers(before) == _numbers(value)):
            had, has = _different(kept[name], value)
            own = f"the same {name}" if name in CONTENTS else "its own command"
            raise OptionError(
                f"{of} the {name} {had}, not {has}; continue it with {own}, or give --study another folder"
            )


def _spent(record: Any, claim: Claim | None) -> float:
    """Dollars that a trial takes from the budget: for the steps that ran; for all steps while it runs, once they are reserved."""
    notes, state = notes_of(record), record.state.name
    if state == "RUNNING":
        granted = (claim is not None and claim.is_granted) or notes.granted
        share = float(granted or notes.begun is not None)
    elif notes.share is not None:
        share = notes.share
    else:
        # A killed trial could not note its steps.
        share = 0.0 if state == "WAITING" and notes.begun is None else 1.0
    return (notes.dollars or 0.0) * share


def _opened(where: StudyAddress) -> tuple[Any, Any]:
    """SQLAlchemy's engine of a database and Optuna's storage in it, which share their connections."""
    arguments: dict[str, Any] = {"pool_pre_ping": True}
    if where.url.startswith("sqlite"):
        arguments = {"connect_args": {"timeout": BUSY_SECONDS}}

    def parts() -> tuple[Any, Any]:
        engine = sqlalchemy().create_engine(where.url, **arguments)
        if where.url.startswith("sqlite"):
            sqlalchemy().event.listen(engine, "connect", _log_ahead)
        # Optuna's storage sets options of the pool for MySQL, and so can't be given one.
        mysql = engine.dialect.name == "mysql"
        shared = dict(arguments) if mysql else {"pool": engine.pool}
        try:
            return engine, optuna().storages.RDBStorage(where.url, engine_kwargs=shared)
        except BaseException:
            engine.dispose()
            raise

    with _driven(where), _reported(where):
        _check_own(where)
        try:
            engine, storage = _retried(parts)
        except RuntimeError as error:  # Optuna's, for tables that it can upgrade
            raise DataError(
                f"the storage {where.shown} is of another version of Optuna; back it up and upgrade it with optuna storage upgrade --storage URL, or {_ELSE}"
            ) from error
    return engine, storage


def _claims(where: StudyAddress, engine: Any, stale_seconds: int) -> Claims:
    """The study's claims; their table is created where it is missing."""
    claims = Claims(engine, where.name, stale_seconds)
    with _reported(where):
        _retried(claims.create)
    return claims


def _retried(create: Callable[[], Any]) -> Any:
    """Result of a function that creates tables, called again while another process creates them."""
    for tries in reversed(range(OPENED)):
        try:
            return create()
        except sqlalchemy().exc.DatabaseError as error:
            if not tries or not any(words in str(error) for words in MAKING):
                raise
            time.sleep(0.5)


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
        if "permission denied" in reason:
            raise RunError(
                f"the storage {where.shown} refuses its user ({reason}); grant it the right to create tables and to write, or check --storage"
            ) from error
        away = (sqlalchemy().exc.OperationalError, optuna().exceptions.StorageInternalError)
        other = any(words in reason for words in UNKNOWN)
        if not other and any(isinstance(raised, away) for raised in (error, cause)):
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
        both = [" ".join(f"{name}={mapping.get(name)}" for name in names) for mapping in (had, has)]
        return both[0], both[1]
    return _text(had), _text(has)


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "none"
    return str(value) or "none"
