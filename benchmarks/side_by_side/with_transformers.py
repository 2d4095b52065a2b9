"""Hugging Face: its Trainer on its GPT-2, and on the plain PyTorch ResNet."""

from typing import Any

import accelerate
import torch
import transformers
from contender import Log
from sizes import ADAMW, BATCHES, IGNORED, Language, Work
from torch_models import put
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from with_torch import count, make


class Examples(torch.utils.data.Dataset):
    """Rows of the batches, one after the other."""

    def __init__(self, arrays: dict[str, torch.Tensor]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: array[index] for name, array in self.arrays.items()}


class Classifier(torch.nn.Module):
    """The ResNet with the signature that the Trainer calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(image, labels)}


def gpt2(sizes: Language, work: Work) -> torch.nn.Module:
    """Transformers' GPT-2 with the first weights; its Conv1D kernels lie as Systolic's do."""
    config = GPT2Config(
        vocab_size=sizes.vocab,
        n_positions=sizes.sequence,
        n_embd=sizes.d_model,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model, weights = GPT2LMHeadModel(config), work.weights()
    trunk = model.transformer
    put(trunk.wte.weight, weights["embedding"])
    put(trunk.wpe.weight, weights["positions"])
    pairs = [(trunk.ln_f, "norm")]
    for index, block in enumerate(trunk.h):
        prefix = f"blocks/{index}"
        pairs += [(block.ln_1, f"{prefix}/norm1"), (block.ln_2, f"{prefix}/norm2")]
        pairs += [(block.attn.c_attn, f"{prefix}/qkv"), (block.attn.c_proj, f"{prefix}/out")]
        pairs += [(block.mlp.c_fc, f"{prefix}/up"), (block.mlp.c_proj, f"{prefix}/down")]
    for module, name in pairs:
        kernel = f"{name}/kernel" if f"{name}/kernel" in weights else f"{name}/scale"
        put(module.weight, weights[kernel])
        put(module.bias, weights[f"{name}/bias"])
    return model


class Recorded(Trainer):
    """The Trainer; the losses are noted when their step has ended."""

    last = 0.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.last = float(loss)
        return loss


class Noted(transformers.TrainerCallback):
    """Writes the record."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log.step(self.trainer.last)


def run(name: str, sizes: Any, work: Work, log: Log) -> None:
    """Trains until killed."""
    torch.set_num_threads(2)
    arrays = {key: torch.from_numpy(value).flatten(0, 1) for key, value in work.batches().items()}
    if isinstance(sizes, Language):
        model = gpt2(sizes, work)
        # The model shifts the labels itself, and so ignores a row's last prediction, as the others do.
        # The first label is no target; unless it is ignored too, the Trainer counts it in the mean.
        labels = arrays["tokens"].long()
        labels[:, 0] = IGNORED
        data = {"input_ids": arrays["tokens"].long(), "labels": labels}
    else:
        model = Classifier(make(sizes, work)[0])
        data = {"image": arrays["image"], "labels": arrays["label"].long()}
    arguments = TrainingArguments(
        output_dir=str(work.folder / name),
        per_device_train_batch_size=sizes.batch,
        max_steps=BATCHES,
        learning_rate=ADAMW.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=ADAMW.weight_decay,
        adam_beta1=ADAMW.b1,
        adam_beta2=ADAMW.b2,
        adam_epsilon=ADAMW.eps,
        max_grad_norm=ADAMW.clip,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_num_workers=0,
        train_sampling_strategy="sequential",
    )
    noted = Noted(log)
    trainer = Recorded(model=model, args=arguments, train_dataset=Examples(data), callbacks=[noted])
    noted.trainer = trainer
    modules = (torch, transformers, accelerate)
    log.start(count(model), {module.__name__: module.__version__ for module in modules})
    trainer.train()
