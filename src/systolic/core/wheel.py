"""Builds this package as a wheel from the running files, so that an image has the code that exported it."""

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from pathlib import Path

import systolic
from systolic.core.distribution import PACKAGE
from systolic.core.files import write_atomically

TAG = "py3-none-any"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of all files; makes the wheel reproducible."""
LEFT_OUT = ("__pycache__",)


def write_wheel(folder: Path) -> Path:
    """Writes the wheel into a folder.

    Format: https://packaging.python.org/en/latest/specifications/binary-distribution-format/

    Raises:
        RunError: the disk is full.
    """
    about = importlib.metadata.distribution(PACKAGE)
    stem = f"{PACKAGE}-{about.version}"
    root = Path(systolic.__file__).parent
    contents = {
        f"{PACKAGE}/{file.relative_to(root).as_posix()}": file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file() and not set(LEFT_OUT) & set(file.parts)
    }
    info = f"{stem}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        contents[f"{info}/{name}"] = (about.read_text(name) or "").encode()
    contents[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {PACKAGE}\nRoot-Is-Purelib: true\nTag: {TAG}\n".encode()
    )
    record = f"{info}/RECORD"
    rows = [f"{name},{_digest(raw)},{len(raw)}" for name, raw in contents.items()]
    contents[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    made = folder / f"{stem}-{TAG}.whl"
    raw_wheel = io.BytesIO()
    with zipfile.ZipFile(raw_wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for name, raw in contents.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = 0o644 << 16
            out.writestr(entry, raw, zipfile.ZIP_DEFLATED)
    write_atomically(made, raw_wheel.getvalue())
    return made


def _digest(raw: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
