"""Array operations with one contract each and one implementation per backend.  Arrays in, arrays out.

Knows nothing of requests, models or devices' settings; never falls back from one backend to another."""

from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.panel_matmul import panel_matmul
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.registry import IMPLEMENTATIONS, implementation

__all__ = ["IMPLEMENTATIONS", "implementation", "kv_write", "paged_attention", "panel_matmul", "quant_matmul"]
