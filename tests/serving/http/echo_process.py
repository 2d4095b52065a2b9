"""A server of the echo as a process: ``python -m tests.serving.http.echo_process STEP_SECONDS GRACE_SECONDS [CERT KEY]``."""

import sys
from pathlib import Path

from systolic.serving.http.keys import HttpLimits
from systolic.serving.http.metrics import Metrics
from systolic.serving.http.process import Address, Process
from systolic.serving.http.state import ServerState
from systolic.serving.http.telemetry import EventLog
from systolic.serving.registry import ModelRegistry
from tests.serving.http.running import echo_model, pending

if __name__ == "__main__":
    step, grace, *files = sys.argv[1:]
    cert, key = map(Path, files) if files else (None, None)
    state = ServerState(registry=ModelRegistry(), limits=HttpLimits(), metrics=Metrics())
    Process(
        state,
        [pending(echo_model(step_seconds=float(step)))],
        Address(port=0, grace_seconds=float(grace), tls_cert=cert, tls_key=key),
        EventLog(),
        listening=lambda port: print(port, flush=True),
    ).run()
