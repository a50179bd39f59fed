"""Published ceilings of TPU chips, and the devices of a named topology (`v5p:4x4x4`) without any TPU at hand."""

import dataclasses
import os
import warnings
from typing import Any

from jaxrl_llm import schema


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, as Google Cloud's TPU documentation states it (docs.cloud.google.com/tpu/docs/tpu7x and siblings).

    Attributes:
      hbm: bytes.
      flops: bfloat16 FLOP/s.
      hbm_bandwidth: bytes/s.
      link_bandwidth: bytes/s that leave the chip over all its links (half of the bidirectional figure).
      cores: devices that JAX shows per chip.
    """

    hbm: float
    flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    cores: int = 1


CHIPS = {
    "v5e": Chip(hbm=16 * 2**30, flops=197e12, hbm_bandwidth=819e9, link_bandwidth=200e9),
    "v5p": Chip(hbm=95 * 2**30, flops=459e12, hbm_bandwidth=2765e9, link_bandwidth=600e9),
    "v6e": Chip(hbm=32 * 2**30, flops=918e12, hbm_bandwidth=1638e9, link_bandwidth=400e9),
    "tpu7x": Chip(hbm=192 * 2**30, flops=2307e12, hbm_bandwidth=7380e9, link_bandwidth=600e9, cores=2),
}


def chip(topology: str) -> Chip:
    """The chip of a topology such as "v5p:4x4x4".

    Raises:
      ValueError: an unknown chip, or a name without a shape.
    """
    name, _, shape = topology.partition(":")
    schema.choose(CHIPS, name, "chip in --topology")
    sizes = shape.split("x")
    schema.require(all(s.isdecimal() and int(s) > 0 for s in sizes), "--topology", topology, "like v5p:4x4x4")
    return CHIPS[name]


def devices(topology: str) -> list[Any]:
    """Abstract devices of the topology, for ahead-of-time compilation with libtpu on a machine without TPUs.

    Raises:
      ValueError: libtpu is not installed, or it does not know the topology.
    """
    chip(topology)
    # libtpu looks for the metadata server of a TPU machine unless it is told not to.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", topology.partition(":")[0])
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        import libtpu  # noqa: F401
    except ImportError:
        raise ValueError("planning needs libtpu: pip install 'jaxrl_llm[plan]' (any Linux machine will do)") from None
    from jax.experimental import topologies

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # libtpu raises its own status types
        raise ValueError(f"--topology is {topology!r}; libtpu refuses it: {error}") from None
