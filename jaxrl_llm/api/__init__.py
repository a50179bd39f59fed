"""How people come in: a run's policy read back, and the way experiment scripts start.

In come paths, flags and configurations; out go policies to sample from, runs to look at, and errors of one line. What
`import jaxrl_llm` offers is defined here; nothing else of the package imports this room.
"""
