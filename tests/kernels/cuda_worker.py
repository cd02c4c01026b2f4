"""Compiles programs for an H200 with the real CUDA compiler, on a machine with neither GPU nor driver.

    python -m tests.kernels.cuda_worker <module> <name>...

`module.program(name)` gives a function and the shapes of its arguments.  One line of JSON a program goes to standard
output: see `tests.kernels.cuda.Report`.  A process of its own, because a compiler is chosen before jax starts."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tests.compilers.dumps import dump_into
from tests.kernels import h200


def main(module: str, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dump_into(folder)
        programs = importlib.import_module(module)
        for name in names:
            report = _compile(*programs.program(name))
            dumped = sorted(Path(folder).glob("*.ptx"))
            kernels = [_assemble(path) for path in dumped if ".entry" in path.read_text()]
            print(json.dumps({"name": name, "kernels": kernels} | report), flush=True)
            for path in dumped:  # the next program's kernels may get the same names
                path.unlink()


def _compile(function, shapes) -> dict:
    mesh = h200.mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in shapes]
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "hlo": compiled.as_text(),
    }


def _assemble(path: Path) -> dict:
    ptx = path.read_text()
    return h200.assemble(path) | {
        "tma_loads": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
        "threads": int(re.findall(r"\.(?:maxntid|reqntid) (\d+)", ptx)[0]),
        "registers_asked": [int(asked) for asked in re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx)],
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
