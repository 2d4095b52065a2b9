"""Tokens a second with and without proposals (``systolic serve --speculate``), on this CPU and forecast for a TPU.

    python benchmarks/serve/speculation.py measure [--streams 1 4] [--drafts 4] [--layers 30] [--answer 192] [--rounds 2]
    python benchmarks/serve/speculation.py forecast [llama-1b ...] [--slice v6e-1] [--texts 1 4 16] [--contexts 1024 8192]

``measure`` runs a decoder of the width of SmolLM2 135M in float32. No trained weights come with the repository, so the answers are
real texts that the engine is made to write: each token that a step chose is replaced by the text's. Steps, proposals and
acceptance are those of a model that writes exactly these texts greedily; what is not measured is how often one does.

| text | prompt | answer |
|---|---|---|
| code, edited | a function of Python's standard library, and a name to be changed | the function with the other name |
| code, continued | the beginning of a module of the library | what follows |
| json | rows of a table | the same as JSON objects |
| prose | the beginning of a description | what follows |

Both engines answer in turn in one process; the ratio is that of the medians. ``forecast`` compiles a step of one token a text, and
one that verifies the proposals, for a slice: simulated seconds, bytes, and the tokens that must be accepted for the same rate.
"""

import argparse
import inspect
import json
import random
import re
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]

CONTEXT, PROMPT = 1024, 640
VOCAB = 16_384


def functions():
    """Functions of the standard library, of 25 to 50 lines."""
    import argparse as arguments
    import configparser
    import difflib
    import zipfile

    found = []
    for module in (arguments, configparser, difflib, textwrap, zipfile, threading, inspect):
        for _, owner in inspect.getmembers(module, inspect.isclass):
            for _, function in inspect.getmembers(owner, inspect.isfunction):
                try:
                    source = textwrap.dedent(inspect.getsource(function))
                except OSError:
                    continue
                if 25 <= source.count("\n") <= 50:
                    found.append(source)
    return sorted(set(found))


def texts(kind, number):
    """Prompt and answer of a kind."""
    draw = random.Random(number)
    if kind == "code, edited":
        source = functions()[number * 7 % len(functions())]
        names = re.findall(r"\b[a-z_]{4,}\b", source)
        old = max(sorted(set(names)), key=names.count)
        return f"{source}\n# Rename {old} to renamed_{old}\n", source.replace(old, f"renamed_{old}")
    if kind == "code, continued":
        modules = [argparse, inspect, threading, textwrap, tempfile, re]
        source = inspect.getsource(modules[number % len(modules)])
        cut = len(source) // 3
        return source[cut - 2200 : cut], source[cut : cut + 4000]
    if kind == "json":
        keys = ["identifier", "first_name", "last_name", "department", "salary", "active"]
        rows = [
            [draw.randrange(10**5), draw.choice(("Ada", "Grace", "Alan", "Edsger")), draw.choice(("Hopper", "Turing", "Noether")),
             draw.choice(("research", "sales", "support")), draw.randrange(30, 200) * 1000, draw.random() < 0.5]
            for _ in range(12)
        ]  # fmt: skip
        table = "\n".join(",".join(map(str, row)) for row in rows)
        answer = json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2)
        return f"{','.join(keys)}\n{table}\n# as JSON\n", answer
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    prose = " ".join(line for line in page.splitlines() if line and line[0].isalpha())
    cut = 1200 + 400 * (number % 4)
    return prose[cut - 1000 : cut], prose[cut : cut + 1500]


KINDS = ("code, edited", "code, continued", "json", "prose")


