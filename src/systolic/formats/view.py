"""Output of ``systolic import`` and ``systolic export``."""

import shlex
from typing import TYPE_CHECKING

from systolic.core.units import duration, si
from systolic.report.output import or_json, warn

if TYPE_CHECKING:
    from systolic.formats.conversion import ModelExport
    from systolic.formats.export import Exported
    from systolic.formats.gguf.writer import ExportedGguf
    from systolic.formats.importing import Imported
    from systolic.formats.litert.edge_tpu import EdgeTpuReport
    from systolic.formats.litert.writer import LiteExport
    from systolic.serving.docker import ExportedImage


@or_json
def show_import(imported: "Imported") -> None:
    """Prints what was imported."""
    from systolic.formats.importing import NOT_ASKED

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


@or_json
def show_export(
    exported: "Exported | ExportedGguf | ExportedImage | ModelExport | LiteExport | EdgeTpuReport",
) -> None:
    """Prints what was exported, or what the Edge TPU takes of a file."""
    from systolic.formats.litert.edge_tpu import EdgeTpuReport

    if not isinstance(exported, EdgeTpuReport):
        print(
            f"{exported.path}: {exported.kind}, {exported.parameters:,} parameters, {si(exported.bytes, 'B')}, in {duration(exported.seconds)}"
        )
    for line in exported.lines():
        print(line)
