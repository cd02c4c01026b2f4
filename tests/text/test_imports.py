"""The host floors start fast: nothing of the device half, and no tokenizer library before a tokenizer is loaded."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_heavy_is_imported_before_it_is_used():
    heavy = {"jax", "jaxlib", "flax", "tokenizers", "sentencepiece", "gguf", "safetensors", "google.protobuf", "jinja2"}
    program = (
        "import sys, checkpoints.hub, jaxserve.text, jaxserve.text.detokenize, jaxserve.text.vocabulary;"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
