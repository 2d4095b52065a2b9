"""Trains the tiny job under layouts on 8 virtual devices; prints one JSON object a layout."""

import json
import re
import sys
from dataclasses import replace

import jax

from systolic.job import Adapter, AdapterKind, ContextOrder, Job, Layout, Residual
from systolic.job.layout import Remat
from systolic.models.decoder.config import Dispatch, Mlp, NormKind
from systolic.models.decoder.options import Latent, Mup, RopeScaling, Router, Score, Stretching
from tests.steps import tiny

DENSE = {
    "data": Layout(data=8, fsdp=1),
    "fsdp": Layout(fsdp=8),
    "tensor": Layout(tensor=2, data=4, fsdp=1),
    "context": Layout(context=8, fsdp=1),
    "pipeline": Layout(pipeline=4, data=2, fsdp=1),
    "fsdp-tensor": Layout(fsdp=4, tensor=2),
    "fsdp-context": Layout(fsdp=4, context=2),
    "data-fsdp-tensor-accumulate": Layout(data=2, fsdp=2, tensor=2, accumulate=2),
    "fsdp-context-natural": Layout(fsdp=4, context=2, context_order=ContextOrder.natural),
    "pipeline-context": Layout(pipeline=2, fsdp=2, context=2),
    "pipeline-fsdp-tensor": Layout(pipeline=2, fsdp=2, tensor=2),
    "context-tensor-fsdp": Layout(context=2, tensor=2, fsdp=2),
    "tiles-context-tensor-fsdp": Layout(context=2, tensor=2, fsdp=2, loss_chunks=4),
    "tiles-accumulate": Layout(data=2, fsdp=2, tensor=2, accumulate=2, loss_chunks=8),
    "tiles-pipeline": Layout(pipeline=2, fsdp=2, tensor=2, loss_chunks=4, remat=Remat.full),
}
EMBED, WHOLE = Residual.embed, Residual.whole
SPLITS = {
    "tensor-whole": Layout(fsdp=4, tensor=2, residual=WHOLE, remat=Remat.full),
    "tensor-sequence": Layout(fsdp=4, tensor=2, remat=Remat.full),
    "tensor-embed": Layout(fsdp=4, tensor=2, residual=EMBED, remat=Remat.full),
    "tensor-embed-kept": Layout(data=4, fsdp=1, tensor=2, residual=EMBED, remat=Remat.save_names),
    "tensor-sequence-minimal": Layout(data=4, fsdp=1, tensor=2, remat=Remat.minimal),
    "context-tensor-embed": Layout(context=2, tensor=2, fsdp=2, residual=EMBED, loss_chunks=4),
    "pipeline-tensor-embed": Layout(pipeline=2, fsdp=2, tensor=2, residual=EMBED),
    "accumulate-embed": Layout(fsdp=4, tensor=2, accumulate=2, residual=EMBED),
}
DENSE |= SPLITS
SAVED = ("tensor-whole", "tensor-sequence", "tensor-embed", "ngrams-expert-context-tensor")
MIXTURE = {
    "expert": Layout(expert=4, fsdp=2),
    "expert-tensor": Layout(expert=2, fsdp=2, tensor=2),
    "expert-tensor-embed": Layout(expert=2, fsdp=2, tensor=2, residual=EMBED),
    "expert-pipeline": Layout(expert=2, pipeline=2, fsdp=2),
    "tiles-expert": Layout(expert=2, fsdp=2, tensor=2, loss_chunks=4),
    "expert-context": Layout(expert=2, fsdp=2, context=2),
}
NGRAMS = {"ngrams-context": Layout(fsdp=4, context=2)}
BOTH = {
    "ngrams-expert-context": Layout(expert=2, fsdp=2, context=2),
    "ngrams-expert-context-tensor": Layout(expert=2, fsdp=1, context=2, tensor=2, remat=Remat.full),
}
SWITCHED = {
    "switches-context": Layout(fsdp=2, context=2, tensor=2, loss_chunks=2),
    "switches-pipeline": Layout(fsdp=2, pipeline=2, tensor=2),
}
DROPLESS = {
    "dropless-expert-tensor": Layout(expert=2, fsdp=2, tensor=2),
    "dropless-expert-context": Layout(expert=4, context=2, fsdp=1),
}
LATENTS = {
    "latent-expert-tensor": Layout(expert=2, fsdp=2, tensor=2),
    "latent-context-tensor-embed": Layout(fsdp=2, context=2, tensor=2, residual=EMBED),
    "latent-pipeline": Layout(data=2, fsdp=1, pipeline=2, tensor=2),
}
BIASED = {
    "biased-context": Layout(fsdp=2, context=2, tensor=2, loss_chunks=2),
    "biased-pipeline-embed": Layout(fsdp=2, pipeline=2, tensor=2, residual=EMBED),
}
OFFSET = {"offset-tensor-embed": Layout(fsdp=4, tensor=2, residual=EMBED, remat=Remat.full)}
INTERLEAVED = {
    "interleaved-expert-tensor": Layout(expert=2, fsdp=2, tensor=2, remat=Remat.full),
    "interleaved-pipeline": Layout(expert=2, fsdp=1, pipeline=2, tensor=2),
}
EXPERTS = replace(
    tiny.MODEL,
    experts=4,
    d_ff=32,
    mlp=Mlp.swiglu_clamped,
    expert_bias=True,
    router=Router(logit_bias=True),
)
LOOKUPS = replace(
    tiny.MODEL, ngrams=3, ngram_rows=64, ngram_dim=8, tie_embeddings=False, mup=Mup(base_width=16)
)
SWITCHES = replace(
    tiny.MODEL, window=5, global_every=2, attention_cap=2.0, logit_cap=3.0, sinks=True
)
UNBOUNDED = replace(EXPERTS, dispatch=Dispatch.dropless)
LATENT = replace(
    tiny.MODEL,
    experts=4,
    d_ff=32,
    layers=3,
    kv_heads=4,
    dense_layers=1,
    dense_d_ff=48,
    shared_experts=2,
    latent=Latent(
        kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    ),
    router=Router(score=Score.sigmoid, groups=2, top_groups=1, bias=True),
)
EVERY_OTHER = replace(EXPERTS, mixture_every=2, dense_d_ff=48, shared_experts=1)
GPT2 = replace(
    tiny.MODEL,
    mlp=Mlp.gelu,
    mlp_bias=True,
    qkv_bias=True,
    out_bias=True,
    norm=NormKind.layer,
    learned_positions=32,
)
GEMMA = replace(
    tiny.MODEL,
    norm=NormKind.rms_offset,
    post_norms=True,
    qk_norm=True,
    mup=Mup(base_width=8),
    query_pre_attn_scalar=5.0,
    rope_scaling=RopeScaling(kind=Stretching.linear, factor=2.0),
)
MODELS = (
    (DENSE, tiny.MODEL),
    (MIXTURE, EXPERTS),
    (NGRAMS, LOOKUPS),
    (BOTH, replace(EXPERTS, ngrams=3, ngram_rows=64, ngram_dim=8)),
    (SWITCHED, SWITCHES),
    (DROPLESS, UNBOUNDED),
    (LATENTS, LATENT),
    (INTERLEAVED, EVERY_OTHER),
    (BIASED, GPT2),
    (OFFSET, GEMMA),
)
LORA = Adapter(kind=AdapterKind.lora, rank=4, alpha=8.0)
ADAPTED = {
    "lora-tensor": Layout(fsdp=4, tensor=2),
    "lora-context": Layout(fsdp=4, context=2),
    "lora-context-tensor-embed": Layout(fsdp=2, context=2, tensor=2, residual=EMBED),
    "lora-pipeline": Layout(fsdp=2, pipeline=2, tensor=2, remat=Remat.full),
    "qlora-context-tensor": Layout(fsdp=2, context=2, tensor=2),
    "qlora-pipeline": Layout(fsdp=2, pipeline=2, tensor=2, remat=Remat.full),
}
LAYOUTS = {name: layout for layouts, _ in MODELS for name, layout in layouts.items()}
LAYOUTS |= ADAPTED


