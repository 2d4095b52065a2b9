"""LiteRT (.tflite): conversion, quantization, running, and what the Edge TPU takes of a file."""
