"""Serves a model over gRPC: `python scripts/serve.py [--model REF] [--port 50051]`; `--help` lists the flags."""

import sys

import _path  # noqa: F401  first: it makes the next import work

from server.main import main

if __name__ == "__main__":
    sys.exit(main())
