"""Keras 3 on JAX: ``compile`` and ``fit``."""

from typing import Any

import jax
import keras
import numpy as np
from contender import Log
from keras import layers, ops
from sizes import ADAMW, Language, Vision, Work


class Decoder(keras.Model):
    """A decoder in the shape of GPT-2."""

    def __init__(self, sizes: Language) -> None:
        super().__init__()
        d = sizes.d_model
        self.embedding = layers.Embedding(sizes.vocab, d)
        self.positions = layers.Embedding(sizes.sequence, d)
        self.blocks = [
            {
                "norm1": layers.LayerNormalization(epsilon=1e-5),
                "attention": layers.MultiHeadAttention(sizes.heads, d // sizes.heads),
                "norm2": layers.LayerNormalization(epsilon=1e-5),
                "up": layers.Dense(4 * d),
                "down": layers.Dense(d),
            }
            for _ in range(sizes.layers)
        ]
        self.norm = layers.LayerNormalization(epsilon=1e-5)

    def call(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.positions(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            y = block["norm1"](x)
            x = x + block["attention"](y, y, use_causal_mask=True)
            hidden = ops.gelu(block["up"](block["norm2"](x)), approximate=True)
            x = x + block["down"](hidden)
        return ops.matmul(self.norm(x), ops.transpose(self.embedding.embeddings))

    def load(self, weights: dict[str, np.ndarray], heads: int) -> None:
        """Systolic's first weights."""
        self.embedding.set_weights([weights["embedding"]])
        self.positions.set_weights([weights["positions"]])
        self.norm.set_weights([weights["norm/scale"], weights["norm/bias"]])
        d = weights["embedding"].shape[1]
        for index, block in enumerate(self.blocks):
            found = {
                name.removeprefix(f"blocks/{index}/"): value
                for name, value in weights.items()
                if name.startswith(f"blocks/{index}/")
            }
            for norm in ("norm1", "norm2"):
                block[norm].set_weights([found[f"{norm}/scale"], found[f"{norm}/bias"]])
            for dense in ("up", "down"):
                block[dense].set_weights([found[f"{dense}/kernel"], found[f"{dense}/bias"]])
            made: list[np.ndarray] = []
            kernels = np.split(found["qkv/kernel"], 3, axis=1)
            for kernel, bias in zip(kernels, np.split(found["qkv/bias"], 3), strict=True):
                made += [kernel.reshape(d, heads, -1), bias.reshape(heads, -1)]
            made += [found["out/kernel"].reshape(heads, -1, d), found["out/bias"]]
            block["attention"].set_weights(made)


def mean_loss(targets: Any, logits: Any) -> Any:
    """Cross-entropy over the targets that are not ignored."""
    seen = ops.cast(targets >= 0, "float32")
    nats = keras.losses.sparse_categorical_crossentropy(
        ops.maximum(targets, 0), logits, from_logits=True
    )
    return ops.sum(nats * seen) / ops.sum(seen)


def conv_norm(x: Any, made: int, kernel: int, stride: int, name: str) -> Any:
    """Convolution without bias, then batch norm; padded on both sides as PyTorch pads."""
    if stride > 1 and kernel > 1:
        x, padding = layers.ZeroPadding2D(kernel // 2)(x), "valid"
    else:
        padding = "same"
    x = layers.Conv2D(
        made, kernel, stride, padding=padding, use_bias=False, name=name.replace("/", ".")
    )(x)
    return layers.BatchNormalization(
        momentum=0.9, epsilon=1e-5, name=f"{name}/norm".replace("/", ".")
    )(x)


def resnet18(sizes: Vision, weights: dict[str, np.ndarray]) -> keras.Model:
    """The functional model with the first weights."""
    image = keras.Input((sizes.size, sizes.size, 3), dtype="uint8")
    x = layers.Rescaling(1 / 63.75, offset=-2.0)(image)
    x, given = ops.relu(conv_norm(x, sizes.width, 3, 1, "stem")), sizes.width
    for index in range(8):
        made, name = sizes.width * 2 ** (index // 2), f"blocks/{index}"
        stride = 2 if index in (2, 4, 6) else 1
        y = ops.relu(conv_norm(x, made, 3, stride, f"{name}/convs/0"))
        y = conv_norm(y, made, 3, 1, f"{name}/convs/1")
        if stride > 1 or given != made:
            x = conv_norm(x, made, 1, stride, f"{name}/shortcut")
        x, given = ops.relu(x + y), made
    logits = layers.Dense(sizes.classes, name="head")(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(image, logits)
    for layer in model.layers:
        name = layer.name.replace(".", "/")
        if isinstance(layer, layers.Conv2D):
            layer.set_weights([weights[f"{name}/kernel"]])
        elif isinstance(layer, layers.BatchNormalization):
            rest = layer.get_weights()[2:]
            layer.set_weights([weights[f"{name}/scale"], weights[f"{name}/bias"], *rest])
        elif name == "head":
            layer.set_weights([weights["head/kernel"], weights["head/bias"]])
    return model


class Noted(keras.callbacks.Callback):
    """Writes the record; Keras reports the mean loss since the epoch began."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log, self.total = log, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        total = float(logs["loss"]) * (batch + 1)
        self.log.step(total - self.total)
        self.total = total


def run(name: str, sizes: Any, work: Work, log: Log) -> None:
    """Trains until killed."""
    arrays = {key: value.reshape(-1, *value.shape[2:]) for key, value in work.batches().items()}
    weights = work.weights()
    if isinstance(sizes, Language):
        model: Any = Decoder(sizes)
        model(arrays["tokens"][:1])
        model.load(weights, sizes.heads)
        given, wanted, loss = arrays["tokens"], arrays["targets"], mean_loss
    else:
        model = resnet18(sizes, weights)
        given, wanted = arrays["image"], arrays["label"]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(
        ADAMW.learning_rate,
        weight_decay=ADAMW.weight_decay,
        beta_1=ADAMW.b1,
        beta_2=ADAMW.b2,
        epsilon=ADAMW.eps,
        global_clipnorm=ADAMW.clip,
    )
    vectors = [v for v in model.trainable_variables if _is_vector(v)]
    optimizer.exclude_from_weight_decay(var_list=vectors)
    model.compile(optimizer=optimizer, loss=loss)
    log.start(
        sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        {"keras": keras.__version__, "jax": jax.__version__},
    )
    model.fit(
        given,
        wanted,
        batch_size=sizes.batch,
        shuffle=False,
        epochs=1,
        verbose="auto",
        callbacks=[Noted(log)],
    )


def _is_vector(variable: Any) -> bool:
    # The biases of attention are [heads, head_dim].
    return len(variable.shape) < 2 or variable.path.endswith("bias")
