"""Steps of ``systolic serve`` on an H100, forecast by XLA's GPU compiler, beside those that were timed on one.

``python benchmarks/gpu/decode.py`` needs the extra ``gpu-forecast`` and no GPU. The times are of
``benchmarks/results/2026-11-22-serve-gpu.json``: a decoder of the shape of Llama 3.2 1B, 512 tokens behind each text, the
choice of tokens and the host's gaps included, which a forecast leaves out.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
from decode_rate import SHAPE
from records import RESULTS

from systolic.compiling.gpu_compiler import compiler
from systolic.forecasting.command import forecast_server

TIMED = RESULTS / "2026-11-22-serve-gpu.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SHAPE["d_model"],
    "intermediate_size": SHAPE["d_ff"],
    "num_hidden_layers": SHAPE["layers"],
    "num_attention_heads": SHAPE["heads"],
    "num_key_value_heads": SHAPE["kv_heads"],
    "head_dim": SHAPE["head_dim"],
    "vocab_size": SHAPE["vocab"],
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    if compiler() is None:
        raise SystemExit(
            "the extra gpu-forecast is not installed: pip install 'systolic[gpu-forecast]'"
        )
    timed = json.loads(TIMED.read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        server = forecast_server(folder, on="h100", prompt_tokens=512, output_tokens=128)
    steps = {step.rows: step for step in server.steps if step.tokens == 1}
    print(
        "| texts | a step timed, ms | the engine's step, prompts among them, ms | forecast, ms | error |"
    )
    print("|---|---|---|---|---|")
    engine = {row["streams"]: row["step_seconds"] for row in timed["engine"]["rows"]}
    for rows in (1, 16, 64, 256):
        seconds, own = timed["ours"][f"ours decode {rows}"]["seconds"], steps[rows].seconds
        print(
            f"| {rows} | {seconds * 1e3:.2f} | {engine[rows] * 1e3:.2f} | {own * 1e3:.2f} | {own / seconds - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
