"""jaxrl_llm: trust regions for reinforcement learning of large language models, in JAX."""

__version__ = "0.1.0"
