"""Output of ``systolic import`` and ``systolic export``."""

import shlex
from typing import TYPE_CHECKING

from systolic.core.units import duration, si
from systolic.report.output import print_json, warn

if TYPE_CHECKING:
    from systolic.formats.conversion import ModelExport
    from systolic.formats.export import Exported
    from systolic.formats.gguf.writer import ExportedGguf
    from systolic.formats.importing import Imported
    from systolic.formats.litert.edge_tpu import EdgeTpuReport
    from systolic.formats.litert.writer import LiteExport
    from systolic.serving.docker import ExportedImage


def show_import(imported: "Imported", *, json: bool = False) -> int:
    """Prints what was imported; returns the exit code.

    Args:
        imported: The Bundle.
        json: Print one JSON object.
    """
    from systolic.formats.importing import NOT_ASKED

    if json:
        print_json(imported.to_json())
        return 0
    print(
        f"{imported.path}: {imported.parameters:,} parameters in {imported.dtype}, {si(imported.bytes, 'B')}, in {duration(imported.seconds)}"
    )
    if imported.parity is not None:
        print(imported.parity.line())
    elif imported.unchecked != NOT_ASKED:
        warn(imported.unchecked or "")
    for line in imported.notes:
        warn(line)
    if imported.unusable is None:
        print(f"next: systolic {imported.use.format(shlex.quote(str(imported.path)))}")
    else:
        warn(
            f"{imported.unusable}, then import it again: without it the Bundle computes and reads no text"
        )
    return 0


def show_export(
    exported: "Exported | ExportedGguf | ExportedImage | ModelExport | LiteExport | EdgeTpuReport",
    *,
    json: bool = False,
) -> int:
    """Prints what was exported, or what the Edge TPU takes of a file; returns the exit code.

    Args:
        exported: What was written, or the report on a file.
        json: Print one JSON object.
    """
    from systolic.formats.litert.edge_tpu import EdgeTpuReport

    if json:
        print_json(exported.to_json())
        return 0
    if not isinstance(exported, EdgeTpuReport):
        print(
            f"{exported.path}: {exported.kind}, {exported.parameters:,} parameters, {si(exported.bytes, 'B')}, in {duration(exported.seconds)}"
        )
    for line in exported.lines():
        print(line)
    return 0
