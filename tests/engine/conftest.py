"""Engines on the tiny model.  One with the same options is built once a module and lent to its tests.  (Not once a session:
each holds thousands of memory maps, and a process has no more than 65,530.)"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxserve import LLM
from tests.tiny_model import write_tiny_model

SMALL = {"slots": 4, "page_size": 16, "prefill_chunk": 64, "prefill_tokens": 64, "pool": "4096", "accelerator": "cpu"}
Engines = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def engines(tiny_folder: Path) -> Iterator[Engines]:
    built: dict[tuple, LLM] = {}

    def engine(**options) -> LLM:
        options = {"model": str(tiny_folder)} | SMALL | options
        key = tuple(sorted(options.items()))
        if key not in built:
            built[key] = LLM(**options)
        return built[key]

    yield engine
    while built:
        built.popitem()[1].close()
    gc.collect()  # the programs of an engine that is gone


@pytest.fixture
def llm(engines: Engines) -> LLM:
    return engines()
