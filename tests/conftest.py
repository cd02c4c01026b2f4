"""Before jax is imported: the CPU as four devices, strict promotion, one compile cache for the whole run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
_cache = Path(os.environ.get("JAXSERVE_CACHE") or Path(tempfile.gettempdir()) / "jaxserve-tests")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache / "programs"))

import pytest
from hypothesis import settings

# The same examples every run: a red test is a bug in the change, never in the dice.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference answers and workloads beside the checkout; a bare clone has none."""
    if not SHARED.is_dir():
        pytest.skip("no shared/ folder beside the checkout (reference answers on real weights)")
    return SHARED
