"""``systolic VERB [TARGET] [options]``: finds the verb, runs it, and turns errors into one line."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from systolic.cli.forms import (
    ByAnyTarget,
    ByFirstOption,
    ByOption,
    ByProgram,
    BySwitch,
    ByTarget,
    ByWord,
    TargetKind,
    VerbForm,
    run_forms,
)
from systolic.core.arguments import WRITTEN_HERE, check_local
from systolic.core.errors import OptionError, SystolicError, nearest
from systolic.core.machine import set_up_xla, take_huge_pages
from systolic.core.ranges import dashed
from systolic.core.reporter import reporting
from systolic.core.shutdown import TerminatedError, leave, remember_interrupts
from systolic.report.output import StderrReporter

TRAIN = VerbForm(
    function="systolic.training.command:train",
    view="systolic.training.display.view:show",
    reporter="systolic.training.display.view:TrainReporter",
    takes=TargetKind.recipe,
    needs="a recipe",
)
TARGET_KIND = "systolic.explaining.command:target_kind"
"""The function that says what a word after systolic explain names."""
OWN_BUCKETS = ("launch", "runs", "status", "logs", "stop")
"""Verbs that hand paths in buckets on to machines elsewhere."""
INTO_BUCKETS = {"--run", "--resume"}
"""Options whose path may be in a bucket, where it is written."""
WRITTEN = INTO_BUCKETS | {f"--{dashed(name)}" for name in WRITTEN_HERE}
"""Options whose path is written."""


class Verb:
    """One command: forms, each with its public function; ``usage`` is ``module:NAME`` of its help's first lines, by default written from the function."""

    def __init__(self, summary: str, *forms: VerbForm, usage: str = "") -> None:
        self.summary, self.forms, self.usage = summary, forms, usage


