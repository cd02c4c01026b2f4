"""How often drafts are accepted in sampled text: by coupling, as here, and by the rejection rule of Leviathan et al. 2023.

    python scripts/acceptance.py --out acceptance.json

The target writes texts at temperature 1, from its whole distribution and fixed seeds.  At every position each draft tells
its own distribution q beside the target's p, from the same past; both rules then have exact chances, in float64:
rejection accepts with sum_v min(p_v, q_v); coupling when both draw the same token from one Gumbel noise, which is

    sum_v 1 / sum_w max(p_w / p_v, q_w / q_v)        (Daliri, Musco and Suresh 2024)

The share of positions at which the two did draw the same token is printed beside it.  Prompt lookup proposes one token
with certainty: both rules accept it with its chance under p."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from checkpoints.hub import resolve
from jaxserve.catalogue import Catalogue
from jaxserve.config import DEFAULT_MODEL, EngineConfig
from jaxserve.device.attention import make_attend
from jaxserve.device.draft_model import SecondModel
from jaxserve.device.noise import gumbel
from jaxserve.device.selfdraft import QuantisedSelf
from jaxserve.device.sharding import make_mesh
from jaxserve.device.slots import fill_slots
from jaxserve.device.speculate import FirstLayers, NGram
from jaxserve.device.steps import HEAD, place
from jaxserve.drafts import make_draft
from jaxserve.models.loading import load_params
from jaxserve.start import catalogue_of
from jaxserve.text import Tokenizer, load_tokenizer

PROMPTS = (
    "The capital of France is", "Once upon a time there was a river that", "To bake bread you need",
    "The history of the printing press began", "Photosynthesis is the process by which", "Dear Sir or Madam,\n",
    "In economics, inflation means", "Q: How do vaccines work?\nA:",
)  # fmt: skip
PROMPT_LEN = 64  # tokens of a prompt at the most


@dataclass
class Tally:
    """Of one draft, over all positions at which it proposed."""

    coupling: list[float] = field(default_factory=list)  # exact chances
    rejection: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)  # what was drawn


def coupling_chance(p: np.ndarray, q: np.ndarray) -> float:
    """Of two distributions [V] float64, drawn from with one Gumbel noise: the chance that both give the same token.

    p_w / p_v >= q_w / q_v where q_w / p_w <= q_v / p_v: so in the order of q / p each inner sum is two partial sums."""
    both = (p > 0) & (q > 0)
    order = np.argsort(q[both] / p[both])
    p_in, q_in = p[both][order], q[both][order]
    p_outside, q_outside = p[~both].sum(), q[~both].sum()  # where one is 0 the other's ratio is the larger
    ps = p_outside + np.cumsum(p_in)
    qs = q_outside + q_in.sum() - np.cumsum(q_in)
    return float(np.sum(1 / (ps / p_in + qs / q_in)))


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """Prose, and code of this repository to be said again."""
    here = Path(__file__).resolve().parents[1] / "jaxserve"
    code = ["".join(path.read_text().splitlines(keepends=True)[-4:]) for path in sorted(here.glob("*.py"))]
    code = [f"{text}\n{text}\n{text}" for text in code if len(text) > 60][: len(PROMPTS)]
    return [tokenizer.encode(text)[:PROMPT_LEN] for text in (*PROMPTS, *code)]


def measure(reference: str, sources: Sequence[str], *, tokens: int, seed: int) -> dict[str, Tally]:
    files, mesh = resolve(reference), make_mesh(jax.devices(), 1)
    model, params = load_params(files, dtype="float32", mesh=mesh)
    prompts = prompts_of(load_tokenizer(files))
    rows, max_len = len(prompts), -(-(PROMPT_LEN + tokens) // 64) * 64
    config = EngineConfig(slots=rows, max_len=max_len, dtype="float32")
    pages = rows * max_len // config.page_size
    catalogue = catalogue_of(config, model=model, draft=None, mesh=mesh, backend="xla", pages=pages)
    drafts = {source: make_draft(source, model, _refuse) for source in sources}
    weights = {source: draft.weights(params) for source, draft in drafts.items() if draft}
    packed = np.zeros((rows, HEAD + max_len // config.page_size), np.int32)
    packed[:, 0], packed[:, 1] = range(rows), 2
    packed[:, HEAD:] = 1 + np.arange(pages).reshape(rows, -1)
    step = jax.jit(partial(_step, model, drafts, catalogue), donate_argnums=2)
    text = np.zeros((rows, max_len), np.int32)
    lengths = np.array([len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    seeds = np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32)
    pool, tallies = catalogue.new_pool(), {source: Tally() for source in sources}
    for length in range(1, PROMPT_LEN + tokens):
        drawn, logits, proposed, pool = step(params, weights, pool, text, np.int32(length), packed, seeds)
        is_free = (lengths <= length) & (length < lengths + tokens)
        text[:, length] = np.where(length < lengths, text[:, length], drawn["target"])
        for row in np.flatnonzero(is_free):
            _count(tallies, int(row), drawn, logits, proposed)
    return tallies


def _refuse(reference: str) -> SecondModel:
    raise ValueError(f"draft='model:{reference}' is not measured here: name ngram or self: drafts")


def _step(model, drafts, catalogue: Catalogue, params, weights, pool, text, length, packed, seeds):
    """Every draft's answer to the same past, and the target's, which writes its own K/V over theirs."""
    rows = text.shape[0]
    inputs = place(packed, jnp.full((rows,), length - 1), jnp.ones((rows,), jnp.int32), 1)
    attend = make_attend(inputs, backend=catalogue.backend, mesh=catalogue.mesh)
    newest = jax.lax.dynamic_slice_in_dim(text, length - 1, 1, 1)
    noise = gumbel(seeds, jnp.full((rows,), length), model.shape.vocab)
    logits, proposed = {}, {}
    for source, draft in drafts.items():
        match draft:
            case FirstLayers() | QuantisedSelf():
                hidden, pool = draft.model.forward(weights[source], newest, inputs.positions, pool, attend)
                logits[source] = draft.model.logits(weights[source], hidden)[:, 0]
            case NGram():
                slots = fill_slots(catalogue.new_slots(), length=length, limit=text.shape[1])
                slots = replace(slots, tokens=jnp.pad(text, ((0, 1), (0, 0))))
                found, _ = draft.propose(
                    {}, pool, slots, packed, drafts=1, backend=catalogue.backend, mesh=catalogue.mesh
                )
                proposed[source] = jnp.where(found.count > 0, found.tokens[:, 0], -1)
    hidden, pool = model.forward(params, newest, inputs.positions, pool, attend)
    logits["target"] = model.logits(params, hidden)[:, 0]
    drawn = {name: jnp.argmax(each + noise, axis=-1) for name, each in logits.items()}
    return drawn, logits, proposed, pool


def _count(tallies: dict[str, Tally], row: int, drawn, logits, proposed) -> None:
    p = _softmax(np.asarray(logits["target"][row]))
    for source, tally in tallies.items():
        if source in proposed:
            token = int(proposed[source][row])
            if token < 0:
                continue
            chances = p[token], p[token]
        else:
            token = int(drawn[source][row])
            q = _softmax(np.asarray(logits[source][row]))
            chances = coupling_chance(p, q), np.minimum(p, q).sum()
        tally.coupling.append(float(chances[0]))
        tally.rejection.append(float(chances[1]))
        tally.agreed.append(token == int(drawn["target"][row]))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--drafts", default="ngram,self:layers=8,self:int8,self:int4", help="sources, comma-separated")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("acceptance.json"))
    args = parser.parse_args(arguments)
    try:
        tallies = measure(args.model, args.drafts.split(","), tokens=args.tokens, seed=args.seed)
    except ValueError as error:
        parser.error(str(error))
    lines = [
        {"draft": source, "positions": len(tally.agreed)}
        | {name: float(np.mean(getattr(tally, name))) for name in ("coupling", "agreed", "rejection") if tally.agreed}
        for source, tally in tallies.items()
    ]
    table = Table("draft", "positions", "coupling", "drawn the same", "rejection", title="accepted, temperature 1")
    for line in lines:
        shares = [f"{100 * line[name]:.1f}%" if name in line else "-" for name in ("coupling", "agreed", "rejection")]
        table.add_row(str(line["draft"]), str(line["positions"]), *shares)
    Console(width=120).print(table)
    about = {"model": args.model, "tokens": args.tokens, "seed": args.seed, "jax": jax.__version__}
    args.out.write_text(json.dumps(about | {"lines": lines}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
