"""The engine's own programs, compiled for chips that are not here, and what the compiler says of them.

A described device compiles and never runs: no weight is read, no array is made.  The compiler must have been found
before jax was imported (`jaxserve.chips.compilers`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from time import perf_counter

import jax
from jax import Device
from jax.experimental import topologies
from jax.sharding import Mesh

from checkpoints import open_checkpoint
from checkpoints.hub import resolve
from jaxserve.catalogue import Catalogue
from jaxserve.chips import Topology, hlo
from jaxserve.config import EngineConfig
from jaxserve.device.draft_model import SecondModel
from jaxserve.device.sharding import local_bytes, make_mesh
from jaxserve.device.steps import Params
from jaxserve.draft_model import as_draft, check_draft
from jaxserve.drafts import make_draft
from jaxserve.models.decoder import Decoder
from jaxserve.models.tree import abstract_params, layout_for, make_model
from jaxserve.start import catalogue_of, choose_attention, max_len_of

THREADS = 2  # programs compiled side by side: the compilers leave the GIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One compiled program.  Bytes are of one device and exact: the compiler's own assignment."""

    name: str
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int  # of outputs that are their donated argument, written in place
    compile_seconds: float  # tracing included
    collectives: tuple[hlo.Collective, ...]
    dots: tuple[str, ...]  # the distinct ones: result, and precision of the operands
    pool_copies: tuple[str, ...]  # instructions that make another array as large as the pool or its scales
    weight_copies: tuple[str, ...]  # another array of a weight matrix's shape, of one layer or of all
    narrow_weights: tuple[
        str, ...
    ]  # that load a weight matrix in tiles of fewer than 8 rows: an eighth of a TPU's pace

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class DoesNotFit(Exception):
    """The compiler found no room; the message holds its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model on chips that are not here."""

    name: str
    model: Decoder
    params: Params  # of ShapeDtypeStructs
    mesh: Mesh
    attention_backend: str
    attention_reason: str

    def catalogue(self, config: EngineConfig, pages: int | None = None) -> Catalogue:
        """As the engine would make it; pages: of the pool, None = the fewest that hold one sequence."""
        draft = make_draft(config.draft, self.model, partial(self._describe_draft, config))
        return catalogue_of(
            config, model=self.model, draft=draft, mesh=self.mesh, backend=self.attention_backend, pages=pages
        )

    def _describe_draft(self, config: EngineConfig, reference: str) -> SecondModel:
        """A draft that is a model of its own.  Whether it has the target's tokens is seen when the engine starts: a
        config.json holds none.  Raises ValueError naming what else does not fit."""
        try:
            _, hf = read_config(reference)
            model = make_model(hf, dtype=self.model.dtype, tensor_parallel=self.mesh.size)
            with jax.set_mesh(self.mesh):
                max_len = max_len_of(config, self.model)
                check_draft(model, config, max_len=max_len, mesh=self.mesh, backend=self.attention_backend)
        except ValueError as error:
            raise ValueError(f"draft='model:{reference}': {error}") from None
        return as_draft(model, abstract_params(model, self.mesh, layout_for(self.mesh)), self.model)

    @property
    def weight_bytes(self) -> int:
        """On each device."""
        return local_bytes(self.params)


