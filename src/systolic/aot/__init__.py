"""Ahead-of-time compiles for a described slice, in a child process, kept in a content-addressed store."""

from systolic.aot.compile import Compiler, compile
from systolic.aot.outcome import Compiled, Failed, Outcome, Rejected
from systolic.aot.program import FunctionProgram, JobProgram, PagedProgram, Program, ServingProgram
from systolic.aot.traced import StepKind

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
