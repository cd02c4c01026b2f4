"""Compiles the engine's own programs of one model for one topology and prints what the compiler says.

python -m tests.compilers.step_worker v6e:2x2 qwen3-0.6b "decode 32" "prefill 1x256" [--layers 4] [--dtype float32]"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from jaxserve.chips import parse_topology
from jaxserve.chips.compilers import use_compiler
from jaxserve.config import EngineConfig
from tests.compilers.dumps import dump_into

CONFIGS = Path(__file__).parents[1] / "data" / "models" / "configs"
PAGES = 1024  # of 64 tokens: 16 sequences of 4,096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology")
    parser.add_argument("model")
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--draft", default="none", help='as the engine takes it, or "itself": the model as its own')
    flags = parser.parse_args()
    topology = parse_topology(flags.topology)
    use_compiler(topology.chip.platform)
    with tempfile.TemporaryDirectory() as folder:
        dump_into(folder)
        print(json.dumps(compile_all(flags, Path(folder))))


def compile_all(flags: argparse.Namespace, dump: Path) -> dict:
    import jax

    from jaxserve.ahead import compile_ahead, describe, local_bytes, read_config

    topology = parse_topology(flags.topology)
    _, hf = read_config(str(CONFIGS / f"{flags.model}.json"))
    if flags.layers:
        hf = {**hf, "num_hidden_layers": flags.layers}
    draft = flags.draft
    if draft == "itself":
        itself = dump / "itself.json"
        itself.write_text(json.dumps(hf))
        draft = f"model:{itself}"
    config = EngineConfig(
        tensor_parallel=topology.num_devices, dtype=flags.dtype, max_len=4096, attention_backend=flags.attention,
        kv_dtype=flags.kv_dtype, page_size=flags.page_size, draft=draft,
        speculate_tokens="0" if draft == "none" else "3",
    )  # fmt: skip
    described = describe(hf, topology, config)
    catalogue = described.catalogue(config, PAGES)
    reports = compile_ahead(described, catalogue, flags.programs)
    return {
        "attention": described.attention_backend,
        "reason": described.attention_reason,
        "layers": described.model.config.layers,
        "devices": described.mesh.size,
        "vocab": described.model.shape.vocab,
        "pool_bytes": catalogue.page_bytes * catalogue.scheduler.num_pages,
        "draft_pool_bytes": catalogue.draft_page_bytes * catalogue.scheduler.num_pages,
        "slot_bytes": catalogue.slot_bytes,
        "largest_weight_bytes": max(local_bytes(leaf) for leaf in jax.tree.leaves(described.params)),
        "programs": {report.name: dataclasses.asdict(report) for report in reports},
        "tf32": sum(path.read_text().count("tf32") for path in dump.rglob("*.ptx")),
        "ptx": len(list(dump.rglob("*.ptx"))),
    }


if __name__ == "__main__":
    main()
