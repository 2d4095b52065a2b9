"""Worker processes of a search on this machine: started, watched, restarted after a kill, stopped together."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from systolic.core.errors import OptionError, RunError
from systolic.core.files import cure
from systolic.core.reporter import reporter
from systolic.core.shutdown import remembered
from systolic.tuning.definition import SearchRecord, Tuning
from systolic.tuning.results import StudyResult
from systolic.tuning.study import SharedStudy

POLL_SECONDS = 0.2
SEE_SECONDS = 1.0
"""Interval between reads of the study."""
ASK_SECONDS = 2.0
"""Interval between stop signals to workers, repeated because a worker may be starting a trial."""
DEATHS = 3
"""Deaths per worker without progress (an evaluation, a checkpoint or the end of a trial) after which no worker is restarted."""
STOPPED = 3
"""Exit code of a worker that stopped early; its last line has the reason."""
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a worker that SIGINT and SIGTERM ended."""
COMMAND = (sys.executable, "-m", "systolic.tuning.worker")
LINE = "systolic: "


@dataclass(kw_only=True)
class Processes:
    """Workers of one search on this machine.

    Args:
        tuning: The search.
        shared: Its study.
        search: The search as its workers read it, with the trial whose settings they repeat.
        count: Number of workers.
        command: Command of a worker.
    """

    tuning: Tuning
    shared: SharedStudy
    search: SearchRecord
    count: int
    command: Sequence[str] = COMMAND
    stopped: str = ""
    """Why the search ended before all trials were done."""
    interrupted: bool = False
    _asked: list[int] = field(default_factory=list, init=False)
    _progress: int = field(default=0, init=False)
    _deaths: int = field(default=0, init=False)

    def run(self) -> StudyResult:
        """Runs workers until all have ended and returns the results. Starts none if no trial is left.

        Raises:
            OptionError: a worker rejected the command.
            RunError: a worker failed.
        """
        before = self.result(weighed=False)
        if before.finished >= before.total:
            return self.result()
        running: dict[int, subprocess.Popen[bytes]] = {}
        with remembered(self._asked):
            try:
                for number in range(self.count):
                    running[number] = self._start(number)
                self._watch(running)
            finally:
                for each in running.values():
                    each.kill()
                    each.wait()
        return self.result()

    def result(self, *, weighed: bool = True) -> StudyResult:
        """Results of the study so far; see :meth:`~systolic.tuning.definition.Tuning.result`."""
        stopped = self.stopped or ("interrupted" if self.interrupted else "")
        return self.tuning.result(self.shared, stopped=stopped, weighed=weighed)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        log = self._log(number)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = log.open("ab")
        except OSError as error:
            raise RunError(
                f"{log} could not be written ({error.strerror}); {cure(log, error)}"
            ) from error
        with out, tempfile.TemporaryFile() as search:
            search.write(json.dumps(msgspec.to_builtins(self.search)).encode())
            search.seek(0)
            # In its own session: Ctrl-C reaches only this process, which then stops the workers.
            return subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                stdin=search,
                start_new_session=True,
            )

    def _log(self, number: int) -> Path:
        return self.tuning.folder / "workers" / f"{number}.log"

    def _watch(self, running: dict[int, subprocess.Popen[bytes]]) -> None:
        seen = last_ask = 0.0
        while running:
            now = time.monotonic()
            if now - seen >= SEE_SECONDS:
                seen = now
                self._look()
            if self._asked and now - last_ask >= ASK_SECONDS:
                last_ask = now
                self._stop(running)
            for number, each in list(running.items()):
                code = each.poll()
                if code is not None:
                    del running[number]
                    self._ended(number, code, running)
            time.sleep(POLL_SECONDS)
        self._look()

    def _look(self) -> None:
        results = self.result(weighed=False)
        progress = results.finished + sum(row.step + row.resumed for row in results.rows)
        if progress > self._progress:
            self._progress, self._deaths = progress, 0
        reporter().update(results)

    def _stop(self, running: dict[int, subprocess.Popen[bytes]]) -> None:
        self.interrupted = True
        for each in running.values():
            if len(self._asked) > 1:
                each.kill()
            else:
                each.terminate()

    def _ended(self, number: int, code: int, running: dict[int, subprocess.Popen[bytes]]) -> None:
        """Handles the end of a worker.

        Raises:
            OptionError: the worker rejected the command.
            RunError: it failed, or workers died repeatedly without progress.
        """
        if code == 0 or code == INTERRUPTED or self._asked:
            return
        line = last_line(self._log(number))
        if code == STOPPED:
            self.stopped = line
            return
        if code in (1, 2):
            raise (OptionError if code == 2 else RunError)(line)
        self._deaths += 1
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if self._deaths > DEATHS * self.count:
            raise RunError(
                f"workers died {self._deaths} times without progress (last: {how}); see {self._log(number)}"
            )
        reporter().warn(f"worker {number} died ({how}); a new process continues its trial")
        running[number] = self._start(number)


def last_line(log: Path) -> str:
    """A worker's last message, or otherwise the last line of its log."""
    lines = log.read_text(errors="replace").splitlines()
    messages = [line.removeprefix(LINE) for line in lines if line.startswith(LINE)]
    return (messages or lines or ["it printed nothing"])[-1]
