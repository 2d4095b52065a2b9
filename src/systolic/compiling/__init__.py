"""Ahead-of-time compiles for a described slice, in a child process, kept in a content-addressed store."""

from systolic.compiling.compile import (
    Compiler,
    FunctionProgram,
    JobProgram,
    PagedProgram,
    Program,
    ServingProgram,
    compile,
)
from systolic.compiling.outcome import Compiled, Failed, Outcome, Rejected
from systolic.compiling.traced import StepKind

__all__ = [
    "Compiled",
    "Compiler",
    "Failed",
    "FunctionProgram",
    "JobProgram",
    "Outcome",
    "PagedProgram",
    "Program",
    "Rejected",
    "ServingProgram",
    "StepKind",
    "compile",
]
