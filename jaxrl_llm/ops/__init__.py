"""Array operations that know neither models nor RL."""
