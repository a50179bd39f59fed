"""The loop that joins the rooms: warm start, then rollout after rollout, with evaluation and checkpoints between.

In comes a checked `RunConfig`; out goes a run directory. What a rollout does is in `experience`, what an update does in
`learning`; here is only the order of things, and when to stop.
"""
