"""What makes a batch: the policy samples prompts, rewards score its completions, flat groups are replaced.

In come parameters, a task and a position in its data; out goes `Experience`, one rollout's tokens, behaviour log-probs and
rewards, and from it a `Batch` without advantages. Evaluation and generation are the same without a batch.
"""
