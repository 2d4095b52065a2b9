"""``systolic batch`` over models without weights: ``python -m tests.serving.offline.batch_child DIR IN OUT [options]``."""

import sys

from systolic.cli.main import main
from systolic.core.shutdown import remember_interrupts
from systolic.serving.offline import batch as batching
from systolic.serving.offline.batch import Answerer
from systolic.serving.request import ModelKind
from tests.serving.http.running import echo_model, toy_model


def opened(target, *_):
    if target.name in [kind.value for kind in ModelKind]:
        return toy_model(ModelKind(target.name), target.name)
    return echo_model("echo", step_seconds=0.002)


def answerer_of(target, settings):
    del settings
    return Answerer(
        model=target.name, version=1, weights="none", texts="", precision="f32", context=0
    )


if __name__ == "__main__":
    batching.open_served, batching.answerer_of = opened, answerer_of
    remember_interrupts()
    sys.exit(main(["batch", *sys.argv[1:]]))
