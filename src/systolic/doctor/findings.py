"""Findings: the name of a check, its status, and the command that fixes the problem."""

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """Status of a check, from good to bad; only ``failed`` makes the exit code 1."""

    ok = "ok"
    note = "note"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Outcome of one check. A warning or a failure has a one-line fix."""

    name: str
    status: Status
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.warning, Status.failed) and not self.fix:
            raise ValueError(f"finding {self.name} has no fix")
        if "\n" in self.text + self.fix:
            raise ValueError(f"finding {self.name} has more than one line")

    def to_json(self) -> dict[str, str]:
        """The finding as a plain object."""
        return {
            "name": self.name,
            "status": self.status.value,
            "text": self.text,
            "fix": self.fix,
            "mend": self.fix,  # Earlier name, kept for one version.
        }


def fine(name: str, text: str) -> Finding:
    """Finding of a check that passed."""
    return Finding(name=name, status=Status.ok, text=_one_line(text))


def noted(name: str, text: str) -> Finding:
    """Finding that is neither good nor bad."""
    return Finding(name=name, status=Status.note, text=_one_line(text))


def warned(name: str, text: str, fix: str) -> Finding:
    """Finding about something that works, but at a cost."""
    return Finding(name=name, status=Status.warning, text=_one_line(text), fix=fix)


def failed(name: str, text: str, fix: str) -> Finding:
    """Finding about something that does not work until it is fixed."""
    return Finding(name=name, status=Status.failed, text=_one_line(text), fix=fix)


def _one_line(text: str) -> str:
    """Replaces line breaks, which variables and messages of programs may contain."""
    return " ".join(text.split())
