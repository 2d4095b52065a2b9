"""The web server of trained models: OpenAI's API, the Open Inference Protocol, TensorFlow Serving's REST."""
