"""Writes what llama.cpp makes of many texts, for the files beside this script.  Needs xllamacpp (its server),
sentencepiece, tokenizers and gguf; the tests need only the results.

    python make_llamacpp_tables.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import tokenizers
import xllamacpp
from corpus import texts
from sentencepiece.sentencepiece_model_pb2 import ModelProto

HERE = Path(__file__).parent
PRE = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2", "stablelm2", "tekken", "gpt-4o", "falcon", "deepseek-coder")
TRAINING = (
    texts(3000, 1) + ["The capital of France is Paris. Once upon a time there was a small village by the sea."] * 40
)
CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


class LlamaCpp:
    def __init__(self, model: Path):
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.warmup, params.cpuparams.n_threads = str(model), 256, False, 1
        self._server = xllamacpp.Server(params)

    def ids(self, text: str, *, parse_special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": parse_special}).encode()
        request = urllib.request.Request(
            f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request))["tokens"]

    def table(self, corpus: list[str]) -> list[dict]:
        """`special` stands only where it differs."""
        rows = [(text, self.ids(text, parse_special=False), self.ids(text, parse_special=True)) for text in corpus]
        return [{"text": t, "plain": plain} | ({"special": s} if s != plain else {}) for t, plain, s in rows]


def tiny_model(folder: Path, model: str, tokens: list[str], types: list[int], **more) -> Path:
    """The least file that llama.cpp loads, with this vocabulary."""
    path = folder / f"{model}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (
        ("block_count", 1),
        ("context_length", 512),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "merges" in more:
        writer.add_tokenizer_pre(more["pre"])
        writer.add_token_merges(more["merges"])
    else:
        writer.add_token_scores(more["scores"])
        writer.add_add_space_prefix(more["add_space_prefix"])
    for name, token_id in (("unk", 0), ("bos", 1), ("eos", 2)):
        writer.add_uint32(
            f"tokenizer.ggml.{name}_token_id" if name != "unk" else "tokenizer.ggml.unknown_token_id", token_id
        )
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, shape in (shapes | {f"blk.0.{part}": (32, 32) for part in squares}).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_bpe(folder: Path) -> dict:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(CONTROL), initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    source = tokenizers.Tokenizer(tokenizers.models.BPE())
    source.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.train_from_iterator(TRAINING, trainer)
    model = json.loads(source.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<tool_call>"]
    types = [3 if token in CONTROL else 1 for token in tokens[:-1]] + [4]
    vocabulary = {"tokens": tokens, "types": types, "merges": [" ".join(pair) for pair in model["merges"]]}
    corpus = [*texts(60, 2), "a<tool_call>b", "x <tool_call><|im_end|>"]
    tables = {
        pre: LlamaCpp(tiny_model(folder, "gpt2", tokens, types, pre=pre, merges=vocabulary["merges"])).table(corpus)
        for pre in PRE
    }
    return vocabulary | {"tables": tables}


def tiny_sentencepiece(folder: Path) -> dict:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TRAINING for line in text.splitlines() if line.strip()]),
        model_writer=out, vocab_size=900, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["<b>", "▁▁", "▁▁▁▁", "\n", "\n\n"], minloglevel=2,
    )  # fmt: skip
    proto = ModelProto.FromString(out.getvalue())
    types = [piece.type for piece in proto.pieces]
    # User-defined tokens stand with plain spaces, as llama.cpp's converter writes them.
    tokens = [p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in proto.pieces]
    vocabulary = {"tokens": tokens, "types": types, "scores": [piece.score for piece in proto.pieces]}
    # With a leading space llama.cpp puts one behind every user-defined token too, which SentencePiece does not; no
    # known model has both, so that table is made without such tokens.
    no_user_defined = vocabulary | {"types": [1 if kind == 4 else kind for kind in types]}
    result = {}
    for prefix, content in ((False, vocabulary), (True, no_user_defined)):
        path = tiny_model(folder, "llama", **content, add_space_prefix=prefix)
        result["prefix" if prefix else "bare"] = content | {"table": LlamaCpp(path).table(texts(80, 3))}
    return result


def write(name: str, content: object) -> None:
    (HERE / name).write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write("tiny_bpe.json", tiny_bpe(Path(scratch)))
        write("tiny_sentencepiece.json", tiny_sentencepiece(Path(scratch)))
    for name, path in zip(("smollm2_texts.json", "gemma3_texts.json"), sys.argv[1:3], strict=True):
        write(name, LlamaCpp(Path(path)).table(texts(150, 4)))
    os._exit(0)  # the servers have no stop
