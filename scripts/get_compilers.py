"""Fetches the compilers of chips that are not here: libtpu, and XLA's CUDA plugin, as the installed jax names them.

    python scripts/get_compilers.py [tpu] [cuda]

`scripts/plan.py` and `tests/compilers` use them; nothing else does.  They lie beside each other, one folder for each
version of jax, in $JAXSERVE_COMPILERS or in the cache folder: libtpu comes under Google's terms and is not jaxserve's
to ship."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import _path  # noqa: F401  first: it makes the next imports work

from jaxserve.chips import Platform
from jaxserve.chips.compilers import MODULES, compiler_folder, requirements


def fetch(platform: Platform) -> str:
    """-> a sentence about what was done.  The folder appears whole or not at all.  Raises ValueError."""
    folder = compiler_folder(platform)
    if (folder / MODULES[platform]).is_dir():
        return f"{platform}: already in {folder}"
    wanted = requirements(platform)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), *wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ValueError(f"{platform}: pip could not fetch {' '.join(wanted)}: {reason}")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"{platform}: {' '.join(wanted)} in {folder}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="tpu|cuda", help="which; both when none is named")
    args = parser.parse_args()
    known = get_args(Platform)
    unknown = [platform for platform in args.platforms if platform not in known]
    if unknown:
        parser.error(f"{', '.join(unknown)} is none of {', '.join(known)}")
    try:
        for platform in args.platforms or known:
            print(fetch(platform))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
