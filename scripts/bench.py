"""Measure an engine on this machine: decode, batches, shared prefixes, starts, host time per step.

Every figure is a ratio to something measured in the same run, because machines are noisy: read bandwidth and matmul
rate come first.  Prints a table, writes JSON and a PNG plot.  `--only decode,uneven` runs parts."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.config import DEFAULT_MODEL
from scripts.bench_speculation import bench_speculation

CONSOLE = Console(width=120)
WORKLOAD = Path(__file__).resolve().parents[2] / "shared" / "bench" / "workload.json"


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def fastest_seconds(run: Callable[[], object], repeats: int) -> float:
    return min(median_seconds(run, 1) for _ in range(repeats))


def measure_machine() -> dict[str, float]:
    """The two ceilings: bytes read per second, float32 multiply-adds per second (two operations each)."""
    big = jnp.ones((64 * 2**20,), jnp.float32)
    read = jax.jit(lambda x: x.sum())
    read(big).block_until_ready()
    read_seconds = fastest_seconds(lambda: read(big).block_until_ready(), 7)
    # A matrix-vector product reads its matrix in the access pattern that decode has.
    matrix, vector = jnp.ones((8192, 8192), jnp.float32), jnp.ones((1, 8192), jnp.float32)
    product = jax.jit(lambda x, w: jnp.dot(x, w, precision="highest"))
    product(vector, matrix).block_until_ready()
    vector_seconds = fastest_seconds(lambda: product(vector, matrix).block_until_ready(), 7)
    square = jnp.ones((2048, 2048), jnp.float32)
    product(square, square).block_until_ready()
    square_seconds = fastest_seconds(lambda: product(square, square).block_until_ready(), 7)
    return {
        "read_gb_s": max(big.nbytes / read_seconds, matrix.nbytes / vector_seconds) / 1e9,
        "matmul_gflop_s": 2 * 2048**3 / square_seconds / 1e9,
    }


def load_workload(vocab: int) -> dict:
    """The shared workload, or one of the same kind made from a seed where there is none."""
    if WORKLOAD.is_file():
        return json.loads(WORKLOAD.read_text())
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return rng.integers(3, vocab, int(length)).tolist()

    prompt_lens, output_lens = (
        np.exp(rng.uniform(np.log(16), np.log(512), 64)),
        np.exp(rng.uniform(np.log(8), np.log(256), 64)),
    )
    prefix = ids(448)
    return {
        "uneven": [{"prompt_ids": ids(p), "output_len": int(o)} for p, o in zip(prompt_lens, output_lens, strict=True)],
        "shared_prefix": {"prompts": [prefix + ids(32) for _ in range(32)], "output_len": 32},
    }


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **fields)


def decode_rate(llm: LLM, rows: int, *, prompt_len: int = 64, output_len: int = 128) -> float:
    """Tokens per second of all rows together, prefill excluded: the difference of a long and a short run."""
    rng = np.random.default_rng(rows)
    prompts = [rng.integers(3, llm.engine.info.vocab, prompt_len).tolist() for _ in range(rows)]

    def run(length: int) -> float:
        return median_seconds(lambda: llm.generate(prompts, greedy(length)), 3)

    short = 8
    run(short)  # from here on the prompts are prefix hits in every run
    return rows * (output_len - short) / (run(output_len) - run(short))


def bench_decode(llm: LLM, machine: dict[str, float]) -> dict[str, float]:
    params = llm.engine.info.parameters
    itemsize = 4 if llm.engine.info.dtype == "float32" else 2
    byte_bound = machine["read_gb_s"] * 1e9 / (params * itemsize)
    flop_bound = machine["matmul_gflop_s"] * 1e9 / (2 * params)
    rates = {rows: decode_rate(llm, rows) for rows in (1, 8, 32) if rows <= llm.engine.config.slots}
    found = {f"decode_{rows}_tok_s": rate for rows, rate in rates.items()}
    found["decode_1_of_byte_bound"] = rates[1] / byte_bound
    if 32 in rates:
        found["decode_32_of_flop_bound"] = rates[32] / flop_bound
    return found


def bench_uneven(options: dict, workload: dict) -> dict[str, float]:
    """Requests of very different lengths at once, and one after the other.  Without prefix reuse, so that it repeats."""
    items = workload["uneven"]
    prompts = [item["prompt_ids"] for item in items]
    params = [greedy(item["output_len"]) for item in items]
    with LLM(**options, prefix_reuse=False) as llm:
        batched = median_seconds(lambda: llm.generate(prompts, params), 3)

        def serially() -> None:
            for prompt, each in zip(prompts, params, strict=True):
                llm.generate([prompt], each)

        serial = median_seconds(serially, 1)
    tokens = sum(item["output_len"] for item in items)
    return {
        "uneven_s": batched,
        "uneven_tok_s": tokens / batched,
        "uneven_one_at_a_time_s": serial,
        "uneven_speedup": serial / batched,
    }


def bench_shared_prefix(options: dict, workload: dict) -> dict[str, float]:
    shared = workload["shared_prefix"]
    found = {}
    for name, reuse in (("off", False), ("on", True)):
        with LLM(**options, prefix_reuse=reuse) as llm:
            run = lambda llm=llm: llm.generate(shared["prompts"], greedy(shared["output_len"]))  # noqa: E731
            found[f"shared_prefix_{name}_s"] = median_seconds(run, 1)
    return found | {"shared_prefix_speedup": found["shared_prefix_off_s"] / found["shared_prefix_on_s"]}


def bench_host(llm: LLM) -> dict[str, float]:
    """CPU time of the loop's thread per step at full slots, stop strings on half of the rows."""
    slots = llm.engine.config.slots
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, llm.engine.info.vocab, 32).tolist() for _ in range(slots)]
    plain = greedy(128)
    stopping = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True, stop=["\x00never", "nor\x00this"])
    llm.generate(prompts, greedy(2))
    before = llm.engine.load()
    llm.generate(prompts, [plain if i % 2 else stopping for i in range(slots)])
    after = llm.engine.load()
    steps = after.steps - before.steps
    return {"host_ms_per_step": (after.host_seconds - before.host_seconds) / steps * 1e3, "host_steps": steps}


