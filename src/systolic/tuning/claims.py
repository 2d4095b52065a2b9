"""Claims of trials: which worker has which trial, in a table of our own beside Optuna's in the same database.

A claim moves by single compare-and-set statements, so that of two processes only one makes each move: a worker takes a
waiting trial, sends heartbeats, and releases or ends it; others release it once the worker is dead. Heartbeats are
written and compared by the database's clock, so that those of the machines may differ.
"""

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from msgspec import Struct

from systolic.core.errors import DataError
from systolic.tuning.search import sqlalchemy

TABLE = "systolic_claims"
"""Name of the table."""
_WHOLE = ""
"""Key of the row that a grant locks; trials have other keys."""


class TrialOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker ended a trial, in a column of its claim."""

    state: Literal["COMPLETE", "PRUNED", "FAIL"]
    """Optuna's name of the state."""
    values: Sequence[float] | None = None
    """Values of the objectives; None without a result."""
    reason: str = ""
    """Why it has no result."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A trial's row: it has one from its first claim on."""

    worker: str
    """The worker that has it; empty while it waits."""
    silent_seconds: float
    """Time since its last heartbeat."""
    is_granted: bool
    """Whether its dollars are reserved in the budget."""
    outcome: TrialOutcome | None
    """How its worker ended it; None before."""


class Claims:
    """Claims of one study's trials.

    Args:
        engine: SQLAlchemy's engine of the database.
        study: Name of the study.
        stale_seconds: Seconds without a heartbeat after which a worker counts as dead.
    """

    def __init__(self, engine: Any, study: str, stale_seconds: int) -> None:
        self._engine, self._study, self._stale_seconds = engine, study, stale_seconds
        self._table = _table()

    def create(self) -> None:
        """Creates the table and the row that grants lock, where they are missing.

        Another process may do so at the same time; the error is then one of those for a name or key that exists.
        """
        self._table.metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            query = sqlalchemy().select(self._table.c.trial).where(*self._row(_WHOLE))
            if not connection.execute(query).all():
                connection.execute(self._inserted(_WHOLE, ""))

    def read(self) -> dict[str, Claim]:
        """Claims by the trial's key.

        Raises:
            DataError: one has a damaged outcome.
        """
        own = self._table.c
        columns = (own.trial, own.worker, self._silence, own.is_granted, own.outcome)
        with self._engine.connect() as connection:
            rows = connection.execute(sqlalchemy().select(*columns).where(own.study == self._study))
            return {
                trial: Claim(
                    worker=worker,
                    silent_seconds=float(silent),
                    is_granted=bool(granted),
                    outcome=None if outcome is None else self._outcome(outcome),
                )
                for trial, worker, silent, granted, outcome in rows
                if trial != _WHOLE
            }

    def take(self, trial: str, worker: str, before: Claim | None) -> bool:
        """Takes a waiting trial; False if another process was faster.

        Args:
            trial: Key of the trial.
            worker: The worker that takes it.
            before: Its claim as it was read, None if it had none.
        """
        if before is None:
            return self._insert(trial, worker)
        return self._move(trial, "", worker=worker, beat=self._now)

    def adopt(self, trial: str, worker: str) -> None:
        """Adds the claim of a trial that runs without one, with a heartbeat now."""
        self._insert(trial, worker)

    def beat(self, trial: str, worker: str) -> bool:
        """Records a heartbeat; False if the trial is no longer this worker's."""
        return self._move(trial, worker, beat=self._now)

    def owns(self, trial: str, worker: str) -> bool:
        """Whether a trial is this worker's."""
        query = sqlalchemy().select(self._table.c.trial).where(*self._row(trial, worker))
        with self._engine.connect() as connection:
            return bool(connection.execute(query).all())

    def is_silent(self, claim: Claim) -> bool:
        """Whether a claim has had no heartbeat for too long."""
        return claim.silent_seconds > self._stale_seconds

    def release(self, trial: str, worker: str) -> bool:
        """Lets a trial wait; False if it is no longer this worker's."""
        return self._move(trial, worker, worker="")

    def release_silent(self, trial: str, worker: str) -> bool:
        """Lets a trial wait whose worker is silent; False if it is no longer, or the trial is another's."""
        return self._move(trial, worker, self._silence > self._stale_seconds, worker="")

    def end(self, trial: str, worker: str, outcome: TrialOutcome) -> bool:
        """Ends a trial, once; False if it is no longer this worker's."""
        return self._move(trial, worker, outcome=json.dumps(msgspec.to_builtins(outcome)))

    @contextlib.contextmanager
    def granting(self) -> Generator[Any]:
        """Transaction in which no other process grants: it waits here until the block ends."""
        with self._engine.begin() as connection:
            # A no-op write that takes the lock.
            connection.execute(
                self._table.update().where(*self._row(_WHOLE)).values(worker=self._table.c.worker)
            )
            yield connection

    def grant(self, connection: Any, trial: str) -> None:
        """Marks a trial's dollars as reserved, in the transaction of :meth:`granting`."""
        connection.execute(self._table.update().where(*self._row(trial)).values(is_granted=True))

    def _outcome(self, text: str) -> TrialOutcome:
        try:
            return msgspec.convert(json.loads(text), TrialOutcome)
        except ValueError as error:
            raise DataError(
                f"the study {self._study} has a damaged outcome {text[:40]!r} ({error}) in its table {TABLE}; restore it from a backup, or give --study another folder"
            ) from error

    @property
    def _now(self) -> Any:
        """SQL expression: seconds since 1970 by the database's clock, whatever the time zone of the connection."""
        sql = sqlalchemy()
        if self._engine.dialect.name in ("mysql", "mariadb"):
            return sql.func.unix_timestamp()
        return sql.extract("epoch", sql.func.current_timestamp())

    @property
    def _silence(self) -> Any:
        """SQL expression: seconds since the last heartbeat."""
        return self._now - self._table.c.beat

    def _row(self, trial: str, worker: str | None = None) -> tuple[Any, ...]:
        """SQL conditions: the row of a trial; with a worker, while it is that worker's."""
        own = self._table.c
        conditions = (own.study == self._study, own.trial == trial)
        if worker is None:
            return conditions
        return (*conditions, own.worker == worker, own.outcome.is_(None))

    def _move(self, trial: str, of: str, *conditions: Any, **values: Any) -> bool:
        """Changes the row of a trial if it is still this worker's."""
        change = self._table.update().where(*self._row(trial, of), *conditions).values(**values)
        with self._engine.begin() as connection:
            return connection.execute(change).rowcount == 1

    def _insert(self, trial: str, worker: str) -> bool:
        """Adds the row of a trial; False if another process was faster."""
        try:
            with self._engine.begin() as connection:
                connection.execute(self._inserted(trial, worker))
        except sqlalchemy().exc.IntegrityError:
            return False
        return True

    def _inserted(self, trial: str, worker: str) -> Any:
        return self._table.insert().values(
            study=self._study, trial=trial, worker=worker, beat=self._now, is_granted=False
        )


