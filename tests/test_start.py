"""What `auto` chooses, and that it says why."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.sharding import make_mesh
from jaxserve.models.tree import make_model
from jaxserve.start import choose_attention, choose_matmul, steady_pages
from tests.tiny_model import LLAMA

HAS_NATIVE = importlib.util.find_spec("llvmlite") is not None
needs_native = pytest.mark.skipif(
    not HAS_NATIVE, reason="the native kernels are written with llvmlite, which is not installed"
)
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 768, "rms_norm_eps": 1e-5,
}  # fmt: skip


def attention(config: EngineConfig, dtype: str = "float32", devices: int = 1) -> tuple[str, str]:
    model = make_model(LLAMA | SIZES, dtype=dtype, tensor_parallel=devices)
    return choose_attention(config, model=model, mesh=make_mesh(jax.devices(), devices))


def products(config: EngineConfig, dtype: str = "float32", devices: int = 1) -> tuple[str, str]:
    return choose_matmul(config, dtype=dtype, mesh=make_mesh(jax.devices(), devices))


@needs_native
def test_one_cpu_in_float32_gets_the_native_kernels() -> None:
    assert products(EngineConfig()) == ("native", "the kernel for cpu")
    assert attention(EngineConfig()) == ("native", "the kernel for cpu")


@needs_native
@pytest.mark.parametrize("backend", ["native", "xla"])
def test_a_choice_is_kept(backend: str) -> None:
    config = EngineConfig(matmul_backend=backend, attention_backend=backend)  # pyright: ignore[reportArgumentType]
    assert products(config) == attention(config) == (backend, "as asked")


def test_without_llvmlite_auto_is_xla_and_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llvmlite" else find_spec(name))
    for choose in (products, attention):
        backend, reason = choose(EngineConfig())
        assert backend == "xla"
        assert "pip install 'jaxserve[cpu]'" in reason
    with pytest.raises(ValueError, match=r"matmul_backend='native' cannot serve here: .*jaxserve\[cpu\]"):
        products(EngineConfig(matmul_backend="native"))
    with pytest.raises(ValueError, match=r"attention_backend='native' cannot serve here: .*jaxserve\[cpu\]"):
        attention(EngineConfig(attention_backend="native"))


@needs_native
def test_what_native_cannot_do_is_refused_by_name_and_left_to_xla_by_auto() -> None:
    asked = EngineConfig(matmul_backend="native", attention_backend="native")
    with pytest.raises(ValueError, match="multiplies float32 weights, these are bfloat16"):
        products(asked, "bfloat16")
    with pytest.raises(ValueError, match="one cpu device, this is 2 x cpu"):
        products(asked, devices=2)
    with pytest.raises(ValueError, match="float32 pools and queries alone, got bfloat16"):
        attention(asked, "bfloat16")
    assert products(EngineConfig(), "bfloat16")[0] == products(EngineConfig(), devices=2)[0] == "xla"
    assert attention(EngineConfig(), "bfloat16")[0] == "xla"
    assert attention(EngineConfig(kv_dtype="int8"))[0] == "xla"


def test_a_little_more_or_less_free_memory_gives_the_same_pool() -> None:
    """Else the next start would compile every program again."""
    found = [steady_pages(int(1100 * share), least=16) for share in (0.99, 1.0, 1.01)]
    assert found == [1088] * 3
    for pages in range(1, 5000):
        assert 0.93 * pages <= steady_pages(pages, least=16) <= pages
    assert steady_pages(1100, least=1095) == 1095
    assert steady_pages(1100, least=1200) == 1100  # too few for a sequence: said elsewhere
