"""Many clients at once, over both fronts, with random parameters, and not all of them polite.

    python scripts/soak.py --requests 2000 --clients 64 -- --model smollm2-135m-instruct --slots 16

Starts a server with the flags behind `--`, sends it requests that finish, leave in the middle, run out of time or are
aborted by somebody else, and ends it.  Every request must end once, every page come back, memory stay flat, the
counters add up.  Prints what it found.  Exit codes: 0 all of it holds, 1 something does not, 2 wrong flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import _path  # noqa: F401  first: it makes the next imports work
from rich.console import Console
from rich.table import Table

from scripts.soak_parts.book import Check, summary
from scripts.soak_parts.clients import Told
from scripts.soak_parts.process import ServerProcess
from scripts.soak_parts.run import soak
from server.args import Parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser("Soak a jaxserve server; its own flags go behind --.")
    parser.add_argument("--requests", type=int, default=2000, help="in all (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and parameters")
    flags = parser.parse_args(arguments[:split])
    if flags.requests < 3 or flags.clients < 1:
        parser.error("--requests must be at least 3 and --clients at least 1")
    console = Console()

    def progress(count: int) -> None:
        console.print(f"{count} requests")

    try:
        server = ServerProcess.start(arguments[split + 1 :])
    except RuntimeError as error:
        parser.error(str(error))
    try:
        told, found = soak(server, requests=flags.requests, clients=flags.clients, seed=flags.seed, progress=progress)
    finally:
        server.process.kill()
    show(console, told, found)
    return 0 if all(check.holds for check in found) else 1


def show(console: Console, told: Sequence[Told], found: Sequence[Check]) -> None:
    table = Table("front", "way", "status", "requests", title="requests")
    for front, way, status, count in summary(told):
        table.add_row(front, way, status, str(count))
    console.print(table)
    table = Table("promise", "found", "", title="soak")
    for check in found:
        table.add_row(check.promise, check.found, "holds" if check.holds else "BROKEN")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