@cache
def _table() -> Any:
    sql = sqlalchemy()
    return sql.Table(
        TABLE,
        sql.MetaData(),
        sql.Column("study", sql.String(512), primary_key=True),
        sql.Column("trial", sql.String(64), primary_key=True),
        sql.Column("worker", sql.String(512), nullable=False),
        sql.Column("beat", sql.Double, nullable=False),
        sql.Column("is_granted", sql.Boolean, nullable=False),
        sql.Column("outcome", sql.Text),
    )


def this_worker() -> str:
    """Name of this process, unique across machines."""
    return _worker_name(os.getpid())


def is_gone(worker: str) -> bool:
    """Whether a worker has ended; False for a worker of another machine or container."""
    there, _, rest = worker.rpartition("/")[0].rpartition("/")
    if there != _here() or not rest.isdigit():
        return False
    try:
        return (
            psutil.Process(int(rest)).status() == psutil.STATUS_ZOMBIE
            or _worker_name(int(rest)) != worker
        )
    except psutil.NoSuchProcess:
        return True


def _worker_name(pid: int) -> str:
    """Machine, process id and start time, which tells apart processes that reuse an id."""
    return f"{_here()}/{pid}/{psutil.Process(pid).create_time():.2f}"


@cache
def _here() -> str:
    """Host name, boot id and PID namespace; containers can share the first two, and have their own process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: no PID namespaces
        boot, numbers = f"{uuid.getnode():x}", "all"
    return f"{socket.gethostname()}/{boot}/{numbers}"
