"""SavedModels of TensorFlow: reading through tf2jax and writing through jax2tf."""
