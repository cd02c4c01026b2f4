"""An H200 that is not here, for the workers that compile kernels for it: its mesh, the dumps, the assembler's word."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from jax.sharding import Mesh

from jaxserve.ahead import describe_devices
from jaxserve.chips import parse_topology
from jaxserve.device.sharding import make_mesh


def mesh() -> Mesh:
    return make_mesh(describe_devices(parse_topology("h200:1")), 1)


def assemble(path: Path) -> dict[str, str | int]:
    """What the assembler says of a kernel, and how many matmul instructions it holds."""
    command = ["ptxas", "-v", "--gpu-name=sm_90a", str(path), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    ptx = path.read_text()
    return {
        "entry": re.findall(r"Compiling entry function '(\w+)'", said)[0],
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),  # a thread
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
    }
