"""Texts of many kinds for tokenizers to agree about: the same ones every time."""

from __future__ import annotations

import random

WORDS = {
    "word": "the of and quick naïve café Straße ÉCOLE don't we'll I'VE they'Re x1 v2.0 foo_bar camelCase HTTPServer",
    "cyrillic": "привет как дела МИР ёлка",
    "greek": "λόγος ΑΒΓ ϕ",
    "right to left": "مرحبا بالعالم שלום עולם",
    "indic": "नमस्ते दुनिया ภาษาไทย สวัสดี",
    "cjk": "你好 世界 今天天气 東京 カタカナ ひらがな 한국어 안녕하세요 鿜 𠀀",
    "emoji": "😀 🫠 👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "number": "0 7 42 123 1234 1234567 3.14 1,000.50 ٣٤٥ ½ Ⅳ ² ① १२३",
    "punctuation": " ".join("!?.,;:'\"()[]{}<>/\\|@#$%^&*-_=+~`") + " ... -- — «» 。 == != -> :: /* */ <!-- § € × … ''",
    "html": "<b> </b> <i> <p> </p> <br> <h1> <ul> <table> </div> <code> <a> <blockquote> &amp;",
    "special": "<|im_end|> <|im_start|> <|endoftext|> <s> <eos> <bos> <unk> <pad> "
    "<end_of_turn> <unused1> [INST] <0x0A>",
}
PIECES = {kind: words.split(" ") for kind, words in WORDS.items()} | {
    "space": [
        *(" " * n for n in (1, 2, 3, 5, 17)),
        *("\n" * n for n in (1, 2, 3, 9)),
        "\t",
        "\t\t",
        "\r\n",
        " \n",
        "\n ",
    ],
    "odd space": ["\u00a0", "\u3000", "\u200b", "\u200d", "\x0b", "\x85"],
    "odd": [
        "\x00",
        "\x1b",
        "\x7f",
        "\ufeff",
        "\ufffd",
        "\u202e",
        "a\u0308\u0323",
        "ﬁ",
        "Ǆ",
        "ẞ",
        "İ",
        "\ue000",
        "Ġ",
        "ĊĠ",
    ],
}


def texts(count: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    result = []
    for _ in range(count):
        kinds = dice.sample(list(PIECES), dice.randint(1, 4))
        joiner = dice.choice(["", "", " ", " ", "\n"])
        result.append(joiner.join(dice.choice(PIECES[dice.choice(kinds)]) for _ in range(dice.randint(1, 12))))
    return result