VERBS = {
    "doctor": Verb(
        "checks this machine: versions, devices, processes that hold the TPU, measured peaks",
        VerbForm(
            function="systolic.doctor.command:diagnose",
            view="systolic.doctor.view:show",
        ),
    ),
    "chips": Verb(
        "lists chips and slices, each number with its source",
        VerbForm(
            function="systolic.chips.command:look_up",
            view="systolic.chips.command:show",
        ),
    ),
    "recipes": Verb(
        "lists the recipes, or one recipe's options",
        VerbForm(
            function="systolic.recipes.listing:list_recipes",
            view="systolic.recipes.listing:show_list",
        ),
        VerbForm(
            function="systolic.recipes.listing:describe_recipe",
            view="systolic.recipes.listing:show_recipe",
            takes=TargetKind.name,
            choice=ByAnyTarget(),
            below_help_of=("train", TRAIN),
        ),
    ),
    "data": Verb(
        "packs data into ArrayRecord, shows what a model will see, trains a tokenizer",
        VerbForm(
            function="systolic.data.command:pack",
            view="systolic.data.view:show_packed",
            reporter="systolic.data.view:ReadingReporter",
            choice=ByWord("pack"),
        ),
        VerbForm(
            function="systolic.data.command:inspect",
            view="systolic.data.view:show_inspected",
            choice=ByWord("inspect", "systolic.data.command:is_data"),
        ),
        VerbForm(
            function="systolic.data.command:inspect_recipe",
            view="systolic.data.view:show_inspected",
            takes=TargetKind.recipe,
            choice=ByWord("inspect"),
        ),
        VerbForm(
            function="systolic.data.command:train_tokenizer",
            view="systolic.data.view:show_tokenizer",
            reporter="systolic.data.view:ReadingReporter",
            choice=ByWord("tokenizer"),
        ),
        usage="systolic.data.command:USAGE",
    ),
    "forecast": Verb(
        "memory, time, MFU and cost of a step on a slice that you don't have",
        VerbForm(
            function="systolic.forecasting.command:forecast",
            view="systolic.forecasting.display.view:show",
            check="systolic.forecasting.display.view:check",
            takes=TargetKind.recipe,
            needs="a recipe or a model",
        ),
        VerbForm(
            function="systolic.forecasting.command:forecast_command",
            view="systolic.forecasting.display.view:show_step",
            takes=TargetKind.program,
            choice=ByProgram(),
        ),
        VerbForm(
            function="systolic.forecasting.command:forecast_server",
            view="systolic.forecasting.display.view:show_server",
            takes=TargetKind.recipe,
            needs="a model or a recipe",
            choice=BySwitch("serve"),
        ),
        VerbForm(
            function="systolic.forecasting.command:forecast_dump",
            view="systolic.forecasting.display.view:show",
            check="systolic.forecasting.display.view:check",
            takes=TargetKind.path,
            choice=ByTarget("systolic.forecasting.command:is_dump"),
        ),
        VerbForm(
            function="systolic.forecasting.comparison:compare_forecasts",
            view="systolic.forecasting.display.comparison:show_changes",
            takes=TargetKind.path,
            choice=ByTarget("systolic.forecasting.command:is_saved"),
        ),
        usage="systolic.forecasting.command:USAGE",
    ),
    "plan": Verb(
        "finds the slice and layout that train a recipe soonest or cheapest",
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
            choice=ByProgram(),
        ),
        VerbForm(
            function="systolic.planning.serving:plan_serving",
            view="systolic.planning.display.view:show_serving",
            takes=TargetKind.recipe,
            needs="a model",
            choice=ByWord("serve"),
            usage="systolic.planning.serving:USAGE",
        ),
        usage="systolic.planning.command:USAGE",
    ),
    "calibrate": Verb(
        "corrects the simulator with profiles of your own chips, for forecast and plan",
        VerbForm(
            function="systolic.explaining.command:calibrate",
            view="systolic.explaining.display.view:show_calibrated",
            words=("profiles",),
        ),
        usage="systolic.explaining.command:CALIBRATE_USAGE",
    ),
    "calibrations": Verb(
        "lists calibrations, or shows the factors of one",
        VerbForm(
            function="systolic.explaining.command:calibrations",
            view="systolic.explaining.display.view:show_calibrations",
            words=("name",),
        ),
        usage="systolic.explaining.command:LIST_USAGE",
    ),
    "explain": Verb(
        "why a run, a step or a profile is slow or fails to learn, and what to change",
        VerbForm(
            function="systolic.explaining.command:explain_step",
            view="systolic.explaining.display.view:show",
            reporter="systolic.explaining.display.progress:ExplainReporter",
            takes=TargetKind.recipe,
            needs="a run, a recipe, a profile, a saved forecast, or -- and a command",
        ),
        VerbForm(
            function="systolic.explaining.command:explain_saved",
            view="systolic.explaining.display.view:show",
            reporter="systolic.explaining.display.progress:ExplainReporter",
            takes=TargetKind.run,
            choice=ByTarget(TARGET_KIND, "forecast"),
        ),
        VerbForm(
            function="systolic.explaining.command:explain_run",
            view="systolic.explaining.display.view:show_run",
            takes=TargetKind.path,
            choice=ByTarget(TARGET_KIND, "run"),
        ),
        VerbForm(
            function="systolic.explaining.command:explain_profile",
            view="systolic.explaining.display.view:show_profile",
            reporter="systolic.explaining.display.progress:ExplainReporter",
            takes=TargetKind.path,
            choice=ByTarget(TARGET_KIND, "profile"),
        ),
        VerbForm(
            function="systolic.explaining.command:explain_program",
            view="systolic.explaining.display.view:show_program",
            takes=TargetKind.program,
            choice=ByProgram(),
            done="explained",
        ),
        VerbForm(
            function="systolic.explaining.command:explain_dump",
            view="systolic.explaining.display.view:show_program",
            takes=TargetKind.path,
            choice=ByTarget(TARGET_KIND, "dump"),
        ),
        usage="systolic.explaining.command:USAGE",
    ),
    "train": Verb(
        "trains a recipe; resumes with --resume RUN; rehearses with --rehearse SLICE",
        TRAIN,
        VerbForm(
            function="systolic.training.command:resume",
            view="systolic.training.display.view:show",
            reporter="systolic.training.display.view:TrainReporter",
            takes=TargetKind.run,
            choice=ByFirstOption("resume"),
        ),
        VerbForm(
            function="systolic.training.command:replay",
            view="systolic.training.display.view:show_replay",
            takes=TargetKind.path,
            choice=ByFirstOption("replay"),
        ),
        VerbForm(
            function="systolic.training.command:rehearse",
            view="systolic.training.display.view:show_rehearsal",
            reporter="systolic.training.display.view:RehearsalReporter",
            takes=TargetKind.recipe,
            needs="a recipe",
            choice=ByOption("rehearse"),
            beside="systolic.training.command:train",
        ),
        usage="systolic.training.command:USAGE",
    ),
    "tune": Verb(
        "searches the settings that train a recipe best",
        VerbForm(
            function="systolic.tuning.command:tune",
            view="systolic.tuning.display.view:show",
            reporter="systolic.tuning.display.progress:StudyReporter",
            takes=TargetKind.recipe,
            needs="a recipe",
        ),
        usage="systolic.tuning.command:USAGE",
    ),
    "launch": Verb(
        "trains a recipe on another platform: writes its files, shows the bill, submits",
        VerbForm(
            function="systolic.launching.command:launch",
            view="systolic.launching.view:show_launch",
            reporter="systolic.launching.view:LaunchReporter",
            takes=TargetKind.recipe_as_typed,
            needs="a recipe",
        ),
        VerbForm(
            function="systolic.launching.command:launch_server",
            view="systolic.launching.view:show_launch",
            reporter="systolic.launching.view:LaunchReporter",
            needs="a Bundle, or gs://BUCKET/FOLDER",
            choice=ByWord("serve"),
            usage="systolic.launching.command:SERVE_USAGE",
        ),
        usage="systolic.launching.command:USAGE",
    ),
    "runs": Verb(
        "lists launches: where, at what price, what they have used",
        VerbForm(
            function="systolic.launching.command:launches",
            view="systolic.launching.view:show_runs",
        ),
    ),
    "status": Verb(
        "shows the state of a launch",
        VerbForm(
            function="systolic.launching.command:status",
            view="systolic.launching.view:show_status",
        ),
    ),
    "logs": Verb(
        "prints the output of a launch; -f follows it",
        VerbForm(
            function="systolic.launching.command:logs",
            view="systolic.launching.view:show_logs",
        ),
    ),
    "stop": Verb(
        "stops a launch, after its training has saved",
        VerbForm(
            function="systolic.launching.command:stop",
            view="systolic.launching.view:show_stop",
        ),
    ),
    "import": Verb(
        "writes a Hugging Face model as a Bundle, and checks that it computes the same",
        VerbForm(
            function="systolic.formats.command:import_model",
            view="systolic.formats.command:show_import",
        ),
    ),
    "eval": Verb(
        "evaluates a run on its held-out data, or by lm-evaluation-harness",
        VerbForm(
            function="systolic.inference.command:evaluate",
            view="systolic.inference.view:show_metrics",
            words=("model",),
        ),
    ),
    "generate": Verb(
        "continues prompts with a trained language model",
        VerbForm(
            function="systolic.inference.command:generate",
            view="systolic.inference.view:show_texts",
            reporter="systolic.inference.view:TextReporter",
            words=("model", "prompts"),
        ),
    ),
    "predict": Verb(
        "labels files with a trained model",
        VerbForm(
            function="systolic.inference.command:predict",
            view="systolic.inference.view:show_predictions",
            reporter="systolic.inference.view:AnswerReporter",
            words=("model", "files"),
        ),
    ),
    "serve": Verb(
        "serves trained models to the clients of OpenAI, Triton and TensorFlow Serving",
        VerbForm(
            function="systolic.serving.command:serve",
            view="systolic.serving.view:show_server",
            reporter="systolic.serving.view:ServeReporter",
            words=("models",),
        ),
        usage="systolic.serving.command:SERVE_USAGE",
    ),
    "batch": Verb(
        "answers a file of requests in OpenAI's batch format, each line exactly once",
        VerbForm(
            function="systolic.serving.command:batch",
            view="systolic.serving.view:show_batch",
            reporter="systolic.serving.view:BatchReporter",
            words=("model", "source", "out"),
        ),
        usage="systolic.serving.command:BATCH_USAGE",
    ),
    "quantize": Verb(
        "writes a model's matrices in int8, int4, fp8 or nf4, and measures the loss",
        VerbForm(
            function="systolic.quantizing.command:quantize_model",
            view="systolic.quantizing.view:show",
            words=("path",),
        ),
        usage="systolic.quantizing.command:USAGE",
    ),
    "export": Verb(
        "writes a trained model for transformers, JAX or TensorFlow, or as a Bundle",
        VerbForm(
            function="systolic.formats.command:export",
            view="systolic.formats.command:show_export",
        ),
    ),
    "compare": Verb(
        "compares two models: size, quality, outputs, latency, forecast",
        VerbForm(
            function="systolic.comparing.command:compare_models",
            view="systolic.comparing.view:show",
            words=("a", "b"),
        ),
    ),
    "verify": Verb(
        "checks the files of a Bundle and replays its recorded inputs",
        VerbForm(
            function="systolic.inference.command:verify_bundle",
            view="systolic.inference.view:show_verified",
            words=("path",),
        ),
    ),
}


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
    return guarded(lambda: _verb(args))


