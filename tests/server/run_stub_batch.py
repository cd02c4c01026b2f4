"""`batch_generate.py` around the stub engine: `python -m tests.server.run_stub_batch [--step-seconds S] IN OUT ...`"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from batch_generate import main

from jaxserve.config import EngineConfig
from tests.server.stub import StubEngine

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--die-after", type=float, default=0.0)
    stub_flags, rest = parser.parse_known_args()

    def load(config: EngineConfig) -> StubEngine:
        engine = StubEngine(step_seconds=stub_flags.step_seconds, queue_limit=config.queue_limit)
        engine.start()
        if stub_flags.die_after:
            threading.Timer(stub_flags.die_after, engine.die).start()
        return engine

    sys.exit(main(rest, load))
