"""The real engine around the tiny model, as the service's tests share it."""

from __future__ import annotations

from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.start import load_engine
from tests.server.serving import until
from tests.tiny_model import write_tiny_model


def tiny_engine(folder: Path) -> Engine:
    """Loaded into that (empty) folder and warm; its programs come from the cache when they were compiled before."""
    small = {"slots": 8, "page_size": 16, "prefill_chunk": 32, "prefill_tokens": 32, "pool": "4096", "max_len": 128}
    model = write_tiny_model(folder / "tiny")
    return load_engine(EngineConfig(model=str(model), accelerator="cpu", batch_invariant=True, queue_limit=16, **small))


def until_all_pages_are_back(engine: Engine) -> None:
    """Fails when a request runs on, when a page is lost, or when a program was compiled for a request."""

    def is_idle() -> bool:
        load = engine.load()
        is_whole = load.pages_free + load.pages_cached == load.pages_total
        return load.running == load.waiting == load.pages_held == 0 and is_whole

    until(is_idle, seconds=20)
    assert engine.load().compiles == 0
