"""What every operation on a pool of pages asks of it.  Checks shapes and dtypes; computes nothing."""

from __future__ import annotations

from jax import Array


def check_scale(data: Array, scale: Array | None) -> None:
    """data [L * NP, 2, K, T, H'] of 8 bits comes with scale [L * NP, 2, K, T], any other without.

    Raises ValueError with the shapes."""
    is_narrow = data.dtype.itemsize == 1
    if is_narrow != (scale is not None):
        raise ValueError(f"a pool of {data.dtype} {'needs' if is_narrow else 'takes no'} scale")
    if scale is not None and scale.shape != data.shape[:-1]:
        raise ValueError(f"scale {scale.shape} must be {data.shape[:-1]}")
