"""Will it fit? Compiles a configuration's training step and sampler for a TPU topology, on a machine without any TPU.

    pip install 'jaxrl_llm[plan]'
    python experiments/plan_pod.py --config=configs/qwen3_4b_dapo.py --topology=v5p:4x4x4

Nothing is downloaded, allocated or run: parameters and batches are shapes, libtpu compiles the real programs, and the table
says what a chip would hold, compute and send. Topologies: v5e, v5p, v6e, tpu7x with a shape, such as v6e:16x16. Minutes per program;
--only takes one.
"""

import time

from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table

from jaxrl_llm.api import command_line
from jaxrl_llm.config import RunConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.plan import chips, programs, report

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment, a file under configs/.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:4x4x4", "Chip and shape of the slice.")
_ONLY = flags.DEFINE_enum("only", None, ["training", "decoding"], "One of the two programs.")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "Print the table for a document.")


def main():
    console = Console()
    run = RunConfig.read(_CONFIG.value)
    chip, devices = chips.chip(_TOPOLOGY.value), chips.devices(_TOPOLOGY.value)
    mesh = sharding.create_mesh(run.mesh, devices)
    done = []
    for name, compile_program in (("training", programs.training_program), ("decoding", programs.decoding_program)):
        if _ONLY.value not in (None, name):
            continue
        start = time.monotonic()
        with console.status(f"compiling the {name} step for {len(devices)} devices of {_TOPOLOGY.value} ..."):
            done.append(compile_program(run, mesh))
        console.print(f"{name} step: compiled in {time.monotonic() - start:.0f} s; {report.advice(done[-1], chip)}")
    header, *rows = report.table(done, chip)
    if _MARKDOWN.value:
        lines = [header, ("---",) * len(header), *rows]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    mesh_sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    table = Table(title=f"{run.model.source or 'the configured architecture'} on {_TOPOLOGY.value} ({mesh_sizes})")
    for i, title in enumerate(header):
        table.add_column(title, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    command_line.run(main)
