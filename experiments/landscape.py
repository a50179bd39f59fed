"""Draws the gradient-weight landscapes of all objectives side by side. Seconds on any CPU.

python experiments/landscape.py --out=runs/landscape.png
"""

from absl import app, flags

from jaxrl_llm.analysis import landscape

_OUT = flags.DEFINE_string("out", "runs/landscape.png", "The picture.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    print(landscape.draw(_OUT.value))


if __name__ == "__main__":
    app.run(main)