def bench_start(options: dict) -> dict[str, float]:
    """A whole process, from its start to ready, with an empty and a warm compile cache."""
    script = (
        "import json, sys, time; began = time.perf_counter(); sys.path.insert(0, sys.argv[1]);"
        "from jaxserve import LLM; from jaxserve.programs import compile_counter; compile_counter();"
        "llm = LLM(**json.loads(sys.argv[2])); ready = time.perf_counter() - began;"
        "print(json.dumps([ready, compile_counter().cache_misses]))"
    )
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            arguments = [str(Path(__file__).resolve().parents[1]), json.dumps(options | {"compile_cache": cache})]
            done = subprocess.run(
                [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
            )
            seconds, misses = json.loads(done.stdout.splitlines()[-1])
            found |= {f"start_{name}_s": seconds, f"start_{name}_compiled": misses}
    return found


def plot(results: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [rows for rows in (1, 8, 32) if f"decode_{rows}_tok_s" in results]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.bar([str(n) for n in rows], [results[f"decode_{n}_tok_s"] for n in rows], color="#3a6ea5")
    left.set(title="decode", xlabel="rows", ylabel="tokens per second")
    speedups = {name: results[name] for name in ("uneven_speedup", "shared_prefix_speedup") if name in results}
    right.bar(
        [name.removesuffix("_speedup").replace("_", " ") for name in speedups], list(speedups.values()), color="#7a9e5f"
    )
    right.set(title="speedups", ylabel="times")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument(
        "--only", default="decode,uneven,shared,host,speculation,start", help="parts to run, comma-separated"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for bench.json and bench.png")
    parser.add_argument(
        "--speculation", action="store_const", dest="only", const="speculation", help="the same as --only speculation"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    parts = set(args.only.split(","))
    options = {"model": args.model, "dtype": args.dtype, "slots": args.slots, "max_len": args.max_len}
    options["pool"] = str(args.slots * args.max_len)
    results: dict[str, float] = dict(measure_machine())
    with LLM(**options) as llm:
        workload = load_workload(llm.engine.info.vocab)
        if "decode" in parts:
            results |= bench_decode(llm, results)
        if "host" in parts:
            results |= bench_host(llm)
        hardware = llm.engine.info.device
    if "uneven" in parts:
        results |= bench_uneven(options, workload)
    if "shared" in parts:
        results |= bench_shared_prefix(options, workload)
    if "speculation" in parts:
        for line in bench_speculation(options, args.out, CONSOLE):
            name = f"{line['source']}_{line['rows']}"
            results |= {f"{name}_{kind}": float(line[kind]) for kind in ("speedup", "predicted", "auto")}
    if "start" in parts:
        results |= bench_start(options)

    table = Table("figure", "value", title=f"{args.model} on {hardware}, {os.cpu_count()} cores, jax {jax.__version__}")
    for name, value in results.items():
        table.add_row(name, f"{value:.4g}")
    CONSOLE.print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"model": args.model, "options": options, "machine": platform.processor() or platform.machine()}
    (args.out / "bench.json").write_text(json.dumps(about | {"jax": jax.__version__, "results": results}, indent=1))
    plot(results, args.out / "bench.png")
    CONSOLE.print(f"written to {args.out}/bench.json and {args.out}/bench.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
