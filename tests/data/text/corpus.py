"""Texts of many kinds for tokenizers to agree about: the same ones every time."""

from __future__ import annotations

import random

PIECES = {
    "word": "the of and quick naïve café Straße ÉCOLE don't we'll I'VE they'Re x1 v2.0 foo_bar camelCase HTTPServer".split(),
    "cyrillic": "привет как дела МИР ёлка".split(),
    "greek": "λόγος ΑΒΓ ϕ".split(),
    "right to left": "مرحبا بالعالم שלום עולם".split(),
    "indic": "नमस्ते दुनिया ภาษาไทย สวัสดี".split(),
    "cjk": "你好 世界 今天天气 東京 カタカナ ひらがな 한국어 안녕하세요 鿜 𠀀".split(),
    "emoji": "😀 🫠 👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿".split(),
    "number": "0 7 42 123 1234 1234567 3.14 1,000.50 ٣٤٥ ½ Ⅳ ² ① १२३".split(),
    "punctuation": [*"!?.,;:'\"()[]{}<>/\\|@#$%^&*-_=+~`", *"... -- — «» 。 == != -> :: /* */ <!-- § € × … ''".split()],
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
    "html": "<b> </b> <i> <p> </p> <br> <h1> <ul> <table> </div> <code> <a> <blockquote> &amp;".split(),
    "special": "<|im_end|> <|im_start|> <|endoftext|> <s> <eos> <bos> <unk> <pad> <end_of_turn> <unused1> [INST] <0x0A>".split(),
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
