"""Hugging Face checkpoints in and out: configurations, names of tensors, weights, tokenizers.

In comes a folder, a hub id or a GGUF file; out go a `ModelConfig`, parameters that lie on a mesh, and a tokenizer, or the same
written so that transformers loads it. The decoder itself is in `models` and knows none of these formats.
"""
