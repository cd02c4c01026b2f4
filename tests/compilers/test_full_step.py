"""The engine's own decode and prefill programs, through the real TPU and CUDA compilers, on chips that are not here.

In the default run: Qwen3-0.6B on four v6e chips (all 28 layers, a scan) and on one H200 (4 of its 28 layers, which the
GPU's program spells out one by one).  `-m full`: both models, whole, on five topologies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from jaxserve.chips import parse_topology
from tests.compilers.harness import run_worker

DECODE, SAMPLE = "decode 32", "sample 32"


@dataclass(frozen=True)
class Case:
    topology: str
    model: str
    layers: int = 0  # 0 = all

    @property
    def prefill(self) -> str:
        """Over eight devices the hidden states of 256 tokens of Qwen3-0.6B have the very shape of its output weight's part
        on one of them, and nobody could tell a copy of the one from a sum of the other."""
        is_ambiguous = self.model == "qwen3-0.6b" and parse_topology(self.topology).num_devices == 8
        return "prefill 1x128" if is_ambiguous else "prefill 1x256"

    @property
    def platform(self) -> str:
        return parse_topology(self.topology).chip.platform

    def report(self, kind: str) -> tuple[dict, dict]:
        """-> facts of the whole, and of its decode or prefill program."""
        found = self.facts(programs=(DECODE, self.prefill))
        return found, found["programs"][{"decode": DECODE, "prefill": self.prefill}[kind]]

    def facts(self, *options: str, programs: tuple[str, ...]) -> dict:
        layers = ("--layers", str(self.layers)) if self.layers else ()
        worker = "tests.compilers.step_worker"
        (found,) = run_worker(worker, self.topology, self.model, *programs, *layers, *options, platform=self.platform)
        return found

    def __str__(self) -> str:
        return f"{f'{self.layers} layers of ' if self.layers else ''}{self.model} on {self.topology}"


DEFAULT = [Case("v6e:2x2", "qwen3-0.6b"), Case("h200:1", "qwen3-0.6b", layers=4)]
WHOLE = [
    Case(topology, model)
    for model in ("qwen3-0.6b", "llama3-8b")
    for topology in ("v5e:2x4", "v6e:2x2", "tpu7x:2x2x1", "h200:1", "h200:4")
]
CASES = [*DEFAULT, *(pytest.param(case, marks=pytest.mark.full) for case in WHOLE if case not in DEFAULT)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_program = pytest.mark.parametrize("kind", ["decode", "prefill"])


@every_case
@every_program
def test_the_pool_is_written_in_place(case: Case, kind: str) -> None:
    found, report = case.report(kind)
    assert report["alias_bytes"] >= found["pool_bytes"], "the donated pool is not the program's output"
    assert not report["pool_copies"], report["pool_copies"]
    assert report["temp_bytes"] < 0.05 * found["pool_bytes"]


@every_case
@every_program
def test_no_weight_is_copied(case: Case, kind: str) -> None:
    found, report = case.report(kind)
    assert not report["weight_copies"], report["weight_copies"]
    assert report["temp_bytes"] < found["largest_weight_bytes"]


@every_case
@every_program
def test_weights_are_loaded_in_whole_tiles(case: Case, kind: str) -> None:
    """Gate and up as [D, 2, F] fill a quarter of each TPU tile: that one load then takes most of the step."""
    narrow = case.report(kind)[1]["narrow_weights"]
    assert not narrow, narrow


@every_case
@every_program
def test_devices_talk_once_for_attention_once_for_the_mlp_and_for_the_vocabulary(case: Case, kind: str) -> None:
    """A sum over devices after each row-split matrix; one for the embedding, whose rows are split; one gather of the head's
    logits (of a single row, XLA may spell it as a sum)."""
    found, report = case.report(kind)
    devices, layers = found["devices"], found["layers"]
    counts = Counter[str]()
    for collective in report["collectives"]:
        counts[collective["kind"]] += layers if collective["is_in_loop"] else 1
    if devices == 1:
        assert not counts
    else:
        one_of = [{"all-reduce": 2 * layers + 1, "all-gather": 1}, {"all-reduce": 2 * layers + 2}]
        assert counts in one_of, counts


@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_float32_products_are_exact(case: Case) -> None:
    """Neither TF32 on a GPU nor one bfloat16 pass on a TPU."""
    found = Case(case.topology, case.model, layers=2).facts("--dtype", "float32", programs=(DECODE,))
    dots = found["programs"][DECODE]["dots"]
    assert dots and all(dot.startswith("f32") and dot.endswith("highest,highest") for dot in dots), dots
    assert found["tf32"] == 0
    assert found["ptx"] > 0 or case.platform == "tpu"


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_an_8_bit_pool_and_its_scales_are_written_in_place(case: Case, kv_dtype: str) -> None:
    options = ("--kv-dtype", kv_dtype, "--page-size", "128")
    found = case.facts(*options, programs=(DECODE, case.prefill))
    for report in found["programs"].values():
        assert report["alias_bytes"] >= found["pool_bytes"]
        assert not report["pool_copies"], report["pool_copies"]
        assert report["temp_bytes"] < 0.05 * found["pool_bytes"]


DRAFTED = [
    pytest.param(
        case,
        draft,
        id=f"{draft}, {case}",
        marks=[] if case is DEFAULT[0] and draft == "self:int8" else pytest.mark.full,
    )
    for case in DEFAULT
    for draft in ("self:int8", "self:layers=2", "itself")
]


@pytest.mark.parametrize(("case", "draft"), DRAFTED)
def test_drafts_and_their_verification_copy_no_pool_and_no_weight(case: Case, draft: str) -> None:
    """ "itself": a second model, with a pool of its own."""
    own = (f"draft {case.prefill}",) if draft == "itself" else ()
    found = case.facts("--draft", draft, programs=(SAMPLE, "propose 32", "verify 32x4", *own))
    sampler = found["programs"].pop(SAMPLE)
    for name, report in found["programs"].items():
        pool = found["pool_bytes" if name.startswith("verify") or not own else "draft_pool_bytes"]
        assert pool and report["alias_bytes"] >= pool, f"{name}: the donated pool is not the program's output"
        assert not report["pool_copies"], (name, report["pool_copies"])
        assert not report["weight_copies"], (name, report["weight_copies"])
        # A draft is drawn as a token is; the logits of a row's four tokens a TPU holds in tiles of eight, as they come and
        # as they go.
        logits = 4 * 32 * 4 * found["vocab"] * 4 if name.startswith("verify") else sampler["temp_bytes"]
        assert report["temp_bytes"] < 0.05 * pool + logits, (name, sampler["temp_bytes"])


@pytest.mark.full
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_the_sampler_writes_its_slots_in_place(case: Case) -> None:
    found = case.facts(programs=(SAMPLE,))
    report = found["programs"][SAMPLE]
    assert report["alias_bytes"] >= found["slot_bytes"]
    assert not report["collectives"]
