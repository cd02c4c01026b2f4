"""The planner as a script: what it says without a compiler, of a wrong topology, and of a model that fits or does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.chips.compilers import import_path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "models" / "configs"


def plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/plan.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"} | environment,
    )  # fmt: skip


def test_an_unknown_topology_is_refused_with_examples() -> None:
    done = plan("--model", str(CONFIGS / "qwen3-0.6b.json"), "--topology", "v9:2x2")
    assert done.returncode == 2
    assert "v6e" in done.stderr and "Traceback" not in done.stderr


def test_without_the_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    try:
        is_beside_jax = import_path("tpu") is None
    except ValueError:
        is_beside_jax = False
    if is_beside_jax:
        pytest.skip("libtpu is installed beside jax")
    done = plan(
        "--model", str(CONFIGS / "qwen3-0.6b.json"), "--topology", "v6e:1", JAXSERVE_COMPILERS=str(tmp_path)
    )  # fmt: skip
    assert done.returncode == 2
    assert "get_compilers.py tpu" in done.stderr and "Traceback" not in done.stderr


def test_a_model_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    try:
        import_path("tpu")
    except ValueError as error:
        pytest.skip(str(error))
    fits = tmp_path / "fits.json"
    few = ("--max-len", "1024", "--slots", "8")
    done = plan("--model", str(CONFIGS / "qwen3-0.6b.json"), "--topology", "v6e:1", *few, "--json", str(fits))
    assert done.returncode == 0, done.stderr
    found = json.loads(fits.read_text())
    assert found["fits"] and found["topology"] == "v6e:1"
    large = tmp_path / "large.json"
    model = ("--model", str(CONFIGS / "llama3-8b.json"), "--dtype", "float32")
    done = plan(*model, "--topology", "v5e:1", *few, "--json", str(large))
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout and "Traceback" not in done.stderr
    found = json.loads(large.read_text())
    assert not found["fits"] and "15.75G" in found["reason"], "the compiler's own number of what the chip has"


@pytest.mark.full
def test_a_second_model_as_the_draft_is_planned_with_its_weights_and_its_pool(tmp_path: Path) -> None:
    try:
        import_path("tpu")
    except ValueError as error:
        pytest.skip(str(error))
    model, found = CONFIGS / "qwen3-0.6b.json", {}
    for draft in ("none", f"model:{model}"):
        out = tmp_path / "plan.json"
        few = ("--topology", "v6e:1", "--max-len", "1024", "--slots", "8", "--draft", draft, "--json", str(out))
        done = plan("--model", str(model), *few)
        assert done.returncode == 0, done.stderr
        found[draft.partition(":")[0]] = json.loads(out.read_text())
    alone, both = (found[name]["bytes_of_a_device"] for name in ("none", "model"))
    assert (alone["draft"], both["draft"]) == (0, both["weights"])
    assert both["page"] == 2 * alone["page"]
    assert found["model"]["largest_pool"]["pages"] < found["none"]["largest_pool"]["pages"] / 2
    assert {"propose", "verify", "accept", "draft"} <= {each["name"].split()[0] for each in found["model"]["programs"]}
    done = plan("--model", str(model), "--topology", "v6e:1", "--draft", "model:/nowhere")
    assert done.returncode == 2 and "draft='model:/nowhere'" in done.stderr and "Traceback" not in done.stderr
