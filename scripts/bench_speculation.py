"""What each draft source gains, at 1, 8 and 32 rows: measured, and by the walltime formula.

Rows edit or repeat code, greedy.  Plain decode is measured beside each draft, on the same engine, in turns: requests that
opt out run the plain programs.  A source's rows are written when it is done, so an interrupted run goes on behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.config import StepTime
from jaxserve.sched.speculation import tokens_expected

ROOT = Path(__file__).resolve().parents[1]
EDIT_PROMPT = ROOT.parent / "shared" / "bench" / "spec_prompt.json"
SOURCES = ("ngram", "self:layers=8")
ROWS = (1, 8, 32)
FIXED = 3  # K that every number of rows has a program for
TOKENS = 72  # the edit prompt's own answer with SmolLM2 is one longer
TOKENS_OF_MANY = 40
TURNS = 2


def edit_prompt(llm: LLM) -> list[int]:
    """A prompt whose answer repeats most of it; the shared one for the models it was made for, else a like one."""
    if EDIT_PROMPT.is_file():
        prompts = json.loads(EDIT_PROMPT.read_text())
        for name in ("smollm2", "gemma3"):
            if llm.engine.info.name.startswith(name):
                return prompts[name]
    return repeat_prompts(llm, 1)[0]


def repeat_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Pieces of this repository's code, each to be said again."""
    made = []
    for path in sorted((ROOT / "jaxserve").rglob("*.py")):
        code = "".join(path.read_text().splitlines(keepends=True)[20:32])
        if len(made) < count and len(code) > 300:
            made.append(llm.tokenizer.encode(f"# version 1\n{code}\n# version 2, the same again\n{code[:120]}"))
    return made


def bench_source(options: dict, source: str) -> list[dict[str, float | str]]:
    """One source: a line for each number of rows."""
    rows = [count for count in ROWS if count <= options["slots"]]
    with LLM(**options | {"draft": source}) as llm:
        auto = {count: _speedup(llm, count) for count in rows}
        times = llm.engine.step_times
    with LLM(**options | {"draft": source, "speculate_tokens": FIXED}) as llm:
        fixed = {count: _speedup(llm, count) for count in rows}
    lines = []
    for count in rows:
        c, v = _costs(times, count)
        got, chosen = fixed[count], auto[count]
        a = got["accepted"] / max(got["tried"], 1)
        # In a call that verifies, rows without drafts take one token.
        tokens = got["row_calls"] + got["drafts"] * (tokens_expected(a, FIXED) - 1)
        plain = got["decode_calls"] - got["verify_calls"]
        predicted = tokens / count / (plain + got["verify_calls"] * (FIXED * c + v))
        lines.append({
            "source": source, "rows": count, "a": a, "c": c, "v": v, "share_verified": got["verify_calls"] / got["decode_calls"],
            "speedup": got["speedup"], "predicted": predicted, "auto": chosen["speedup"],
            "auto_share_verified": chosen["verify_calls"] / chosen["decode_calls"], "plain_tok_s": got["plain_tok_s"],
        })  # fmt: skip
    return lines


def _speedup(llm: LLM, count: int) -> dict[str, float]:
    """Drafts against none: the best of a few turns, of the time past the prompts' first tokens."""
    tokens = TOKENS if count == 1 else TOKENS_OF_MANY
    prompts = [edit_prompt(llm), *repeat_prompts(llm, count - 1)][:count]

    def run(length: int, *, drafts: bool) -> float:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, speculate=drafts)
        began = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - began

    # From here on the prompts are prefix hits, and the estimates have settled.
    run(tokens, drafts=True)
    plain, drafted, first = [], [], []
    before = llm.engine.load()
    for _ in range(TURNS):
        first.append(run(1, drafts=False))
        drafted.append(run(tokens, drafts=True))
    after = llm.engine.load()
    for _ in range(TURNS):
        plain.append(run(tokens, drafts=False))
    start = min(first)
    plain_seconds, seconds = min(plain) - start, min(drafted) - start
    made = {name: getattr(after, name) - getattr(before, name) for name in ("decode_calls", "verify_calls", "drafts")}
    accepted = after.accepted_tokens - before.accepted_tokens
    at = [a - b for a, b in zip(after.accepted_per_position, (*before.accepted_per_position, *(0,) * 15), strict=False)]
    # A proposal was tried up to its first wrong token: one try for each accepted, one more where it did not go through.
    whole = at[FIXED - 1] if len(at) >= FIXED else 0
    return made | {
        "speedup": plain_seconds / seconds, "plain_tok_s": count * (tokens - 1) / plain_seconds, "accepted": accepted,
        "tried": accepted + made["drafts"] - whole, "row_calls": made["decode_calls"] * count,
    }  # fmt: skip


def _costs(times: Sequence[StepTime], rows: int) -> tuple[float, float]:
    """c and v of FIXED drafts, from what was measured at the start."""
    decode = next(time for time in times if time.drafts == 0 and time.rows >= rows)
    verify = next(time for time in times if time.drafts == FIXED and time.rows >= rows)
    return verify.propose / FIXED / decode.total, verify.verify / decode.total


def bench_speculation(options: dict, folder: Path, console: Console) -> list[dict[str, float | str]]:
    """Every source; those that `folder` holds of the same model and options are not run again."""
    path = folder / "speculation.json"
    about = {"options": options, "tokens": [TOKENS, TOKENS_OF_MANY], "drafts": FIXED}
    done = json.loads(path.read_text()) if path.is_file() else {}
    lines = done["lines"] if done.get("about") == about else []
    for source in SOURCES:
        if all(line["source"] != source for line in lines):
            lines += bench_source(options, source)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"about": about, "lines": lines}, indent=1))
    console.print(_table(lines))
    return lines


def _table(lines: Sequence[dict[str, float | str]]) -> Table:
    names = {
        "source": "draft", "rows": "rows", "a": "a", "c": "c", "v": f"v (K={FIXED})", "share_verified": "calls verifying",
        "speedup": f"speedup, K={FIXED}", "predicted": "predicted", "auto": "speedup, auto",
        "auto_share_verified": "calls verifying", "plain_tok_s": "plain tok/s",
    }  # fmt: skip
    table = Table(
        *names.values(), title=f"speculation: greedy, {TOKENS} tokens of one row, {TOKENS_OF_MANY} of several"
    )
    for line in lines:
        cells = [line[name] for name in names]
        table.add_row(*[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return table
