"""Files -> a model and its weights on the devices.  The only way in: `load_params`.

Strict: every tensor of the files has a place and every weight has its tensors, or one ValueError lists what is wrong.
Lean: one weight is built at a time, in the target dtype, placed and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints import Checkpoint, ModelFiles, open_checkpoint
from checkpoints.orbax_store import OrbaxStore
from jaxserve.device.sharding import TENSOR_AXIS, weight_format
from jaxserve.models.decoder import Decoder, Layout, Params, Weight
from jaxserve.models.names import Part, Parts
from jaxserve.models.saved import load_saved
from jaxserve.models.tree import layout_for, make_model, to_tree
from jaxserve.quant.panels import Panels, pack

MAX_LISTED = 12  # names in an error
Progress = Callable[[int, int], None]  # (bytes placed, bytes in all)


def load_params(
    files: ModelFiles, *, dtype: str, mesh: Mesh, layout: Layout | None = None, progress: Progress | None = None
) -> tuple[Decoder, Params]:
    """A model of any kind of files.  `dtype`: float32 or bfloat16; `layout`: None = what suits the mesh's devices.

    Raises ValueError saying what of the files or of the mesh does not fit.
    """
    if files.kind == "orbax":
        return load_saved(OrbaxStore(files.path), dtype=dtype, mesh=mesh, layout=layout)
    return load_model(open_checkpoint(files), dtype=dtype, mesh=mesh, layout=layout, progress=progress)


def pack_matrices(model: Decoder, params: Params) -> Params:
    """The same weights for the native product: every matrix in `Panels`, all layers in one tree.  Takes the blocks of
    `params` (a list) apart as it goes: no more than one weight is there twice."""
    axes = dict(model.matrices())
    leaves: dict[str, jax.Array | Panels] = {}
    for path in model.weights():
        top, *keys = path.split("/")
        nodes = params[top] if top == "blocks" else [params[top]]
        weights = [_pop(node, keys) for node in nodes]
        if path in axes:
            leaves[path] = pack(weights, input_axis=axes[path])
        else:
            leaves[path] = jnp.stack(weights) if top == "blocks" else weights[0]
    return to_tree(leaves, model.config.layers)


def _pop(node: Params, keys: Sequence[str]) -> jax.Array:
    for key in keys[:-1]:
        node = node[key]
    return node.pop(keys[-1])


def load_model(
    checkpoint: Checkpoint, *, dtype: str, mesh: Mesh, layout: Layout | None = None, progress: Progress | None = None
) -> tuple[Decoder, Params]:
    """A model from tensors in Hugging Face's names."""
    model = make_model(checkpoint.config, dtype=dtype, tensor_parallel=mesh.shape[TENSOR_AXIS])
    weights, parts = model.weights(), model.hf_names(model.config)
    assert weights.keys() == parts.keys(), sorted(weights.keys() ^ parts.keys())
    check_tensors(checkpoint, parts, model)
    every_layer = range(model.config.layers)
    total = sum(weight.nbytes * len(model.copies(path)) for path, weight in weights.items())
    leaves: dict[str, jax.Array | list[jax.Array]] = {}
    done = 0
    # Largest first: the one moment when a weight is both on the host and on the device comes while little else is.
    for path in sorted(weights, key=lambda path: -weights[path].nbytes):
        weight = weights[path]

        def place(layers: Sequence[int | None], *, is_stacked: bool = False, path=path, weight=weight) -> jax.Array:
            host = _build(checkpoint, parts[path], weight, layers)
            return put_on_mesh(host if is_stacked else host[0], weight, mesh, is_stacked=is_stacked)

        if path.startswith("outer/"):
            leaves[path] = place([None])
        elif (layout or layout_for(mesh)) == "stacked":
            leaves[path] = place(every_layer, is_stacked=True)
        else:
            leaves[path] = [place([layer]) for layer in every_layer]
        done += weight.nbytes * len(model.copies(path))
        if progress:
            progress(done, total)
    return model, to_tree(leaves, model.config.layers)


def check_tensors(checkpoint: Checkpoint, parts: Mapping[str, Parts], model: Decoder) -> None:
    """Raises one ValueError that lists every missing, unexpected and misshapen tensor."""
    wanted: dict[str, Part] = {}
    for path, pieces in parts.items():
        for part in pieces:
            wanted.update({part.name.format(layer=layer): part for layer in model.copies(path)})
    held = set(checkpoint.names())
    missing = sorted(wanted.keys() - held)
    unexpected = sorted(name for name in held - wanted.keys() if not _is_redundant(name, model))
    misshapen = [
        f"{name} is {tuple(checkpoint.tensor(name).shape)} instead of {wanted[name].shape}"
        for name in sorted(wanted.keys() & held)
        if tuple(checkpoint.tensor(name).shape) != wanted[name].shape
    ]
    found = [
        f"{len(names)} {what}: {', '.join(names[:MAX_LISTED])}" + (", ..." if len(names) > MAX_LISTED else "")
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of a wrong shape", misshapen))
        if names
    ]
    if found:
        raise ValueError(f"the tensors do not fit {model.config.architecture}: " + "; ".join(found))


def put_on_mesh(host: np.ndarray, weight: Weight, mesh: Mesh, *, is_stacked: bool) -> jax.Array:
    """Waits until the weight is there, so that the caller's memory can go."""
    axes = ("layers", *weight.axes) if is_stacked else weight.axes
    return jax.block_until_ready(jax.device_put(host, weight_format(mesh, host.shape, axes)))


def _build(checkpoint: Checkpoint, parts: Parts, weight: Weight, layers: Sequence[int | None]) -> np.ndarray:
    """One weight of these layers, on the host.  [len(layers), *shape]."""
    host = _aligned_empty((len(layers), *weight.shape), weight.dtype)
    for out, layer in zip(host, layers, strict=True):
        for part in parts:
            tensor = checkpoint.tensor(part.name.format(layer=layer)).read(weight.dtype)
            if tensor.shape != part.shape:
                raise ValueError(f"{part.name.format(layer=layer)} is {tensor.shape} instead of {part.shape}")
            part.put(out, tensor)
    return host


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that the CPU backend takes over instead of copying (it asks for 64-byte alignment)."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _is_redundant(name: str, model: Decoder) -> bool:
    """Tensors some files hold although the config says how to compute them."""
    return name.endswith("rotary_emb.inv_freq") or (model.config.is_tied and name == "lm_head.weight")
