"""The list of programs an engine needs, with the shapes of everything they take.  Compiles and holds nothing itself.

Names: "load", "decode R", "prefill RxQ", "sample R", "score T" (prompt logprobs, T = R x Q of the prefill call); with a
draft "propose R", "verify RxQ" and "accept RxQ" (Q = K + 1), and "draft prefill RxQ" when it has a pool of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device import speculate, steps
from jaxserve.device.attention import pool_head_dim, pool_sharding
from jaxserve.device.draft_model import SecondModel
from jaxserve.device.sharding import abstract, local_bytes
from jaxserve.device.slots import empty_slots, load_slot, load_width
from jaxserve.device.speculate import Draft, Proposed
from jaxserve.device.state import KVPool, SlotShape, SlotState
from jaxserve.device.steps import HEAD, Model, Params
from jaxserve.programs import Programs, Wanted

# By platform and by device kind; what each gains is its compiler's own estimate (`tests/compilers`).
COMPILER_OPTIONS: dict[str, dict[str, str | bool | int | float]] = {
    # Else the products of a single row run on the vector unit: a decode step of one row takes twice the time of four.
    "tpu": {"xla_tpu_enable_dot_strength_reduction": "false"},
    # Its compiler wants 16-bit matrices in tiles of 16 rows but is handed them in tiles of 8, so left alone it copies
    # every weight at every step.
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What is compiled follows from these alone."""

    model: Model
    scheduler: SchedulerConfig
    slot_shape: SlotShape
    mesh: Mesh
    backend: str  # of paged attention
    kv_dtype: str  # of the pool
    draft: Draft | None = None

    @staticmethod
    def of(
        model: Model, scheduler: SchedulerConfig, config: EngineConfig, *, mesh: Mesh, backend: str,
        draft: Draft | None = None,
    ) -> Catalogue:  # fmt: skip
        slot_shape = SlotShape(
            slots=scheduler.slots, max_len=scheduler.max_len, vocab=model.shape.vocab, stop_ids=config.max_stop_ids,
            biases=config.max_logit_bias, allowed_ids=config.max_allowed_ids,
        )  # fmt: skip
        return Catalogue(
            model=model, scheduler=scheduler, slot_shape=slot_shape, mesh=mesh, backend=backend,
            kv_dtype=config.kv_dtype_for(model.dtype), draft=draft,
        )  # fmt: skip

    @property
    def said(self) -> str:
        """All that its programs follow from beside their names and arguments, in words."""
        mesh = (self.mesh, [device.id for device in self.mesh.devices.flat])
        return repr((self.model, self.slot_shape, mesh, self.backend, self.draft, self.scheduler.num_drafts))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, Spec())

    @property
    def row_buckets(self) -> list[int]:
        """Rows of every call that draws."""
        shapes = (*self.scheduler.prefill_buckets, *self.scheduler.verify_calls)
        return sorted({*self.scheduler.decode_buckets, *(rows for rows, _ in shapes)})

    @property
    def packed_columns(self) -> int:
        return HEAD + self.scheduler.pages_per_row

    @property
    def mask_words(self) -> int:
        return -(-self.model.shape.vocab // 32)

    @property
    def second(self) -> SecondModel | None:
        """The draft, when it is one with a pool of its own."""
        return self.draft if isinstance(self.draft, SecondModel) else None

    @property
    def pool_head_dim(self) -> int:
        """H' of the target's pool."""
        return pool_head_dim(self.model.shape.head_dim, self.mesh)

    @property
    def page_bytes(self) -> int:
        """What one page takes on each device, over all layers, scales included."""
        return self._page_bytes(self.model)

    @property
    def draft_page_bytes(self) -> int:
        """What a page takes of the draft's own pool, beside that."""
        return self._page_bytes(self.second.model) if self.second else 0

    def _page_bytes(self, model: Model) -> int:
        return local_bytes(self._abstract_pool(model)) // self.scheduler.num_pages

    @property
    def slot_bytes(self) -> int:
        """What the slots take on each device."""
        return local_bytes(_placed(self._make_slots().eval_shape(), self.replicated))

    def draft_bytes(self, params: Params) -> int:
        """What the draft's own weights take on each device, beside the target's."""
        return self.draft.own_bytes(params) if self.draft else 0

    def new_pool(self) -> KVPool:
        return self._make_pool(self.model)()

    def new_draft_pool(self) -> KVPool | None:
        return self._make_pool(self.second.model)() if self.second else None

    def new_slots(self) -> SlotState:
        return self._make_slots()()

    @property
    def abstract_pool(self) -> KVPool:
        """Shapes and shardings of the target's pool."""
        return self._abstract_pool(self.model)

    @property
    def abstract_draft_pool(self) -> KVPool | None:
        return self._abstract_pool(self.second.model) if self.second else None

    def _abstract_pool(self, model: Model) -> KVPool:
        pool = self._make_pool(model).eval_shape()
        return jax.tree.map(_placed, pool, pool_sharding(pool, self.mesh))

    def _make_pool(self, model: Model):
        make = partial(
            KVPool.zeros, model.shape, pages=self.scheduler.num_pages, page_size=self.scheduler.page_size,
            head_dim=pool_head_dim(model.shape.head_dim, self.mesh), dtype=jnp.dtype(self.kv_dtype),
        )  # fmt: skip
        return jax.jit(make, out_shardings=pool_sharding(jax.eval_shape(make), self.mesh))

    def _make_slots(self):
        return jax.jit(partial(empty_slots, self.slot_shape), out_shardings=self.replicated)

    def wanted(self, params: Params) -> Wanted:
        """Every program.  A program's outputs are pinned to what its consumer was compiled for."""
        shape, replicated, array = self.model.shape, self.replicated, self._array
        weights, of_weights = _flattened(params)
        pool = self.abstract_pool
        pool_out = pool_sharding(pool, self.mesh)
        draft_pool = self.abstract_draft_pool or pool
        draft_pool_out = pool_sharding(draft_pool, self.mesh)
        slots = _placed(self._make_slots().eval_shape(), replicated)
        draft_weights, of_draft_weights = _flattened(self.draft.describe(params) if self.draft else {})
        common = {"backend": self.backend, "mesh": self.mesh}
        device = self.mesh.devices.flat[0]
        options = COMPILER_OPTIONS.get(device.platform, {}) | COMPILER_OPTIONS.get(device.device_kind, {})
        jit = partial(jax.jit, compiler_options=options or None)
        forward_out = (replicated, pool_out)
        load = jit(load_slot, donate_argnums=0, out_shardings=replicated)
        wanted: Wanted = {"load": (load, (slots, array(load_width(self.slot_shape))))}
        for rows in self.scheduler.decode_buckets:
            packed = array(rows, self.packed_columns)
            step = of_weights(partial(steps.decode, self.model, **common))
            step = jit(step, donate_argnums=1, out_shardings=forward_out)
            wanted[f"decode {rows}"] = (step, (weights, pool, slots, packed))
        for rows, drafts in self.scheduler.verify_calls:
            assert self.draft is not None, "verify calls without a draft"
            packed, most = array(rows, self.packed_columns), self.scheduler.num_drafts
            proposed = _placed(jax.eval_shape(partial(Proposed.empty, rows, most)), replicated)
            if f"propose {rows}" not in wanted:
                step = of_draft_weights(partial(self.draft.propose, drafts=most, **common))
                step = jit(step, donate_argnums=1, out_shardings=(replicated, draft_pool_out))
                wanted[f"propose {rows}"] = (step, (draft_weights, draft_pool, slots, packed))
            step = of_weights(partial(speculate.verify, self.model, drafts=drafts, **common))
            step = jit(step, donate_argnums=1, out_shardings=forward_out)
            wanted[f"verify {rows}x{1 + drafts}"] = (step, (weights, pool, slots, packed, proposed))
            step = jit(speculate.accept, donate_argnums=0, out_shardings=replicated)
            logits = array(rows, 1 + drafts, shape.vocab, dtype="float32")
            arguments = (slots, logits, array(rows), packed, self._mask(rows, 1 + drafts), proposed)
            wanted[f"accept {rows}x{1 + drafts}"] = (step, arguments)
        for rows, chunk in self.scheduler.prefill_buckets:
            packed = array(rows, self.packed_columns)
            step = of_weights(partial(steps.prefill, self.model, queries=chunk, **common))
            step = jit(step, donate_argnums=1, out_shardings=forward_out)
            wanted[f"prefill {rows}x{chunk}"] = (step, (weights, pool, slots, packed))
            if self.second:
                step = of_draft_weights(partial(self.second.prefill, queries=chunk, **common))
                step = jit(step, donate_argnums=1, out_shardings=draft_pool_out)
                wanted[f"draft prefill {rows}x{chunk}"] = (step, (draft_weights, draft_pool, slots, packed))
            score = of_weights(partial(steps.prompt_logprobs, self.model))
            score = jit(score, out_shardings=replicated)
            hidden = array(rows * chunk, shape.width, dtype=self.model.dtype)
            wanted[f"score {rows * chunk}"] = (score, (weights, hidden, slots, array(3)))
        draw = jit(steps.sample, donate_argnums=0, out_shardings=replicated)
        for rows in self.row_buckets:
            logits, packed = array(rows, shape.vocab, dtype="float32"), array(rows, self.packed_columns)
            wanted[f"sample {rows}"] = (draw, (slots, logits, array(rows), packed, self._mask(rows)))
        return wanted

    def largest_temporaries(self, params: Params) -> int:
        """Bytes a device needs beside weights, pool and slots: by the compiler, of the programs that decide."""
        wanted, programs = self.wanted(params), Programs()
        programs.compile({name: wanted[name] for name in self.deciding})
        return max(info.temp_bytes for info in programs.infos)

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the largest decode, verify, prefill and sampler: no other program needs more memory."""
        rows, chunk = max(self.scheduler.prefill_buckets, key=lambda bucket: bucket[0] * bucket[1])
        most = self.scheduler.decode_buckets[-1]
        names = [f"decode {most}", f"prefill {rows}x{chunk}", f"sample {self.row_buckets[-1]}"]
        if self.draft is not None:
            several, drafts = max(self.scheduler.verify_calls, key=lambda shape: shape[0] * (1 + shape[1]))
            shape = f"{several}x{1 + drafts}"
            names += [f"propose {self.scheduler.verify_calls[-1][0]}", f"verify {shape}", f"accept {shape}"]
        if self.second:
            names.append(f"draft prefill {rows}x{chunk}")
        return tuple(names)

    def _mask(self, *rows: int) -> jax.ShapeDtypeStruct:
        return self._array(*rows, self.mask_words, dtype="uint32")

    def _array(self, *shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=self.replicated)


def _flattened(params: Params) -> tuple[list[jax.ShapeDtypeStruct], Callable[[partial], Callable]]:
    """Weights as programs take them: a list of arrays, since the host would walk a tree of them at every call.

    -> that list, described; and what makes of step(params, ...) the same function of (list, ...)."""
    leaves, structure = jax.tree.flatten(jax.tree.map(abstract, params))

    def taking(step: partial) -> Callable:
        def of_leaves(leaves, *rest):
            return step(structure.unflatten(leaves), *rest)

        of_leaves.__name__ = step.func.__name__  # as profilers show it
        return of_leaves

    return leaves, taking


def _placed(tree, sharding: NamedSharding):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
