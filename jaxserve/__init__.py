"""jaxserve: serve language models in pure JAX, on CPU, GPU and TPU.

    from jaxserve import LLM, SamplingParams
    LLM("smollm2-135m-instruct").generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))

Names are imported when used, so that a client of `jaxserve.request` pays for no jax."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.constraints import StructuredOutputs
    from jaxserve.llm import LLM, RequestOutput, Sample
    from jaxserve.request import RequestError, SamplingParams

__all__ = ["LLM", "RequestError", "RequestOutput", "Sample", "SamplingParams", "StructuredOutputs"]

_HOMES = {
    "LLM": "jaxserve.llm",
    "RequestOutput": "jaxserve.llm",
    "Sample": "jaxserve.llm",
    "RequestError": "jaxserve.request",
    "SamplingParams": "jaxserve.request",
    "StructuredOutputs": "jaxserve.constraints",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
