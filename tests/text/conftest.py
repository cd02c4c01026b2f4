from __future__ import annotations

import pytest

from jaxserve.text import Tokenizer, load_tokenizer
from tests.text.files import real_model


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(real_model("smollm2-135m-instruct", fetch=True))


@pytest.fixture(scope="session")
def gemma3() -> Tokenizer:
    return load_tokenizer(real_model("gemma3-270m", fetch=False))
