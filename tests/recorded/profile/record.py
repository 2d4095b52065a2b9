"""Real profiles of a few steps on this machine's CPU: ``python -m tests.recorded.profile.record``.

Leaves NAME.xplane.pb.xz here. Folders of this machine are replaced by others of the same length, so
that the file stays valid; nothing else is changed.
"""

import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FAULTS = f"{HERE.relative_to(ROOT)}/recipes.py"
PROFILES = {
    "digits": ("digits", "--steps", "20", "--profile", "3"),
    "late": (f"{FAULTS}:late", "--profile", "4"),
    "odd": (f"{FAULTS}:odd", "--profile", "4"),
}


def clean(content: bytes) -> bytes:
    """Without this machine's folders."""
    for folder in (str(ROOT), sys.prefix):
        content = content.replace(folder.encode(), ("/" + "x" * (len(folder) - 1)).encode())
    return content


def record(name: str) -> None:
    """Trains and writes one file."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "systolic", "train", *PROFILES[name], "--diagnose", "0"]
        subprocess.run([*command, "--run", str(run)], check=True, cwd=ROOT)
        (made,) = (run / "profile").rglob("*.xplane.pb")
        packed = lzma.compress(clean(made.read_bytes()), preset=9)
    (HERE / f"{name}.xplane.pb.xz").write_bytes(packed)


if __name__ == "__main__":
    for each in sys.argv[1:] or PROFILES:
        record(each)
