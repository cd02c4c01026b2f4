"""Compiles programs for an H200 with the real CUDA compiler, on a machine with neither GPU nor driver.

    python -m tests.kernels.cuda_worker <module> <name>...

`module.program(name)` gives a function and the shapes of its arguments.  One line of JSON a program goes to standard
output: see `tests.kernels.cuda.Report`.  A process of its own, because a compiler is chosen before jax starts."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TARGET = Path(__file__).parents[1] / "data" / "h200.txtpb"


def main(module: str, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _dump_into(folder)
        programs = importlib.import_module(module)
        for name in names:
            report = _compile(*programs.program(name))
            dumped = sorted(Path(folder).glob("*.ptx"))
            kernels = [_assemble(path) for path in dumped if ".entry" in path.read_text()]
            print(json.dumps({"name": name, "kernels": kernels} | report), flush=True)
            for path in dumped:  # the next program's kernels may get the same names
                path.unlink()


def _dump_into(folder: str) -> None:
    """Before jax reads its environment."""
    from jax.version import __version_info__

    flags = f"--xla_dump_to={folder}" + (" --xla_dump_emitter_re=.*" if __version_info__ >= (0, 11) else "")
    os.environ["XLA_FLAGS"] = flags
    os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}


def _compile(function, shapes) -> dict:
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    ).devices  # fmt: skip
    mesh = Mesh(devices, ("tp",))
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
    """What the assembler says of a kernel, and which instructions it holds."""
    command = ["ptxas", "-v", "--gpu-name=sm_90a", str(path), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    ptx = path.read_text()
    return {
        "entry": re.findall(r"Compiling entry function '(\w+)'", said)[0],
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma_loads": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
        "threads": int(re.findall(r"\.(?:maxntid|reqntid) (\d+)", ptx)[0]),
        "registers_asked": [int(asked) for asked in re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx)],
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