def describe_devices(topology: Topology) -> Sequence[Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Raises ValueError when the compiler does not know such a topology."""
    try:
        if topology.chip.platform == "cuda":
            target = resources.files("jaxserve.chips").joinpath(f"{topology.chip.name}.txtpb").read_text()
            shape = f"1x1x{topology.num_devices}"
            return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
        if len(topology.bounds) > 1:
            return topologies.get_topology_desc(topology.name, "tpu").devices
        name = f"{topology.chip.name}:{'1x1x1' if topology.chip.devices > 1 else '1x1'}"
        return topologies.get_topology_desc(name, "tpu", chips_per_host_bounds=[1, 1, 1]).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise ValueError(f"the compiler knows no topology {topology.name!r}: {_first_line(error)}") from None


def read_config(reference: str) -> tuple[str, Mapping]:
    """-> the model's name and its config.json.  A config.json alone, or a folder with no weights, will do.

    Raises ValueError when the reference leads nowhere."""
    path = Path(reference).expanduser()
    file = path / "config.json" if path.is_dir() and not (path / "jaxserve.json").exists() else path
    if file.suffix == ".json" and file.is_file():
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{file} holds no JSON object")
        return file.resolve().parent.name if file.name == "config.json" else file.stem, config
    files = resolve(reference)
    return files.name, open_checkpoint(files).config


def describe(hf: Mapping, topology: Topology, config: EngineConfig, *, name: str = "model") -> Described:
    """The model a config.json describes, split over config.tensor_parallel of the topology's devices.

    Raises ValueError as the engine's start would."""
    mesh = make_mesh(describe_devices(topology), config.tensor_parallel)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16"
    model = make_model(hf, dtype=dtype, tensor_parallel=mesh.size)
    with jax.set_mesh(mesh):
        backend, reason = choose_attention(config, model=model, mesh=mesh)
    params = abstract_params(model, mesh, layout_for(mesh))
    return Described(
        name=name, model=model, params=params, mesh=mesh, attention_backend=backend, attention_reason=reason
    )


def compile_ahead(
    described: Described, catalogue: Catalogue, names: Sequence[str], *, progress: Callable[[str], None] | None = None
) -> list[Report]:
    """The programs of these names.  progress: told the name that is waited for.

    Raises DoesNotFit with the compiler's numbers."""
    lowered: dict[str, tuple[jax.stages.Lowered, float]] = {}
    # Kernels are lowered for the mesh's devices, not for the process's own.
    with jax.set_mesh(catalogue.mesh):
        wanted = catalogue.wanted(described.params)
        for name in names:
            began = perf_counter()
            function, arguments = wanted[name]
            lowered[name] = function.lower(*arguments), perf_counter() - began
    reports = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="compile") as pool:
        pending = {name: pool.submit(_compile, name, *each) for name, each in lowered.items()}
        for name, future in pending.items():
            if progress is not None:
                progress(name)
            compiled, seconds = future.result()
            reports.append(_report(described, catalogue, name, compiled, seconds))
    return reports


def _compile(name: str, lowered: jax.stages.Lowered, seconds: float) -> tuple[jax.stages.Compiled, float]:
    began = perf_counter()
    try:
        return lowered.compile(), seconds + perf_counter() - began
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFit(f"{name}: {_first_line(error)}") from None
        raise


def _report(
    described: Described, catalogue: Catalogue, name: str, compiled: jax.stages.Compiled, seconds: float
) -> Report:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "both compilers tell memory and text"
    program = hlo.parse(text)
    dtype = hlo.DTYPES[described.model.dtype]
    pools = (catalogue.abstract_pool, catalogue.abstract_draft_pool)
    pool = {(hlo.DTYPES[str(leaf.dtype)], local_bytes(leaf)) for leaf in jax.tree.leaves(pools)}
    second = catalogue.second
    matrices = _matrix_shapes(described.params, described.mesh)
    if second:
        matrices |= _matrix_shapes(second.params, described.mesh)

    def is_weight(array: hlo.Array) -> bool:
        return array.dtype == dtype and _shape(array.dims) in matrices

    return Report(
        name=name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        compile_seconds=seconds,
        collectives=hlo.collectives(program),
        dots=hlo.dots(program),
        pool_copies=hlo.copies(program, lambda array: (array.dtype, array.nbytes) in pool),
        weight_copies=hlo.copies(program, lambda array: is_weight(array) and not array.is_on_chip),
        narrow_weights=hlo.copies(program, lambda array: is_weight(array) and array.has_narrow_tiles),
    )


def _matrix_shapes(params: Params, mesh: Mesh) -> set[tuple[int, ...]]:
    """Of every weight matrix on one device: one layer's and, where they are stacked, all layers' together; as they are
    and with their output dims merged, in any order."""
    shapes = set()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        assert leaf.sharding is not None
        layers, matrix = (), leaf.sharding.shard_shape(leaf.shape)
        if layout_for(mesh) == "stacked" and path[0].key == "blocks":
            layers, matrix = matrix[:1], matrix[1:]
        if len(matrix) > 1:
            forms = (matrix, (matrix[0], math.prod(matrix[1:])))
            shapes |= {_shape(dims) for form in forms for dims in (form, (*layers, *form))}
    return shapes


def _shape(dims: Sequence[int]) -> tuple[int, ...]:
    """The dims of an array in any order, without those of 1."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
