"""The time no step can beat: what it must read, compute and send, over what the chip's vendor publishes.

Lower bounds, loose for float32 (the flops are bfloat16's).  Weights are read once a step, keys and values once a row;
links are counted as if all of a chip's were busy, over a ring; nothing else is counted.  No measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.catalogue import Catalogue
from jaxserve.chips import Chip, hlo
from jaxserve.device.steps import Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of one step, on each device, that each of three resources takes at least."""

    step: str
    length: int  # tokens that each row has seen by its end
    memory: float
    flops: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.flops, self.links)

    @property
    def bound(self) -> str:
        return max(("memory", self.memory), ("flops", self.flops), ("links", self.links), key=lambda pair: pair[1])[0]


def roofline(
    step: str, *, rows: int, queries: int, length: int, catalogue: Catalogue, windows: Sequence[int], params: Params,
    collectives: Sequence[hlo.Collective], chip: Chip,
) -> Roofline:  # fmt: skip
    """A step of `rows` rows with `queries` new tokens each, the last of them at position `length` - 1."""
    shape, devices = catalogue.model.shape, catalogue.mesh.size
    weights, head = _matrix_bytes(params)
    itemsize = jnp.dtype(catalogue.model.dtype).itemsize
    fetched = sum(min(length, window + queries - 1) if window else length for window in windows)  # a row, all layers
    kv_bytes = rows * fetched / shape.layers * catalogue.page_bytes * devices / catalogue.scheduler.page_size
    # Two flops to a weight and token, the head only for each row's last; scores, and the values they weigh.
    flops = 2 * rows * (queries * weights + head) / itemsize
    flops += 4 * rows * _seen(queries, length, windows) * shape.heads * shape.head_dim
    each = chip.devices / devices  # a device's share of the work, over a device's share of its chip
    return Roofline(
        step=step,
        length=length,
        memory=(weights + head + kv_bytes) * each / chip.memory_bandwidth,
        flops=flops * each / chip.flops,
        links=sent_bytes(collectives, devices=devices, layers=shape.layers) * chip.devices / chip.link_bandwidth,
    )


def _seen(queries: int, length: int, windows: Sequence[int]) -> int:
    """Positions that a row's queries see, one after the other, over all layers."""
    lengths = range(length - queries + 1, length + 1)
    return sum(min(seen, window or seen) for window in windows for seen in lengths)


def sent_bytes(collectives: Sequence[hlo.Collective], *, devices: int, layers: int) -> float:
    """By each device, in a ring (Patarasuk and Yuan 2009); what stands in the loop over the layers counts for each."""
    share = (devices - 1) / devices
    factor = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": devices - 1, "all-to-all": share}
    return sum(factor.get(each.kind, 1.0) * each.nbytes * (layers if each.is_in_loop else 1) for each in collectives)


def _matrix_bytes(params: Params) -> tuple[int, int]:
    """Bytes over all devices that a step reads: of the blocks' weights, of the head.  An embedding that is not the head
    is read a few rows at a time."""
    blocks = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["blocks"]))
    head = params["outer"].get("head", params["outer"]["embed"])
    return blocks, math.prod(head.shape) * head.dtype.itemsize
