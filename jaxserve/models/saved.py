"""A model's weights in the engine's own layout: saved once, loaded without any conversion.

Another layout of the layers or another dtype than the saved one works too, by one pass on the devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from checkpoints.orbax_store import OrbaxStore, save
from jaxserve.device.sharding import TENSOR_AXIS, weight_format
from jaxserve.models.decoder import Decoder, Layout, Params, Weight
from jaxserve.models.tree import abstract_params, layout_for, make_model, to_tree


def save_params(folder: Path, model: Decoder, params: Params, *, config: Mapping, name: str) -> None:
    """Into a folder of `checkpoints.orbax_store.new_folder`.  `config`: the config.json the model was made from."""
    facts = {
        "name": name,
        "dtype": model.dtype,
        "layout": "list" if isinstance(params["blocks"], list) else "stacked",
        "kv_repeat": model.config.kv_repeat,
    }
    save(folder, _with_string_keys(params), config=config, facts=facts)


def load_saved(store: OrbaxStore, *, dtype: str, mesh: Mesh, layout: Layout | None = None) -> tuple[Decoder, Params]:
    """`layout`: None = what suits the mesh's devices.

    Raises ValueError when the mesh needs kv heads repeated that were saved once."""
    model = make_model(store.config, dtype=dtype, tensor_parallel=mesh.shape[TENSOR_AXIS])
    saved: Layout = store.facts["layout"]
    if store.facts["kv_repeat"] != model.config.kv_repeat:
        raise ValueError(
            f"{store.path} holds each of its {model.config.kv_heads} kv heads {store.facts['kv_repeat']} times,"
            f" tensor_parallel={mesh.shape[TENSOR_AXIS]} needs them {model.config.kv_repeat} times:"
            " load the files it was converted from instead"
        )
    weights, layers = model.weights(), model.config.layers
    target = abstract_params(model, mesh, saved)
    params = store.restore(_with_string_keys(target))
    if saved == "list":
        params["blocks"] = [params["blocks"][str(i)] for i in range(layers)]
    if saved == (layout or layout_for(mesh)):
        return model, jax.tree.map(_reordered, params, target)
    return model, _other_layout(params, weights, mesh, layers)


def _reordered(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Orbax restores the usual order of dims; where the device wants another one, the weight is copied into it."""
    return leaf if wanted.format.layout is None else jax.device_put(leaf, wanted.format)


def _other_layout(params: Params, weights: Mapping[str, Weight], mesh: Mesh, layers: int) -> Params:
    """list -> stacked or stacked -> list, one weight at a time, each source let go before the next."""
    leaves: dict[str, jax.Array | list[jax.Array]] = {}
    was_list = isinstance(params["blocks"], list)
    for path, weight in weights.items():
        top, *keys, last = path.split("/")
        nodes = params[top] if isinstance(params[top], list) else [params[top]]
        for key in keys:
            nodes = [node[key] for node in nodes]
        found = [node.pop(last) for node in nodes]
        if top == "outer":
            leaves[path] = found[0]
        elif was_list:
            where = weight_format(mesh, (layers, *weight.shape), ("layers", *weight.axes))
            leaves[path] = jax.device_put(jnp.stack(found), where)
        else:
            where = weight_format(mesh, weight.shape, weight.axes)
            leaves[path] = [jax.device_put(found[0][layer], where) for layer in range(layers)]
        jax.block_until_ready(leaves[path])
    return to_tree(leaves, layers)


def _with_string_keys(tree: Params) -> dict:
    """Orbax names files by keys: a list of layers becomes {"0": ..., "1": ...}."""
    if isinstance(tree["blocks"], list):
        return tree | {"blocks": {str(i): block for i, block in enumerate(tree["blocks"])}}
    return tree
