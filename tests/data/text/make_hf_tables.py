"""Writes small tokenizers of each style and what transformers makes of texts and chats with them, under hf/.
Needs transformers; the tests need only the results.

    python make_hf_tables.py"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from corpus import texts
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent / "hf"
TRAINING = (
    texts(1500, 1) + ["The capital of France is Paris. Once upon a time there was a small village by the sea."] * 40
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATES = {
    "plain words": (
        "{% for m in messages %}{{ '<|user|>' + m.role + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "bos and eos": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "blocks": """{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
<|user|> {{ message.content | trim }} <|end|>
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
<|assistant|>""",
    "thoughts and tools": (
        "{%- if tools %}{{- '<|user|>' ~ (tools | tojson) ~ '<|end|>' }}{%- endif %}"
        "{%- for m in messages %}{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{%- if m.role == 'assistant' %}<|assistant|>{% generation %}{{ content }}<|end|>{% endgeneration %}"
        "{%- else %}{{- '<|user|>' + content + '<|end|>\n' }}{%- endif %}{%- endfor %}"
    ),
}
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "  Über 1,000 naïve cafés?  \n"}],
    [
        {"role": "user", "content": "Hi\n\n\nthere"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello 😀!"},
        {"role": "user", "content": "你好  {{ 7*7 }} <tool_call>"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": 'Wetter für <Ort> & "Zeit"'}}]


def byte_level() -> Tokenizer:
    """As Llama 3: byte-level, a word that is a token is that token, BOS by the post-processor."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return tokenizer


def byte_fallback(style: str) -> Tokenizer:
    """As SentencePiece's models converted: the space in front of the first text ("first"), of every text behind a
    control token ("legacy"), or nowhere ("gemma")."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = decoders.Strip(" ", 1, 0)
    if style == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([*start, strip])
    elif style == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        tokenizer.decoder = decoders.Sequence([*start, strip])
    else:
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(start)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokenizer.train_from_iterator(
        TRAINING,
        trainers.BpeTrainer(vocab_size=650, special_tokens=SPECIAL + bytes_, limit_alphabet=60, max_token_length=12),
    )
    spec = json.loads(tokenizer.to_str())  # the bytes are ordinary tokens
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(spec))


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return PreTrainedTokenizerFast(
            tokenizer_file=str(path),
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            clean_up_tokenization_spaces=False,
        )


def expected(tokenizer: PreTrainedTokenizerFast) -> dict:
    corpus = [*texts(50, 5), " x", "a", "x<|end|>y <|end|> z", "<s>hi</s>", "a <tool_call> b"]
    rows = []
    for text in corpus:
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        special = tokenizer(text, add_special_tokens=False).input_ids
        decoded = tokenizer.backend_tokenizer.decode(plain, skip_special_tokens=False)
        row = {"text": text, "ids": tokenizer(text).input_ids, "plain": plain, "special": special, "decoded": decoded}
        rows.append(row)
    chats = [
        {
            "template": name,
            "messages": chat,
            "tools": TOOLS if "tools" in name else None,
            "ids": tokenizer.apply_chat_template(
                chat, chat_template=template, tools=TOOLS if "tools" in name else None, add_generation_prompt=True,
                tokenize=True, return_dict=False,
            ),
        }
        for name, template in TEMPLATES.items()
        for chat in CHATS
    ]  # fmt: skip
    return {"texts": rows, "chats": chats}


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    made = {"byte_level": byte_level()} | {style: byte_fallback(style) for style in ("first", "legacy", "gemma")}
    results: dict = {"templates": TEMPLATES}
    for name, source in made.items():
        fast = finish(source)
        results[name] = expected(fast)
        spec = json.loads(fast.backend_tokenizer.to_str())
        (HERE / f"{name}.json").write_text(json.dumps(spec, separators=(",", ":")) + "\n")
    (HERE / "expected.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
