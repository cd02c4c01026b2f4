"""A serving process around the stub engine: what `serve.py` is, without a model.

python -m tests.server.run_stub [stub flags] -- [flags of ServerConfig]"""

from __future__ import annotations

import argparse
import sys
import threading
import time

from server.args import Parser, ServerConfig, add_flags, config_of
from server.main import run
from tests.server.stub import ANSWER, StubEngine


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--load-error", default="")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--per-step", type=int, default=1)
    parser.add_argument("--die-after", type=float, default=0.0)
    parser.add_argument("--stamped", action="store_true")
    parser.add_argument("--hang-after", type=float, default=0.0)
    parser.add_argument("--answer", default=ANSWER)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    flags = parser.parse_args(sys.argv[1:split])
    server_parser = Parser("stub")
    add_flags(server_parser, ServerConfig)
    config = config_of(server_parser.parse_args(sys.argv[split + 1 :]), ServerConfig)

    def load() -> StubEngine:
        time.sleep(flags.load_seconds)
        if flags.load_error:
            raise ValueError(flags.load_error)
        engine = StubEngine(
            answer=flags.answer,
            step_seconds=flags.step_seconds,
            per_step=flags.per_step,
            max_len=1_000_000,
            is_stamped=flags.stamped,
        )
        engine.start()
        if flags.die_after:
            threading.Timer(flags.die_after, engine.die).start()
        if flags.hang_after:
            threading.Timer(flags.hang_after, engine.hang, (True,)).start()
        return engine

    return run(config, load)


if __name__ == "__main__":
    sys.exit(main())