def tokenizer(folder):
    """A byte-level BPE of the standard library's sources, in a folder."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    sources = sorted(Path(inspect.getsourcefile(inspect)).parent.glob("*.py"))
    # The texts to be answered are not among those that it learns from.
    several = [one for one in sources if one.stem not in ("argparse", "inspect", "threading")]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train([str(one) for one in several], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    from systolic.data.text.tokenizer import Tokenizer

    return Tokenizer(path=folder)


def opened(drafts, layers, streams):
    """An engine that proposes so many tokens, and the script that it is made to write."""
    import jax

    from systolic.data.text.documents import StandardLibrary
    from systolic.job import Batch, Job, Layout, Precision
    from systolic.models.decoder.config import Decoder
    from systolic.serving.text import opening
    from systolic.serving.text.runner import StepRunner
    from systolic.steps.step_functions import StepFunctions
    from systolic.steps.target import MeshTarget
    from systolic.steps.tasks import LanguageModel

    script = {}

    class Scripted(StepRunner):
        """Writes the texts of the script."""

        def chosen(self, call):
            tokens = super().chosen(call)
            length = call.shape.length if call.drafts else 1
            for place, sequence, _ in call.sequences:
                text = script[tuple(sequence.tokens[: sequence.prompt_tokens])]
                at = sequence.prompt_tokens + sequence.completion_tokens
                for step in range(length if call.drafts else 1):
                    if at + step < len(text):
                        tokens[place * length + step] = text[at + step]
            return tokens

    job = Job(
        name="serve",
        model=Decoder(layers=layers, d_model=576, d_ff=1536, heads=9, kv_heads=3, head_dim=64, vocab=VOCAB, tie_embeddings=True),
        task=LanguageModel(),
        data=StandardLibrary(sequence=128),
        steps=1,
        batch=Batch(total=1),
        precision=Precision.f32,
        layout=Layout(data=1, fsdp=1),
    )  # fmt: skip
    steps = StepFunctions(job, MeshTarget.of(job, "cpu", jax.devices()[:1]))
    params, rest = jax.jit(steps.network.init)(jax.random.key(0))
    sizes = opening.EngineSizes(
        rows=max(streams), context=CONTEXT, chunk=256, programs=(2, 1, 1), speculate=drafts
    )
    opening.StepRunner = Scripted
    engine = opening.open_engine(steps, params, rest, sizes)
    engine.start()
    return SimpleNamespace(engine=engine, script=script)


def answered(served, prompts, answers):
    """Seconds until several texts were answered together from their first tokens on, and their last outputs."""
    from systolic.serving.text.request import SamplingParams, TextRequest

    for prompt, answer in zip(prompts, answers, strict=True):
        served.script[tuple(prompt)] = [*prompt, *answer]
    requests = [
        TextRequest(tokens=prompt, max_tokens=len(answer), sampling=SamplingParams(temperature=0.0), ignore_ends=True)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]  # fmt: skip
    streams = [served.engine.submit(request) for request in requests]
    outputs = [list(stream) for stream in streams]
    for output, answer in zip(outputs, answers, strict=True):
        assert [token for part in output for token in part.token_ids] == answer
    last = [output[-1] for output in outputs]
    return max(o.seconds for o in last) - min(o.first_token_seconds for o in last), last


def measure(options):
    """A line for each kind of text and number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizer(Path(folder))
        served = {
            drafts: opened(drafts, options.layers, options.streams)
            for drafts in (0, options.drafts)
        }
        for kind in options.kinds:
            for streams in options.streams:
                pairs = [texts(kind, number) for number in range(streams)]
                prompts = [words.encode(prompt)[-PROMPT:] for prompt, _ in pairs]
                answers = [words.encode(answer)[: options.answer] for _, answer in pairs]
                size = sum(map(len, answers))
                seconds = {drafts: [] for drafts in served}
                for number in range(options.rounds + 1):
                    for drafts, one in served.items():
                        took, last = answered(one, prompts, answers)
                        if number:  # The first reads the prompts, which are in the cache then.
                            seconds[drafts].append(took)
                middle = {drafts: sorted(several)[len(several) // 2] for drafts, several in seconds.items()}  # fmt: skip
                accepted, verified = sum(o.accepted_tokens for o in last), sum(o.drafts for o in last)  # fmt: skip
                drafted = sum(o.drafted_tokens for o in last)
                row = {
                    "text": kind,
                    "streams": streams,
                    "tokens": size,
                    "plain_tokens_per_second": size / middle[0],
                    "tokens_per_second": size / middle[options.drafts],
                    "ratio": middle[0] / middle[options.drafts],
                    "tokens_per_step_of_a_text": size / (size - accepted),
                    "accepted_share": accepted / max(drafted, 1),
                    "verified_share": verified / (size - accepted),
                    "seconds": seconds,
                }
                print(json.dumps(row), flush=True)
        for one in served.values():
            one.engine.stop()


def forecast(options):
    """A line for each model, number of texts and context."""
    from benchmarks.serve.tpu_step import job_of
    from systolic.chips import slice
    from systolic.chips.flags import resolved
    from systolic.compiling import Compiler, PagedProgram
    from systolic.forecasting import forecast_program

    on = slice(options.slice)
    compiler = Compiler(flags=resolved("", on.chip)).quick()
    for name in options.models:
        job = job_of(name, 1, options.layers)
        for context in options.contexts:
            for rows in options.texts:
                pages = -(-context // 64)
                steps = {}
                for drafts in (0, options.drafts):
                    program = PagedProgram(job=job, rows=rows, pages=pages, num_pages=rows * pages + 1, page_size=64, drafts=drafts)  # fmt: skip
                    steps[drafts] = forecast_program(program, job.name, on, compiler=compiler)
                plain, verify = (steps[drafts].step_seconds for drafts in (0, options.drafts))
                facts = steps[options.drafts].answer.report.program
                row = {
                    "model": name,
                    "slice": options.slice,
                    "texts": rows,
                    "context": context,
                    "weight_bytes": facts.weight_bytes,
                    "cache_bytes": facts.cache_bytes,
                    "plain_seconds": plain,
                    "verify_seconds": verify,
                    "even_at_accepted": verify / plain - 1,
                }
                print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    forms = parser.add_subparsers(dest="form", required=True)
    here = forms.add_parser("measure")
    here.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    here.add_argument("--kinds", nargs="+", default=KINDS)
    here.add_argument("--layers", type=int, default=30)
    here.add_argument("--answer", type=int, default=192)
    here.add_argument("--rounds", type=int, default=2)
    there = forms.add_parser("forecast")
    there.add_argument("models", nargs="*", default=["llama-1b"])
    there.add_argument("--slice", default="v6e-1")
    there.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16])
    there.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    there.add_argument("--layers", type=int, default=0)
    for form in (here, there):
        form.add_argument("--drafts", type=int, default=4)
    options = parser.parse_args()
    (measure if options.form == "measure" else forecast)(options)


if __name__ == "__main__":
    main()
