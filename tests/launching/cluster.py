"""Slurm cluster on this machine, from Debian's packages: a controller, and nodes whose GPUs are only counted."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=5
OverTimeLimit=0
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=gpus Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def available() -> bool:
    """Whether Slurm is installed and this user may run it."""
    return os.getuid() == 0 and all(shutil.which(name) for name in PROGRAMS)


@contextmanager
def cluster(folder: Path) -> Iterator[Mapping[str, str]]:
    """Starts two nodes with a GPU each; yields the environment for Slurm's commands."""
    host = socket.gethostname().partition(".")[0]
    fields = {
        "host": host,
        "folder": folder,
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "ports": [_free_port() for _ in range(3)],
    }
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(**fields))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)
    environ = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [
        f"--{what}={folder}/munge.{what[:4]}" for what in ("pid-file", "log-file", "seed-file")
    ]
    commands = [
        [*munge, f"--key-file={folder}/munge.key"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    running = []
    try:
        for words in commands:
            with (folder / f"{words[0]}{words[-1]}.out".replace("/", "_")).open("w") as out:
                running.append(subprocess.Popen(words, env=environ, stdout=out, stderr=out))
            if words[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists())
        _wait(lambda: idle(environ))
        yield environ
    finally:
        for one in reversed(running):
            one.terminate()
            one.wait(timeout=30)


def idle(environ: Mapping[str, str]) -> bool:
    """Whether both nodes are idle."""
    words = ["sinfo", "--noheader", "--format=%D %T"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    return done.stdout.split() == ["2", "idle"]


def _wait(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
