"""``systolic VERB [TARGET] [options]``: finds the verb, runs it, and turns errors into one line."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from systolic.cli.forms import TargetKind, VerbForm, run_forms
from systolic.core.errors import OptionError, SystolicError, nearest
from systolic.core.machine import set_up_xla
from systolic.core.reporter import reporting
from systolic.core.shutdown import TerminatedError, leave, remember_interrupts
from systolic.report.stderr import StderrReporter


class Verb(NamedTuple):
    """One command: forms, each with its public function, or a module of this package with ``run(args) -> exit code``."""

    module: str
    summary: str
    forms: tuple[VerbForm, ...] = ()


VERBS = {
    "doctor": Verb(
        "doctor",
        "checks this machine: versions, devices, processes that hold the TPU, measured peaks",
    ),
    "chips": Verb("chips", "lists chips and slices, each number with its source"),
    "recipes": Verb("recipes", "lists the recipes, or one recipe's options"),
    "data": Verb(
        "data", "packs data into ArrayRecord, shows what a model will see, trains a tokenizer"
    ),
    "forecast": Verb(
        "forecast", "memory, time, MFU and cost of a step on a slice that you don't have"
    ),
    "plan": Verb(
        "systolic.planning.command:USAGE",
        "finds the slice and layout that train a recipe soonest or cheapest",
        (
            VerbForm(
                function="systolic.planning.command:plan",
                view="systolic.planning.display.view:show",
                reporter="systolic.planning.display.progress:SearchReporter",
                takes=TargetKind.recipe,
                needs="a recipe or a model",
            ),
            VerbForm(
                function="systolic.planning.command:plan_program",
                view="systolic.planning.display.view:show_ranking",
                takes=TargetKind.program,
            ),
            VerbForm(
                function="systolic.session.serving_plan:plan_serving",
                view="systolic.planning.display.view:show_serving",
                takes=TargetKind.recipe,
                needs="a model",
                word="serve",
                usage="systolic.session.serving_plan:USAGE",
            ),
        ),
    ),
    "calibrate": Verb(
        "calibrate", "corrects the simulator by profiles of your own chips, for forecast and plan"
    ),
    "calibrations": Verb("calibrations", "lists calibrations, or one with what it rests on"),
    "explain": Verb(
        "explain", "why a run, a step or a profile is slow or fails to learn, and what to change"
    ),
    "train": Verb(
        "systolic.session.train_command:USAGE",
        "trains a recipe; resumes with --resume RUN; rehearses with --rehearse SLICE",
        (
            VerbForm(
                function="systolic.session.train_command:train",
                view="systolic.session.train_view:show",
                reporter="systolic.session.train_view:TrainReporter",
                takes=TargetKind.recipe,
                needs="a recipe",
            ),
            VerbForm(
                function="systolic.session.train_command:resume",
                view="systolic.session.train_view:show",
                reporter="systolic.session.train_view:TrainReporter",
                takes=TargetKind.run,
                option="resume",
            ),
            VerbForm(
                function="systolic.session.train_command:replay",
                view="systolic.session.train_view:show_replay",
                takes=TargetKind.path,
                option="replay",
            ),
            VerbForm(
                function="systolic.session.train_command:rehearse",
                view="systolic.session.train_view:show_rehearsal",
                reporter="systolic.session.train_view:RehearsalReporter",
                takes=TargetKind.recipe,
                needs="a recipe",
                with_option="rehearse",
                beside="systolic.session.train_command:train",
            ),
        ),
    ),
    "tune": Verb("tune", "searches the settings that train a recipe best"),
    "launch": Verb(
        "launch",
        "trains a recipe on another platform: writes its files, shows the bill, submits",
    ),
    "runs": Verb("runs", "lists launches: where, at what price, what they have used"),
    "status": Verb("status", "shows the state of a launch"),
    "logs": Verb("logs", "prints the output of a launch; -f follows it"),
    "stop": Verb("stop", "stops a launch, after its training has saved"),
    "import": Verb(
        "import_model",
        "writes a Hugging Face model as a Bundle, and checks that it computes the same",
    ),
    "eval": Verb(
        "",
        "evaluates a run on its held-out data",
        (
            VerbForm(
                function="systolic.inference.command:evaluate",
                view="systolic.inference.display.view:show_metrics",
                takes=TargetKind.words,
            ),
        ),
    ),
    "generate": Verb(
        "",
        "continues prompts with a trained language model",
        (
            VerbForm(
                function="systolic.inference.command:generate",
                view="systolic.inference.display.view:show_texts",
                reporter="systolic.inference.display.view:TextReporter",
                takes=TargetKind.words,
            ),
        ),
    ),
    "predict": Verb(
        "",
        "labels files with a trained model",
        (
            VerbForm(
                function="systolic.inference.command:predict",
                view="systolic.inference.display.view:show_predictions",
                reporter="systolic.inference.display.view:AnswerReporter",
                takes=TargetKind.words,
            ),
        ),
    ),
    "serve": Verb(
        "serve", "serves trained models to the clients of OpenAI, Triton and TensorFlow Serving"
    ),
    "batch": Verb(
        "batch", "answers a file of requests in OpenAI's batch format, each line exactly once"
    ),
    "quantize": Verb(
        "quantize",
        "writes a model with its matrices in int8, int4, fp8 or nf4, and what that costs",
    ),
    "export": Verb(
        "export", "writes a trained model for transformers, JAX or TensorFlow, or as a Bundle"
    ),
    "compare": Verb(
        "",
        "two models side by side: size, quality, answers, latency, forecast",
        (
            VerbForm(
                function="systolic.comparing.command:compare_models",
                view="systolic.comparing.display.view:show",
                takes=TargetKind.words,
            ),
        ),
    ),
    "verify": Verb(
        "",
        "checks that a Bundle is whole, and that it computes here what it computed",
        (
            VerbForm(
                function="systolic.inference.command:verify_bundle",
                view="systolic.inference.display.view:show_verified",
                takes=TargetKind.words,
            ),
        ),
    ),
}


OWN_BUCKETS = ("launch", "runs", "status", "logs", "stop")
"""Verbs that hand paths in buckets on to machines elsewhere."""
WRITTEN = {"--run", "--resume", "--out"}
"""Options whose path is written."""


def usage() -> str:
    """The text of ``systolic --help``."""
    width = max(map(len, VERBS))
    rows = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: systolic VERB [TARGET] [options]",
            "",
            *rows,
            "",
            "systolic VERB --help shows a verb's options; every verb takes --json.",
            "Start here: systolic train bytes",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code and never lets a user's mistake become a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        from systolic import __version__

        print(f"systolic {__version__}")
        return 0
    set_up_xla()
    return guarded(lambda: _verb(args))


def script() -> NoReturn:
    """The ``systolic`` command: ends this process with the exit code of :func:`main`."""
    remember_interrupts()
    leave(main())


def guarded(work: Callable[[], int | None]) -> int:
    """Runs ``work`` and returns its exit code; a user's mistake becomes one line on stderr."""
    try:
        return int(work() or 0)
    except SystolicError as error:
        print(f"systolic: {error}", file=sys.stderr)
        return error.exit_code
    except TerminatedError:
        print("systolic: ended by SIGTERM", file=sys.stderr)
        return 143
    except KeyboardInterrupt as error:
        print(f"systolic: {str(error) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _verb(args: list[str]) -> int | None:
    if args[0] not in VERBS:
        raise OptionError(
            f"there is no verb {args[0]!r}{nearest(args[0], VERBS)}; systolic --help lists them"
        )
    rest = args[1:] if args[0] in OWN_BUCKETS else _copied(args[1:])
    verb = VERBS[args[0]]
    with reporting(StderrReporter()):
        if verb.forms:
            return run_forms(args[0], verb.module, verb.forms, rest)
        return import_module(f"systolic.cli.{verb.module}").run(rest)


def _copied(args: list[str]) -> list[str]:
    """Arguments with the copies of what they name in buckets, brought up to date; a run that is written is not brought here."""
    found = []
    for before, arg in zip(["", *args], args, strict=False):
        name, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
        written = {name, before} & WRITTEN
        if "--out" in written and value.startswith(("s3://", "gs://")):
            raise OptionError(
                f"out is {value}, and results are written into a folder here; give --out FOLDER and copy it there"
            )
        if value.startswith(("s3://", "gs://")) and not written:
            from systolic.runs.remote.mirror import pull

            value = str(pull(value, lambda text: print(f"systolic: {text}", file=sys.stderr)))
        found.append(f"{name}{equals}{value}")
    return found
