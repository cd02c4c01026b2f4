"""Both acceptance rules: the exact chances against their definitions, and the whole script on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from scripts.acceptance import coupling_chance, main
from tests.tiny_model import write_tiny_model


def by_definition(p: np.ndarray, q: np.ndarray) -> float:
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum([1 / np.maximum(p / p[v], q / q[v]).sum() for v in both])


def test_the_chance_of_a_coupled_draw_is_its_definition_and_what_is_drawn() -> None:
    rng = np.random.default_rng(0)
    for concentration in (0.1, 1.0, 10.0):
        p, q = rng.dirichlet([concentration] * 12), rng.dirichlet([concentration] * 12)
        p[0] = q[1] = p[2] = q[2] = 0
        p, q = p / p.sum(), q / q.sum()
        chance = coupling_chance(p, q)
        assert abs(chance - by_definition(p, q)) < 1e-12
        assert coupling_chance(p, p) > 1 - 1e-12
        rejection = np.minimum(p, q).sum()
        assert rejection / (2 - rejection) - 1e-12 <= chance <= rejection + 1e-12  # the bound that the paper proves
        noise = rng.gumbel(size=(100_000, 12))
        with np.errstate(divide="ignore"):
            agreed = np.mean((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1))
        assert abs(agreed - chance) < 5 * np.sqrt(chance * (1 - chance) / 100_000)


def test_the_script_tells_both_rules_over_the_same_contexts(tmp_path: Path) -> None:
    model, out = write_tiny_model(tmp_path / "tiny"), tmp_path / "acceptance.json"
    arguments = ["--model", str(model), "--drafts", "ngram,self:layers=1,self:int8", "--tokens", "24"]
    assert main([*arguments, "--out", str(out)]) == 0
    lines = {line["draft"]: line for line in json.loads(out.read_text())["lines"]}
    assert lines["self:int8"]["positions"] == lines["self:layers=1"]["positions"] == 16 * 24
    for line in lines.values():
        if line["positions"]:
            assert 0 < line["coupling"] <= line["rejection"] + 1e-9
            error = np.sqrt(line["coupling"] * (1 - line["coupling"]) / line["positions"])
            assert abs(line["agreed"] - line["coupling"]) < 5 * error + 1e-3
    assert lines["ngram"]["coupling"] == lines["ngram"]["rejection"]
    assert lines["self:int8"]["coupling"] > lines["self:layers=1"]["coupling"]
