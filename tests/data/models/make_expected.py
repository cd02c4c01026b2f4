"""Makes the expected logits of the tiny models: run it where torch and transformers are installed.

    python tests/data/models/make_expected.py     # from the repository's root

Made with transformers 5.23.0 and torch 2.13.0.  Writes <family>.npz: `logits` [2, 40, vocab] float32 of Hugging Face's
own implementation (eager attention, float32); and <family>.json: the config as transformers 5 writes it."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.models.tiny import CONFIGS, TOKENS, norm_center, random_tensor  # noqa: E402


def main() -> None:
    for family, settings in CONFIGS.items():
        config = transformers.AutoConfig.for_model(**settings)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
        assert type(model).__name__ == settings["architectures"][0], type(model)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.copy_(
                    torch.from_numpy(random_tensor(name, tuple(tensor.shape), norm_center=norm_center(settings)))
                )
            logits = model(torch.from_numpy(TOKENS).long()).logits.numpy()
        np.savez_compressed(HERE / f"{family}.npz", logits=logits.astype(np.float32))
        (HERE / f"{family}.json").write_text(json.dumps(config.to_dict(), indent=1, sort_keys=True) + "\n")
        print(
            f"{family:20s} {type(model).__name__:22s} logits {logits.std():.2f} (std) {np.abs(logits).max():.2f} (max)"
        )


if __name__ == "__main__":
    main()
