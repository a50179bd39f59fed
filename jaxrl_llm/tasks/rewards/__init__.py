"""How completions are judged.

`compose.Rewards` is what tasks use: a weighted sum of correctness, format and length. Correctness of mathematics is
`equivalence.equivalent` on the answer that `extract.final_answer` finds, run in a `pool` of processes with a deadline.
"""
