"""Engines on the tiny model.  An engine with the same options is built once a session and lent to every test."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def engines(tiny_folder: Path) -> Iterator[Engines]:
    built: dict[tuple, LLM] = {}

    def engine(**options) -> LLM:
        options = {"model": str(tiny_folder)} | SMALL | options
        key = tuple(sorted(options.items()))
        if key not in built:
            built[key] = LLM(**options)
        return built[key]

    yield engine
    for llm in built.values():
        llm.close()


@pytest.fixture
def llm(engines: Engines) -> LLM:
    return engines()
