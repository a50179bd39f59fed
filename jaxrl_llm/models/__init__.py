"""The policy: one decoder, its configuration, its cache, and its Hugging Face checkpoints. Models know no RL."""
