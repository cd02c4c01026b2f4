"""What the clients of a soak ask for: random prompts and parameters, and how each means to leave."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Front = Literal["grpc", "http"]
Way = Literal["finish", "leave", "deadline", "abort"]

WAYS: dict[Way, float] = {"finish": 0.6, "leave": 0.15, "deadline": 0.1, "abort": 0.15}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.  params: names that both fronts share; prompt: ids, so that its tokens can be counted here."""

    number: int
    front: Front
    way: Way
    patience: int  # messages read before it leaves or aborts
    seconds: float  # its deadline
    prompt: tuple[int, ...]
    params: dict[str, int | float | bool | list[int] | list[str]]

    @property
    def n(self) -> int:
        return int(self.params.get("n", 1))  # pyright: ignore[reportArgumentType]


def random_ask(number: int, seed: int, *, vocab: int, max_len: int) -> Ask:
    """The same for the same number and seed, whichever client sends it."""
    rng = random.Random(f"{seed}/{number}")
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    # gRPC alone has deadlines; over HTTP a client that gives up goes away.
    front: Front = "grpc" if way == "deadline" else rng.choice(("grpc", "http"))
    return Ask(
        number=number, front=front, way=way, patience=rng.choice((0, 0, 1, 2, 5)), seconds=rng.uniform(0.005, 0.5),
        prompt=_prompt(rng, vocab, max_len), params=_params(rng, vocab, max_len),
    )  # fmt: skip


def _prompt(rng: random.Random, vocab: int, max_len: int) -> tuple[int, ...]:
    """Half of them begin alike, so that pages are shared; lengths spread over two powers of ten."""
    length = min(int(10 ** rng.uniform(0, 2.5)), max_len // 2)
    head = [7 + i % 97 for i in range(length)] if rng.random() < 0.5 else []
    own = [rng.randrange(vocab) for _ in range(length)]
    return tuple((head[: length * 3 // 4] + own)[:length]) or (7,)


def _params(rng: random.Random, vocab: int, max_len: int) -> dict[str, int | float | bool | list[int] | list[str]]:
    params: dict[str, int | float | bool | list[int] | list[str]] = {
        "max_tokens": rng.choice([1, 2, 8, 24, max_len // 8]),
        "temperature": rng.choice([0.0, 0.0, 0.8, 1.3]),
    }
    some = {
        "n": rng.randrange(1, 4), "top_p": rng.uniform(0.1, 1), "top_k": rng.randrange(1, 200), "min_p": rng.random() / 4,
        "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2), "seed": rng.getrandbits(31), "ignore_eos": True, "min_tokens": 1,
        "stop": [rng.choice(("e", " the", "\n", "zzz"))], "stop_token_ids": [rng.randrange(vocab)],
    }  # fmt: skip
    return params | {name: value for name, value in some.items() if rng.random() < 0.25}
