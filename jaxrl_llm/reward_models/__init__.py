"""Reward models: learned from comparisons, then frozen to judge a policy.

In come pairs of dialogues, or a checkpoint with a scalar head; out goes a task whose completions the model scores. The policy
that is judged is trained elsewhere, by the same loop as with any other task.
"""
