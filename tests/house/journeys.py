"""Five journeys through the package as lists of functions: how many files a reader enters on each.

A line is ``file:function`` below ``src/systolic``, in the order of the calls; a function is named in the body of one
before it, which :func:`broken` checks. ``> file:function`` is one that is reached through a table, a thread, another
process or a method of an abstract class. Whoever moves or renames a function changes its line; whoever shortens a
journey takes lines out.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.house.budget import functions
from tests.house.trees import tree

Function = ast.FunctionDef | ast.AsyncFunctionDef
CALLED_BY_PYTHON = ("__call__", "__post_init__", "__init__", "__aiter__", "__enter__")
"""Methods that no call names: their class is named, or ``for``, ``with`` and brackets call them."""
JOURNEYS: Mapping[str, tuple[str, ...]] = {
    "train to the update": (
        "cli/main.py:main",
        "cli/main.py:_verb",
        "cli/forms.py:run_forms",
        "cli/forms.py:_read",
        "cli/forms.py:planned_request",
        "cli/forms.py:_read_verb",
        "cli/parse.py:known",
        "recipes/__init__.py:find",
        "> recipes/lm.py:lm",
        "cli/forms.py:_answered",
        "> training/command.py:train",
        "training/session.py:start",
        "recipes/jobs/__init__.py:new_flags",
        "training/session.py:expected",
        "setup/__init__.py:set_up",
        "steps/step_functions.py:StepFunctions",
        "training/session.py:open_together",
        "runs/run.py:Run.create",
        "training/session.py:run_session",
        "training/trainer.py:Trainer",
        "training/trainer.py:Trainer.__post_init__",
        "setup/__init__.py:Setup.jitted_train",
        "steps/programs.py:jit_train",
        "training/trainer.py:Trainer.train",
        "training/distributed/consistency.py:require_same_job",
        "steps/programs.py:training",
        "training/trainer.py:Trainer._begin",
        "training/programs.py:CompiledStep.prepare",
        "training/trainer.py:Trainer._loop",
        "training/programs.py:CompiledStep.__call__",
        "steps/step_functions.py:StepFunctions.train",
        "steps/step_functions.py:StepFunctions.updates",
        "steps/step_functions.py:StepFunctions._rule",
        "steps/step_functions.py:build",
    ),
    "forecast to the printed time": (
        "cli/main.py:main",
        "cli/main.py:_verb",
        "cli/forms.py:run_forms",
        "cli/forms.py:_read",
        "cli/forms.py:request",
        "cli/forms.py:request_for",
        "cli/forms.py:_read_verb",
        "cli/parse.py:known",
        "cli/forms.py:_answered",
        "> forecasting/command.py:forecast",
        "forecasting/command.py:StepSettings.forecast",
        "forecasting/command.py:StepSettings._step",
        "forecasting/run.py:forecast_job",
        "compiling/compile.py:JobProgram",
        "forecasting/run.py:forecast_program",
        "compiling/compile.py:compile",
        "compiling/compile.py:_compile",
        "compiling/compile.py:_run_child",
        "> compiling/child.py:main",
        "compiling/child.py:_compile",
        "compiling/compile.py:JobProgram.trace",
        "compiling/tracing.py:trace_job",
        "steps/target.py:MeshTarget.of",
        "steps/step_functions.py:StepFunctions",
        "steps/programs.py:jit_train",
        "compiling/child.py:_answer",
        "forecasting/run.py:of_outcome",
        "forecasting/run.py:_compiled",
        "hlo/parse.py:parse",
        "sim/simulate.py:simulate",
        "forecasting/memory.py:memory_map",
        "forecasting/run.py:assemble",
        "forecasting/forecast.py:Forecast",
        "> forecasting/display/view.py:show",
        "forecasting/display/view.py:show_step",
        "forecasting/display/text.py:print_forecast",
        "forecasting/display/text.py:lines",
    ),
    "chat to a token": (
        "serving/http/app.py:RequestMiddleware.__call__",
        "serving/http/app.py:RequestMiddleware._answer",
        "> serving/http/app.py:_endpoint",
        "> serving/http/chat.py:chat_completions",
        "serving/http/protocol.py:read",
        "serving/http/state.py:ServerState.text",
        "serving/http/state.py:ServerState.use",
        "serving/registry.py:ModelRegistry.use",
        "serving/http/chat.py:chat_requests",
        "serving/http/chat.py:rendered",
        "serving/http/protocol.py:TextFields.text_request",
        "serving/text/request.py:TextRequest",
        "serving/http/responses.py:submit",
        "serving/text/engine.py:Engine.submit",
        "serving/text/request.py:Stream",
        "> serving/text/engine.py:Engine.step",
        "serving/text/engine.py:Engine._take",
        "serving/text/engine.py:Engine._admit",
        "serving/text/sequence.py:Sequence",
        "serving/text/scheduler.py:Scheduler.schedule",
        "serving/text/engine.py:Engine._run",
        "serving/text/runner.py:StepRunner.run",
        "serving/text/runner.py:StepRunner._call",
        "> serving/text/runner.py:Programs",
        "serving/text/engine.py:Engine._collect",
        "serving/text/runner.py:StepRunner.collect",
        "serving/text/sequence.py:Sequence.push",
        "serving/text/sequence.py:Sequence._put",
        "serving/text/request.py:Stream.put",
        "serving/text/request.py:Stream.__aiter__",
        "serving/http/chat.py:_events",
        "serving/http/responses.py:merged",
        "serving/http/chat.py:ChatWriter.events",
        "serving/http/responses.py:streamed",
        "> serving/http/state.py:RequestContext.send_answer",
    ),
    "import": (
        "cli/main.py:main",
        "cli/main.py:_verb",
        "cli/forms.py:run_forms",
        "cli/forms.py:_read",
        "cli/parse.py:parse",
        "cli/forms.py:_answered",
        "> formats/command.py:import_model",
        "formats/importing.py:import_source",
        "formats/registry.py:framework_format",
        "formats/importing.py:_sound",
        "formats/source.py:open_source",
        "> formats/hugging_face/reader.py:open_folder",
        "models/families.py:read_config",
        "models/families.py:family",
        "formats/hugging_face/reader.py:tensors_of",
        "runs/bundle/tensors.py:read_header",
        "models/mapping.py:Conversion.check",
        "formats/jobs.py:job_of",
        "formats/weights.py:planned",
        "formats/weights.py:shapes_of",
        "formats/weights.py:structure_of",
        "steps/network.py:ModelStructure",
        "runs/bundle/folder.py:draft",
        "formats/importing.py:_fill",
        "formats/weights.py:write_weights",
        "runs/bundle/folder.py:BundleDraft.weights",
        "formats/importing.py:_compared",
        "formats/hugging_face/reader.py:check",
        "formats/comparison.py:probe_of",
        "formats/hugging_face/reader.py:reference",
        "inference/model.py:answers",
        "inference/model.py:from_source",
        "inference/model.py:set_up_here",
        "setup/__init__.py:set_up",
        "runs/bundle/folder.py:BundleDraft.finish",
    ),
    "plan": (
        "cli/main.py:main",
        "cli/main.py:_verb",
        "cli/forms.py:run_forms",
        "cli/forms.py:_read",
        "cli/forms.py:request",
        "cli/forms.py:request_for",
        "cli/forms.py:_read_verb",
        "cli/parse.py:known",
        "cli/forms.py:_answered",
        "> planning/command.py:plan",
        "planning/command.py:goal_of",
        "planning/goal.py:Goal",
        "planning/analytic.py:facts_of",
        "planning/search.py:Search",
        "planning/search.py:Search.__post_init__",
        "planning/enumeration.py:Judge",
        "planning/command.py:searched",
        "planning/search.py:Search.run",
        "planning/enumeration.py:Survey.analyse_all",
        "planning/enumeration.py:Survey._possible",
        "planning/space.py:candidates",
        "planning/analytic.py:analyse",
        "planning/search.py:CompilingEvaluator",
        "planning/search.py:Search._compile",
        "planning/search.py:Search.answer",
        "planning/plan.py:Plan",
        "> planning/display/view.py:show",
        "planning/display/text.py:print_plan",
    ),
}
CHAT_CLASSES = (
    "serving/http/chat.py:ChatFields",
    "serving/http/state.py:RequestContext",
    "serving/text/request.py:TextRequest",
    "serving/text/request.py:SamplingParams",
    "serving/text/sequence.py:Sequence",
    "serving/text/request.py:Stream",
    "serving/text/request.py:TextOutput",
)
"""Classes that carry one chat request, from its body to its last token."""


BY_TABLE = "> "


def files(journey: Sequence[str]) -> list[str]:
    """Files that a journey enters, each once."""
    places = (place.removeprefix(BY_TABLE) for place in journey)
    return list(dict.fromkeys(place.partition(":")[0] for place in places))


def broken(journey: Sequence[str], package: Path) -> Iterator[str]:
    """Why a journey is not as the package is: functions that are gone, or that none before them names."""
    named: set[str] = set()
    for number, line in enumerate(journey):
        place = line.removeprefix(BY_TABLE)
        node = found(package, place)
        if node is None:
            yield f"{place} is not there"
            continue
        if number and place == line and _called(place) not in named:
            yield f"{place} is named by none of the functions before it"
        words = mentioned(node)
        named |= words | {
            aliases(package / place.partition(":")[0]).get(word, "") for word in words
        }


def found(package: Path, place: str) -> ast.AST | None:
    """The function or class of ``file:name``; None where it is not there."""
    file, _, name = place.partition(":")
    return definitions(package / file).get(name)


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """Functions and classes of a file by qualified name."""
    if not path.is_file():
        return {}
    whole = tree(path)
    classes = {node.name: node for node in ast.walk(whole) if isinstance(node, ast.ClassDef)}
    return {**classes, **dict(functions(whole))}


@cache
def aliases(path: Path) -> dict[str, str]:
    """Names under which a file imports others, to those."""
    return {
        name.asname: name.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname
    }


def _called(place: str) -> str:
    """The word by which a function is called."""
    *holder, name = place.partition(":")[2].split(".")
    return holder[-1] if name in CALLED_BY_PYTHON else name


def mentioned(node: ast.AST) -> set[str]:
    """Words that a function's body has: names, attributes, and those in its strings, which name modules."""
    words: set[str] = set()
    for inside in ast.walk(node):
        match inside:
            case ast.Name(id=word) | ast.Attribute(attr=word):
                words.add(word)
            case ast.alias(name=word, asname=other):
                words |= {word.rpartition(".")[2], other or ""}
            case ast.ClassDef(name=word) | ast.FunctionDef(name=word):
                words.add(word)
    return words
