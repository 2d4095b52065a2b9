"""Folders that transformers writes: small models with random weights and a real tokenizer."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "the capital of France is Paris",
    "the capital of Italy is Rome, the capital of Spain is Madrid",
    "a question, an answer: yes or no",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|stop|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer(start: bool = False) -> Any:
    """Byte-level BPE as transformers saves it; with ``start`` its post-processor puts <|begin|> before a text."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|begin|>", "<|start|>", "<|stop|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    if start:
        made.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    )


def llama(**changes: Any) -> Any:
    """A small Llama of transformers."""
    sizes = {
        "vocab_size": 304,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = transformers.LlamaConfig(**{**sizes, **changes})
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def folder(
    path: Path,
    model: Any = None,
    *,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
    start: bool = False,
) -> Path:
    """A folder of a model and a tokenizer, as transformers saves them."""
    made = llama() if model is None else model
    made.to(dtype).save_pretrained(path, max_shard_size=shard)
    tokenizer(start).save_pretrained(path)
    return path


def logits(path: Path, tokens: Any) -> Any:
    """Logits that transformers computes in float32 from a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens), use_cache=False).logits.numpy()
