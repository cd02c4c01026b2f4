"""Where a worker's GPU compiler leaves the PTX of every kernel."""

from __future__ import annotations

import os
from importlib.metadata import version


def dump_into(folder: str) -> None:
    """Before jax is imported: its compiler reads the environment once."""
    is_newer = tuple(map(int, version("jax").split(".")[:2])) >= (0, 11)  # which dumps what is asked for by name
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}" + (" --xla_dump_emitter_re=ptx" if is_newer else "")
    os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
