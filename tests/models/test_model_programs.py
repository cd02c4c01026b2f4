"""What the compiled programs promise: explicit precision, one trace for all layers, no cost on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve.device.sharding import make_mesh
from jaxserve.models.loading import load_model
from jaxserve.models.rope import Rope, rope_tables
from tests.models.dense import FakeCheckpoint, dense_attend, empty_pool
from tests.models.tiny import CONFIGS, TOKENS


def equations(jaxpr):
    """All of them, however deep."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                if isinstance(inner, jax.extend.core.ClosedJaxpr):
                    yield from equations(inner.jaxpr)
                elif isinstance(inner, jax.extend.core.Jaxpr):
                    yield from equations(inner)


def no_attend(q, k, v, pool, layer, *, window, scale, softcap):
    return q + (k + v).sum(axis=2, keepdims=True), pool


def forward_jaxpr(family: str, *, dtype: str, layout, attend=no_attend):
    mesh = make_mesh(jax.devices(), 1)
    model, params = load_model(FakeCheckpoint(CONFIGS[family]), dtype=dtype, mesh=mesh, layout=layout)

    def step(params, tokens):
        hidden, _ = model.forward(params, tokens, tokens, empty_pool(), attend)
        return model.logits(params, hidden)

    return jax.make_jaxpr(step)(params, jnp.asarray(TOKENS))


@pytest.mark.parametrize("layout", ["list", "stacked"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", lax.Precision.HIGHEST), ("bfloat16", lax.Precision.DEFAULT)]
)
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_dot_says_its_precision(family, dtype, precision, layout):
    dots = [
        e
        for e in equations(forward_jaxpr(family, dtype=dtype, layout=layout).jaxpr)
        if e.primitive.name == "dot_general"
    ]
    # Of the head's two, one is lowered: one form for the CPU, one for the others.
    assert len(dots) == 2 + 4 * (CONFIGS[family]["num_hidden_layers"] if layout == "list" else 1)
    for dot in dots:
        assert {operand.aval.dtype.name for operand in dot.invars} == {dtype}
        assert dot.params["precision"] == (precision, precision), dot
        assert dot.params["preferred_element_type"] == jnp.float32


def test_layers_of_a_list_are_traced_once():
    calls = []

    def counting(*args, **settings):
        calls.append(1)
        return dense_attend(*args, **settings)

    forward_jaxpr("gemma3", dtype="float32", layout="list", attend=counting)
    assert len(calls) == 1, f"{len(calls)} traces for 2 layers"


def test_one_device_has_no_collectives():
    mesh = make_mesh(jax.devices(), 1)
    model, params = load_model(FakeCheckpoint(CONFIGS["smollm2"]), dtype="float32", mesh=mesh)

    def step(params, tokens):
        hidden, _ = model.forward(params, tokens, tokens, empty_pool(), dense_attend)
        return model.logits(params, hidden)

    text = jax.jit(step).lower(params, jnp.asarray(TOKENS)).compile().as_text()
    assert text
    assert not any(name in text for name in ("all-reduce", "all-gather", "collective-permute", "all-to-all"))


def test_float32_rotation_is_exact_far_out():
    """Beyond 32,768 positions an angle is still position times frequency in float32, as in float64 to 4e-3."""
    positions = np.array([[0, 1, 32767, 32768, 131071]], np.int32)
    tables = rope_tables((Rope(theta=1e6),), jnp.asarray(positions), 64)
    freq = 1e6 ** (-np.arange(0, 64, 2) / 64)
    want = np.cos(positions[0][:, None] * freq)
    assert tables.cos.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(tables.cos)[0, 0, :, 0, 0, 0], want, atol=4e-3)
