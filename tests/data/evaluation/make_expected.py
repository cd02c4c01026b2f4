"""Makes the expected numbers of the local tasks on the tests' tiny model: run it where torch and transformers are
installed.

    python tests/data/evaluation/make_expected.py     # from the repository's root

Made with transformers 5.23.0 and torch 2.13.0; float32 logits, log-softmax and sums in float64.  Writes expected.json
and greedy.jsonl.  Nothing of jaxserve nor of lm-evaluation-harness is used: contexts, continuations and windows are
built here from what the harness documents."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.tiny_model import write_tiny_model  # noqa: E402

CONTEXT = 128  # of the engine in the test; a scored text has one token less
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "river",
    "bank",
    "green",
    "hills",
    "values",
    "runs",
)
PROMPTS = [f"{first} {second}" for first in WORDS for second in WORDS]  # those with printable answers are kept
KEPT = 8
STOPS = ("\n", " lazy")  # as in tiny_greedy.yaml
MAX_TOKENS = 12


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    oracle = Oracle(model, tokenizer)
    expected = {
        "context": CONTEXT,
        "ids": oracle.ids((HERE / "river.txt").read_text(encoding="utf-8")[:80]),
        "choices": [oracle.choices(json.loads(line)) for line in _lines("choices.jsonl")],
        "rolling": [oracle.rolling(text.strip()) for text in (HERE / "river.txt").read_text("utf-8").split("\n\n")],
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    answers = []
    for prompt in PROMPTS:
        answer = oracle.generate(prompt)
        if answer and answer.isprintable() and "\ufffd" not in answer and len(answers) < KEPT:
            answers.append({"prompt": prompt, "answer": answer})
    answers[-1]["answer"] += " not"  # so that the score is below 1
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    (HERE / "greedy.jsonl").write_text("".join(lines), encoding="utf-8")
    print(json.dumps(expected["rolling"]), *lines, sep="\n")


def _lines(name: str) -> list[str]:
    return (HERE / name).read_text(encoding="utf-8").splitlines()


class Oracle:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Sum of the continuation's logprobs, and whether each is the most likely token."""
        with torch.no_grad():
            logits = self.model(torch.tensor([context + continuation])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)[len(context) - 1 : -1]
        targets = torch.tensor(continuation)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        return float(chosen.sum()), bool((logprobs.argmax(-1) == targets).all())

    def choices(self, doc: dict) -> list[tuple[float, bool]]:
        context = f"{doc['passage']}\n\nQuestion: {doc['question']}\nAnswer:"
        scores = []
        for choice in doc["choices"]:
            # A choice begins with a space: the harness moves white space at a context's end to the continuation.
            whole, first = self.ids(f"{context} {choice}"), self.ids(context)
            assert len(whole) < CONTEXT, "nothing is cut in this test"
            scores.append(self.score(whole[: len(first)], whole[len(first) :]))
        return scores

    def rolling(self, text: str) -> dict:
        """Every token once; windows of at most CONTEXT - 1 tokens, the first behind BOS, the later ones behind one
        token that has been scored before (the last one: behind all that fit)."""
        ids = self.ids(text)
        bos = self.tokenizer.bos_token_id
        most = CONTEXT - 2  # scored tokens of a window
        total, _ = self.score([bos], ids[:most])
        done, windows = min(len(ids), most), 1
        while done < len(ids):
            end = min(done + most, len(ids))
            total += self.score(ids[end - most - 1 : done], ids[done:end])[0]
            done, windows = end, windows + 1
        return {"logprob": total, "tokens": len(ids), "windows": windows}

    def generate(self, prompt: str) -> str:
        ids = self.ids(prompt)
        output = self.model.generate(
            torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.eos_token_id,
        )  # fmt: skip
        text = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return min((text.split(stop)[0] for stop in STOPS), key=len)


if __name__ == "__main__":
    main()
