"""What each draft source gains, at 1, 8 and 32 rows: measured, and by the walltime formula.

Rows edit or repeat code, greedy.  Plain decode is measured beside each draft, on the same engine, in turns: requests that
opt out run the plain programs.  A source's rows are written when it is done, so an interrupted run goes on behind it."""

from __future__ import annotations

import collections
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.config import StepTime
from jaxserve.engine import Load
from jaxserve.request import Request
from jaxserve.sched.speculation import tokens_expected

ROOT = Path(__file__).resolve().parents[1]
EDIT_PROMPT = ROOT.parent / "shared" / "bench" / "spec_prompt.json"
SOURCES = ("ngram", "self:layers=8", "self:int8", "self:int4")
ROWS = (1, 8, 32)
FIXED = 3  # K that every number of rows has a program for
TOKENS = 72  # the edit prompt's own answer with SmolLM2 is one longer
TOKENS_OF_MANY = 40
TURNS = 4
COUNTED = ("decode_calls", "verify_calls", "drafts", "accepted_tokens")


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
        a = got["a"]
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
    """Drafts against none: the medians of a few turns, which alternate, so that a busy machine slows both."""
    per_row = TOKENS if count == 1 else TOKENS_OF_MANY
    prompts = [edit_prompt(llm), *repeat_prompts(llm, count - 1)][:count]
    # From here on the prompts are prefix hits, and the estimates have settled.
    _window(llm, prompts, per_row, drafts=True)
    plain, drafted, made = [], [], Counter()
    for _ in range(TURNS):
        plain.append(_window(llm, prompts, per_row, drafts=False)[0])
        seconds, counts = _window(llm, prompts, per_row, drafts=True)
        drafted.append(seconds)
        made += counts
    # A proposal was tried up to its first wrong token: one try for each accepted, one more where it did not go through.
    tried = made["accepted_tokens"] + made["drafts"] - made[f"whole {FIXED}"]
    return {name: float(made[name]) for name in COUNTED} | {
        "speedup": median(plain) / median(drafted), "plain_tok_s": count / median(plain),
        "a": made["accepted_tokens"] / max(tried, 1), "row_calls": made["decode_calls"] * count,
    }  # fmt: skip


def _window(llm: LLM, prompts: Sequence[list[int]], per_row: int, *, drafts: bool) -> tuple[float, Counter[str]]:
    """Seconds for a token of each row, all of them at work, and what was counted meanwhile.

    From when every row has its first tokens until there are `per_row` more for each on average; then all are ended."""
    params = SamplingParams(temperature=0, max_tokens=12 * per_row, ignore_eos=True, detokenize=False, speculate=drafts)
    if len(prompts) == 1:
        params = replace(params, max_tokens=2 * per_row)
    idle = llm.engine.load()
    requests = [Request(id=f"row {i}", prompt_ids=tuple(ids), params=params) for i, ids in enumerate(prompts)]
    handles = [llm.engine.submit(request) for request in requests]
    rows = len(prompts)
    first = _wait(
        llm, lambda load: load.running == rows and load.completion_tokens - idle.completion_tokens >= 2 * rows
    )
    began = time.perf_counter()
    last = _wait(llm, lambda load: load.completion_tokens - first.completion_tokens >= per_row * rows)
    seconds = time.perf_counter() - began
    for handle in handles:
        handle.abort()
    for handle in handles:
        collections.deque(handle, maxlen=0)
    tokens = last.completion_tokens - first.completion_tokens
    return seconds * rows / tokens, _counts(last) - _counts(first)


def _wait(llm: LLM, is_there: Callable[[Load], bool]) -> Load:
    while not is_there(load := llm.engine.load()):
        time.sleep(0.001)
    return load


def _counts(load: Load) -> Counter[str]:
    whole = {f"whole {position + 1}": count for position, count in enumerate(load.accepted_per_position)}
    return Counter({name: getattr(load, name) for name in COUNTED} | whole)


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