def script() -> NoReturn:
    """The ``systolic`` command: ends this process with the exit code of :func:`main`."""
    take_huge_pages()
    remember_interrupts()
    leave(main())


def guarded(work: Callable[[], int | None]) -> int:
    """Runs ``work`` and returns its exit code; a user's mistake becomes one line on stderr."""
    try:
        return int(work() or 0)
    except SystolicError as error:
        print(f"systolic: {error.line}", file=sys.stderr)
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
    set_up_xla()
    if args[0] not in VERBS:
        raise OptionError(
            f"there is no verb {args[0]!r}{nearest(args[0], VERBS)}; systolic --help lists them"
        )
    rest = args[1:] if args[0] in OWN_BUCKETS else _copied(args[1:])
    verb = VERBS[args[0]]
    with reporting(StderrReporter()):
        return run_forms(args[0], verb.usage, verb.forms, rest)


def _copied(args: list[str]) -> list[str]:
    """Arguments with the copies of what they name in buckets, brought up to date; a run that is written is not brought here."""
    words = []
    for before, arg in zip(["", *args], args, strict=False):
        name, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
        written = {name, before} & WRITTEN
        for option in written - INTO_BUCKETS:
            check_local(option, value)
        if value.startswith(("s3://", "gs://")) and not written:
            from systolic.runs.remote.mirror import pull

            value = str(pull(value, lambda text: print(f"systolic: {text}", file=sys.stderr)))
        words.append(f"{name}{equals}{value}")
    return words
