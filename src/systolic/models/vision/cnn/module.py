"""The small convolutional network as a Flax NNX module."""

import jax
from flax import nnx

from systolic.job import Target
from systolic.models.layers import ConvNorm, Head, normalise, start
from systolic.models.vision.cnn.config import CNN


class CNNModule(nnx.Module):
    """Images to logits."""

    def __init__(self, config: CNN, rngs: nnx.Rngs, target: Target) -> None:
        convs, conv_in = [], config.pixels.channels
        for conv_out in config.channels:
            convs.append(ConvNorm(conv_in, conv_out, 3, rngs, target))
            convs.append(ConvNorm(conv_out, conv_out, 3, rngs, target))
            conv_in = conv_out
        self.convs = nnx.List(convs)
        self.head = Head(config.features, config.num_classes, target, deviation=0.01)
        self.config, self.target = config, target
        start(self, rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits [batch, num_classes] of image uint8[batch, size, size, channels]."""
        x = normalise(image, self.config.pixels, self.convs[0].kernel.dtype)
        x = self.target.constrain(x, "batch", None, None, None)
        for index, conv in enumerate(self.convs):
            x = jax.nn.relu(conv(x))
            if index % 2:
                x = nnx.max_pool(x, (2, 2), (2, 2), "SAME")
        return self.head(x.reshape(x.shape[0], -1))
