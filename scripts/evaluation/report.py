"""What a run found, as files: `report.json` (everything), `report.md` (to read), samples if asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lm_eval.utils import handle_non_serializable, make_table

from jaxserve.config import EngineConfig
from server.backend import Info, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run as the engine saw it."""

    info: Info
    config: EngineConfig
    load: Numbers
    seconds: float
    num_truncated: int


def tables(results: Mapping) -> str:
    """The scores as Markdown tables, groups below the tasks."""
    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def write_report(folder: Path, results: Mapping, run: Run) -> None:
    """`results` is what `lm_eval.simple_evaluate` returns; its samples go to one file per task."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = {key: value for key, value in results.items() if key != "samples"}
    model, load = asdict(run.info), asdict(run.load)  # pyright: ignore[reportArgumentType]  (both are dataclasses)
    scores["jaxserve"] = {
        "model": model,
        "options": asdict(run.config),
        "load": load,
        "seconds": round(run.seconds, 1),
        "truncated_texts": run.num_truncated,
    }
    _write_json(folder / "report.json", scores)
    (folder / "report.md").write_text(_markdown(results, run, model, load), encoding="utf-8")
    for task, samples in (results.get("samples") or {}).items():
        lines = (json.dumps(sample, ensure_ascii=False, default=handle_non_serializable) for sample in samples)
        (folder / f"samples_{task}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _markdown(results: Mapping, run: Run, model: Mapping, load: Mapping) -> str:
    facts = [
        f"* {model['name']} ({model['architecture']}, {model['dtype']} on {model['device']},"
        f" attention {model['attention_backend']}, context {model['max_len']})",
        f"* lm-evaluation-harness {results['lm_eval_version']}, {_count(results)}, {run.seconds:.0f} s",
    ]
    if "prompt_tokens" in load:
        facts.append(
            f"* {load['prompt_tokens']} prompt tokens, {load['prefix_hit_tokens']} of them prefix hits;"
            f" {load['completion_tokens']} tokens generated"
        )
    if run.num_truncated:
        facts.append(f"* **{run.num_truncated} texts were longer than the context and lost tokens on the left**")
    return f"# Evaluation of {model['name']}\n\n" + "\n".join(facts) + "\n\n" + tables(results)


def _count(results: Mapping) -> str:
    counts = [f"{task} {n['effective']} of {n['original']}" for task, n in results.get("n-samples", {}).items()]
    return "documents: " + ", ".join(counts)


def _write_json(path: Path, content: Mapping) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, default=handle_non_serializable)
    path.write_text(text + "\n", encoding="utf-8")
