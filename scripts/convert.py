"""Any model reference -> a folder that jaxserve loads without conversion: weights as on the device, tokenizer, config.

    python scripts/convert.py smollm2-135m-instruct ./smollm2-saved

Serve it with `--model ./smollm2-saved`.  The folder appears whole or not at all."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import _path  # noqa: F401  first: it makes the next imports work
import jax
from rich.progress import Progress

from checkpoints import open_checkpoint
from checkpoints.hub import resolve
from checkpoints.orbax_store import new_folder
from jaxserve.device.sharding import make_mesh
from jaxserve.models.decoder import DTYPES
from jaxserve.models.loading import load_params
from jaxserve.models.saved import save_params
from jaxserve.text import load_tokenizer


def convert(source: str, destination: Path, *, dtype: str) -> None:
    """Raises ValueError when the source cannot be read or the destination is taken."""
    files = resolve(source)
    with new_folder(destination) as folder:
        begin = time.perf_counter()
        with Progress(transient=True) as progress:
            task = progress.add_task(f"loading {files.name}", total=None)
            model, params = load_params(
                files, dtype=dtype, mesh=make_mesh(jax.devices(), 1),
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )  # fmt: skip
        loaded = time.perf_counter()
        load_tokenizer(files).save(folder)
        save_params(folder, model, params, config=open_checkpoint(files).config, name=files.name)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"{destination}: {nbytes / 1e6:.0f} MB of {dtype}; loaded in {loaded - begin:.2f} s,"
        f" saved in {time.perf_counter() - loaded:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", metavar="SRC", help="packaged name, folder, .gguf file or hf:org/name")
    parser.add_argument("destination", metavar="DST", type=Path, help="folder to make; must not be there, or be empty")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the weights; auto = float32 on cpu, bfloat16 elsewhere",
    )
    arguments = parser.parse_args()
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        convert(arguments.source, arguments.destination, dtype=dtype)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
