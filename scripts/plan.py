"""Does a model fit on a chip that is not here?  Compiles its real programs for that chip and tells what the compiler says.

    python scripts/plan.py --model hf:org/name --topology v6e:2x2

No weight is read: a config.json alone is model enough.  Needs libtpu for a TPU, XLA's CUDA plugin for a GPU
(`scripts/get_compilers.py`).  The time of a step is a lower bound from published numbers, never a measurement.

Exit codes: 0 it fits, 1 it does not, 2 wrong flags, no compiler, or a model that cannot be served."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import _path  # noqa: F401  first: it makes the next imports work
from rich.console import Console
from rich.table import Table

from jaxserve.chips import EXAMPLES, Topology, parse_topology
from jaxserve.chips.compilers import use_compiler
from jaxserve.config import EngineConfig
from server.args import Parser, add_flags

if TYPE_CHECKING:  # imports jax, which may start only once the compiler's environment stands
    from jaxserve.ahead import Described, Report
    from jaxserve.sizing import Sizing

GIB, MIB = 2**30, 2**20
# What of the engine's config shapes its programs and its memory.
FLAGS = (
    "model", "dtype", "tensor_parallel", "attention_backend", "max_len", "pool", "kv_dtype", "page_size", "memory_fraction",
    "slots", "prefill_chunk", "prefill_tokens", "batch_invariant", "draft", "speculate_tokens", "max_stop_ids", "max_logit_bias",
    "max_allowed_ids",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Compile a model's programs for chips that are not here, and tell whether it fits.")
    parser.add_argument("--topology", required=True, help=f"chips and how they are joined: {EXAMPLES}")
    parser.add_argument("--length", type=int, default=0, help="tokens of a request, prompt and output; 0 = max_len")
    parser.add_argument("--all", action="store_true", help="compile every program, not only those that decide")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was found there, too")
    add_flags(parser, EngineConfig, only=FLAGS)
    parser.set_defaults(tensor_parallel=0)  # all devices of the topology
    flags = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    try:
        topology = parse_topology(flags.topology)
        values = {name: getattr(flags, name) for name in FLAGS}
        values["tensor_parallel"] = flags.tensor_parallel or topology.num_devices
        config = dataclasses.replace(EngineConfig(), **values)
        if flags.length < 0:
            raise ValueError(f"length={flags.length} must not be negative (0 = max_len)")
        use_compiler(topology.chip.platform)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the compilers' own remarks
        return plan(flags, topology, config, console)
    except ValueError as error:
        parser.error(str(error))


def plan(flags: argparse.Namespace, topology: Topology, config: EngineConfig, console: Console) -> int:
    from jaxserve.ahead import DoesNotFit, describe, read_config
    from jaxserve.sizing import size

    name, hf = read_config(config.model)
    described = describe(hf, topology, config, name=name)
    head = (
        f"{name} on {config.tensor_parallel} of {topology.num_devices} devices of {topology.name}, {described.model.dtype},"
        f" KV {config.kv_dtype_for(described.model.dtype)},"
        f" attention {described.attention_backend} ({described.attention_reason})"
    )
    console.print(head)
    length = flags.length or described.catalogue(config).scheduler.max_len
    try:
        with console.status("") as status:
            sizing = size(
                described, topology, config, length=length, is_all=flags.all,
                progress=lambda program: status.update(f"compiling {program}"),
            )  # fmt: skip
    except DoesNotFit as error:
        console.print(f"[bold]does not fit[/bold]: {error}")
        write(flags.json, {"model": name, "topology": topology.name, "fits": False, "reason": str(error)})
        return 1
    console.print(memory_table(sizing), program_table(sizing), roofline_table(sizing), conclusion(sizing, length))
    console.print(f"published numbers: {topology.chip.source}")
    write(flags.json, facts(described, topology, sizing, length))
    return 0


def memory_table(sizing: Sizing) -> Table:
    table = Table("each device", "GiB", title="memory")
    rows = {
        "may use": sizing.usable_bytes,
        "weights": sizing.weight_bytes,
        "the draft's own weights": sizing.draft_bytes,
        "slots": sizing.slot_bytes,
        "temporaries of the largest program": sizing.temp_bytes,
        "KV pool, the largest": sizing.largest_pages * sizing.page_bytes,
    }
    for name, nbytes in rows.items():
        table.add_row(name, f"{nbytes / GIB:.2f}")
    return table


def program_table(sizing: Sizing) -> Table:
    table = Table("program", "compile s", "arguments GiB", "temp MiB", "collectives a step", "pool copies", "weight copies",
                  title="compiled programs")  # fmt: skip
    for report in sizing.reports:
        table.add_row(
            report.name, f"{report.compile_seconds:.1f}", f"{report.argument_bytes / GIB:.2f}",
            f"{report.temp_bytes / MIB:.1f}", collectives(report, sizing.catalogue.model.shape.layers),
            str(len(report.pool_copies)), str(len(report.weight_copies)),
        )  # fmt: skip
    return table


def collectives(report: Report, layers: int) -> str:
    """How often each runs in a step."""
    counts = Counter[str]()
    for each in report.collectives:
        counts[each.kind] += layers if each.is_in_loop else 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def roofline_table(sizing: Sizing) -> Table:
    table = Table("step", "tokens a row", "at least ms", "bound by", "memory ms", "flops ms", "links ms",
                  title="time of a step: a bound, not a measurement")  # fmt: skip
    for each in sizing.rooflines:
        cells = (each.seconds, each.memory, each.flops, each.links)
        least, *parts = (f"{seconds * 1e3:.3f}" for seconds in cells)
        table.add_row(each.step, str(each.length), least, each.bound, *parts)
    return table


def conclusion(sizing: Sizing, length: int) -> str:
    scheduler = sizing.catalogue.scheduler
    return (
        f"[bold]fits[/bold]: the largest pool holds {sizing.largest_pages} pages of {scheduler.page_size} ="
        f" {sizing.largest_tokens} tokens, {sizing.largest_tokens // length} requests of {length};"
        f" with {scheduler.slots} slots of {scheduler.max_len} the engine takes {scheduler.pool_tokens} of them"
    )


def facts(described: Described, topology: Topology, sizing: Sizing, length: int) -> dict:
    scheduler = sizing.catalogue.scheduler
    return {
        "model": described.name,
        "topology": topology.name,
        "fits": True,
        "chip": dataclasses.asdict(topology.chip),
        "devices": described.mesh.size,
        "dtype": described.model.dtype,
        "kv_dtype": sizing.catalogue.kv_dtype,
        "attention": {"backend": described.attention_backend, "reason": described.attention_reason},
        "bytes_of_a_device": {
            "usable": sizing.usable_bytes, "weights": sizing.weight_bytes, "draft": sizing.draft_bytes, "slots": sizing.slot_bytes,
            "temporaries": sizing.temp_bytes, "page": sizing.page_bytes,
        },
        "largest_pool": {"pages": sizing.largest_pages, "tokens": sizing.largest_tokens},
        "engine_pool": {"pages": scheduler.num_pages - 1, "tokens": scheduler.pool_tokens},
        "requests_of_length": {"length": length, "count": sizing.largest_tokens // length},
        "programs": [dataclasses.asdict(report) for report in sizing.reports],
        "roofline": [
            dataclasses.asdict(each) | {"seconds": each.seconds, "bound": each.bound} for each in sizing.rooflines
        ],
    }  # fmt: skip


def write(path: Path | None, content: dict) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
