"""The behaviour policy: an in-process sampler that records exactly which distribution it drew from."""
