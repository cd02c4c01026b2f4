"""From a config.json to the tree of weights it asks for: which model, which layout, which nesting.  Reads no weight."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
from jax.sharding import Mesh

from jaxserve.device.sharding import weight_format
from jaxserve.models import MODELS
from jaxserve.models.decoder import DTYPES, Decoder, Layout, Params
from jaxserve.quant.panels import Panels

Leaf = TypeVar("Leaf", bound=jax.Array | jax.ShapeDtypeStruct | Panels)


def make_model(hf: Mapping, *, dtype: str, tensor_parallel: int) -> Decoder:
    """The model a config.json describes.  Raises ValueError for what is not supported."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} of the weights must be one of {', '.join(DTYPES)}")
    names = hf.get("architectures")
    if not isinstance(names, list | tuple) or len(names) != 1:
        raise ValueError(f"config.json must name one architecture, got architectures={names!r}")
    if names[0] not in MODELS:
        raise ValueError(f"architecture {names[0]!r} is not supported; supported: {', '.join(sorted(MODELS))}")
    module, _, name = MODELS[names[0]].partition(":")
    family: type[Decoder] = getattr(importlib.import_module(module), name)
    return family(family.from_hf(hf).on_mesh(tensor_parallel), dtype)


def layout_for(mesh: Mesh) -> Layout:
    """Stacked on TPU, where layers are a scan; a list elsewhere (`decoder.for_layers` says why)."""
    return "stacked" if mesh.devices.flat[0].platform == "tpu" else "list"


def abstract_params(model: Decoder, mesh: Mesh, layout: Layout) -> Params:
    """The tree of weights as shapes, dtypes and places, without any weight."""
    layers = model.config.layers
    leaves: dict[str, jax.ShapeDtypeStruct | list[jax.ShapeDtypeStruct]] = {}
    for path, weight in model.weights().items():
        is_block = path.startswith("blocks/")
        is_stacked = is_block and layout == "stacked"
        shape, axes = ((layers, *weight.shape), ("layers", *weight.axes)) if is_stacked else (weight.shape, weight.axes)
        leaf = jax.ShapeDtypeStruct(shape, weight.dtype, sharding=weight_format(mesh, shape, axes))
        leaves[path] = [leaf] * layers if is_block and not is_stacked else leaf
    return to_tree(leaves, layers)


def to_tree(leaves: Mapping[str, Leaf | list[Leaf]], layers: int) -> Params:
    """{"outer/embed": a, "blocks/mlp/down": [a, ...] or a} -> the nested dict of `decoder`."""
    is_list = any(isinstance(leaf, list) for leaf in leaves.values())
    tree: Params = {"outer": {}, "blocks": [{} for _ in range(layers)] if is_list else {}}

    def insert(node: dict, keys: Sequence[str], leaf: Leaf) -> None:
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf

    for path, leaf in leaves.items():
        top, *keys = path.split("/")
        if isinstance(leaf, list):
            for node, one in zip(tree[top], leaf, strict=True):
                insert(node, keys, one)
        else:
            insert(tree[top], keys, leaf)
    return tree
