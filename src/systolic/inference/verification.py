"""Verification of a Bundle: whether a Bundle's files are those that were written, and compute what they computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, RunError
from systolic.core.reporter import reporter
from systolic.formats.bundle import Replay, inputs_of, open_bundled
from systolic.formats.bundle import replay as compare
from systolic.formats.program.model import ExportedProgram
from systolic.inference.model import answers
from systolic.runs.bundle.folder import Bundle, checked_bundle

UNRECORDED = "the Bundle holds no recorded inputs: only digests were checked"
UNASKED = "no replay was asked for: only digests were checked"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A Bundle whose files are intact."""

    path: Path
    files: int
    bytes: int
    """Bytes of the files that bundle.json lists."""
    replay: Replay | None
    unreplayed: str | None
    """Why there is no replay; ``None`` where there is one."""
    about: dict[str, Any]
    """``source``, ``versions``, ``recipe``, ``data``, ``evaluations`` and ``licence`` as bundle.json has them."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "bundle": str(self.path),
            "files": self.files,
            "bytes": self.bytes,
            "replay": None if self.replay is None else self.replay.to_json(),
            "unreplayed": self.unreplayed,
            **self.about,
        }


def verified(path: Path, *, replay: bool) -> Verified:
    """A Bundle whose files are intact, with the replay of its recorded inputs; see :func:`systolic.verify_bundle`."""
    bundle = checked_bundle(path)
    unreplayed = UNASKED
    if replay:
        unreplayed = UNRECORDED if bundle.record.recorded is None else None
    comparison = None
    if unreplayed is None:
        reporter().stage("replay")
        comparison = _replayed(bundle)
        if not comparison.passed:
            raise RunError(
                f"{path} computes something else here: {comparison.line()}; its files are intact, so compare versions ({_versions(bundle)}) and report it, or export the model again"
            )
    return Verified(
        path=path,
        files=len(bundle.record.files),
        bytes=sum(file.bytes for file in bundle.record.files.values()),
        replay=comparison,
        unreplayed=unreplayed,
        about=_about(bundle),
    )


def _replayed(bundle: Bundle) -> Replay:
    about = bundle.record.recorded
    assert about is not None
    if isinstance(bundle.model, ExportedProgram):
        from systolic.formats.program.exported import replayed

        comparison = replayed(bundle.folder, bundle.folder / about.file)
        return Replay(
            rows=comparison["rows"],
            positions=comparison["rows"],
            max_abs=comparison["max_abs"],
            max_relative=comparison["max_relative"],
            same_largest=None,
            tolerance=about.tolerance,
            precision=about.precision,
            platform=about.platform,
        )
    inputs = inputs_of(bundle)
    if not inputs:
        raise DataError(f"{bundle.folder / about.file} holds no inputs; export the model again")
    return compare(bundle, answers(open_bundled(bundle.folder), inputs)[0])


def _versions(bundle: Bundle) -> str:
    return ", ".join(f"{name} {version}" for name, version in bundle.record.versions.items())


def _about(bundle: Bundle) -> dict[str, Any]:
    import msgspec

    plain = msgspec.to_builtins(bundle.record)
    names = ("source", "versions", "recipe", "data", "evaluations")
    return {**{name: plain[name] for name in names}, "licence": bundle.record.source.licence}
