"""Draws the gradient-weight landscapes of all objectives side by side. Seconds on any CPU.

python experiments/landscape.py --out=runs/landscape.png
"""

from absl import flags

from jaxrl_llm.analysis import landscape
from jaxrl_llm.api import command_line

_OUT = flags.DEFINE_string("out", "runs/landscape.png", "The picture.")


def main():
    print(landscape.draw(_OUT.value))


if __name__ == "__main__":
    command_line.run(main)
