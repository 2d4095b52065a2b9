"""GGUF files of llama.cpp: reading and writing."""
