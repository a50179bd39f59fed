"""What happens to a batch: advantages, packing, mini-batches, optimizer steps.

In come a `TrainState` and one rollout's `Experience`; out go the next state and the numbers that tell of the updates. The loss
itself is in `objectives`; this room brings it the policy's log-probs and takes its gradient.
"""