def job_of(name: str, layout: Layout | None = None) -> Job:
    """The job that a layout is for, with it or with another one."""
    model = next((model for layouts, model in MODELS if name in layouts), tiny.MODEL)
    adapter = Adapter()
    if name in ADAPTED:
        adapter = replace(LORA, kind=AdapterKind(name.partition("-")[0]))
    return tiny.job(layout=layout or LAYOUTS[name], model=model, adapter=adapter)


def saved_inputs(program: str, rows: int) -> list[str]:
    """Shapes f32[layers, rows, ...] of the layer inputs that a device keeps, in the text of the step that it runs."""
    layers, width = tiny.MODEL.layers, tiny.MODEL.d_model
    ways = {width, width // 2}
    found = re.findall(rf"f32\[{layers},({rows},\d+,\d+)\]", program)
    return sorted({dims for dims in found if int(dims.split(",")[-1]) in ways})


def main(names: list[str]) -> None:
    # The numbers are the same, in less than half the time: each layout is compiled for 3 steps.
    jax.config.update("jax_disable_most_optimizations", True)
    for name in names:
        steps = tiny.steps(job_of(name), 8)
        trainer = tiny.trainer(steps)
        losses, state = trainer.run()
        rows = steps.batch_size // steps.job.layout.batch_ways
        moments = state.optimizer[0].mu
        largest = "blocks/mlp/up" + ("/lora_b" if name in ADAPTED else "")
        print(
            json.dumps(
                {
                    "name": name,
                    "losses": losses,
                    "gradients": trainer.gradients() if name in SPLITS else None,
                    "inputs": saved_inputs(trainer.program(), rows) if name in SAVED else None,
                    "params": {path: str(p.sharding.spec) for path, p in state.params.items()},
                    "moments": {path: str(m.sharding.spec) for path, m in moments.items()},
                    "shard": state.params[largest].addressable_shards[0].data.size
                    / state.params[largest].size,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
