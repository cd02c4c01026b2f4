"""Random traces: what twenty callers do at once, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from jaxserve.config import SchedulerConfig
from jaxserve.request import FinishReason, RequestError
from tests.fakes import FakeDevice
from tests.sched.harness import EOS, VOCAB, Loop, Pair, expected, make_config, make_request, some_prompt

MakeDevice = Callable[[SchedulerConfig, int], FakeDevice]


class EveryToken:
    """A mask object is the engine's business; the scheduler only marks the rows."""

    def advance(self, token_ids): ...
    def rollback(self, count): ...
    def words(self):
        return b""


def random_config(dice: random.Random, num_drafts: int) -> SchedulerConfig:
    invariant = dice.random() < 0.15
    changes = {"batch_invariant": True, "decode_buckets": (4,), "prefill_buckets": ((2, 8),)} if invariant else {}
    seconds = (0.3, 0.2, 0.1)[: 1 if invariant else 3] if dice.random() < 0.3 else ()
    return make_config(
        num_pages=dice.choice((14, 18, 25, 40)),
        prefix_reuse=dice.random() < 0.85,
        num_drafts=num_drafts,
        prefill_seconds=seconds,
        queue_limit=dice.choice((6, 64)),
        age_seconds=dice.choice((0.1, 30.0)),
        has_draft_pool=num_drafts > 0 and dice.random() < 0.5,
        **changes,
    )


class Trace:
    def __init__(
        self,
        seed: int,
        num_drafts: int,
        config: SchedulerConfig | None = None,
        make_device: MakeDevice | None = None,
    ):
        self.dice = random.Random(seed)
        config = config or random_config(self.dice, num_drafts)
        device = make_device(config, seed) if make_device else None
        self.loop = Loop(config, seed=seed, device=device)
        self.families = [some_prompt(44, start) for start in range(3)]
        self.refused = 0

    def play(self, requests: int = 24) -> Loop:
        made = 0
        while made < requests:
            for _ in range(self.dice.choice((0, 0, 0, 1, 1, 3))):
                self._add(f"r{made}")
                made += 1
            if self.dice.random() < 0.06 and made:
                self.loop.scheduler.abort(f"r{self.dice.randrange(made)}")
            self.loop.step()
        self.loop.run()
        self.loop.verify()
        return self.loop

    def _prompt(self) -> tuple[int, ...]:
        dice = self.dice
        talks = [s for s in self.loop.streams.values() if s.is_ended and s.last.finish_reason is FinishReason.STOP]
        if talks and dice.random() < 0.4:  # the next turn of a finished talk, or the same again
            past = dice.choice(talks)
            prompt = (*past.request.prompt_ids, *past.token_ids)
        else:
            prompt = dice.choice(self.families)[: dice.randrange(1, 44)]
        tail = tuple(dice.randrange(VOCAB - len(EOS)) for _ in range(dice.choice((0, 0, 1, 3))))
        return (*prompt, *tail)[-47:] if len(prompt) < 44 else prompt[:44]

    def _add(self, name: str) -> None:
        dice, prompt = self.dice, self._prompt()
        maybe = dice.random
        max_tokens = dice.choice((0, 1, 2, 9, 20, 20, None))
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens,
            min_tokens=dice.randrange((20 if max_tokens is None else max_tokens) + 1) if maybe() < 0.2 else 0,
            n=dice.choice((1, 1, 1, 2, 3)),
            seed=dice.randrange(2),
            ignore_eos=maybe() < 0.4,
            stop_token_ids=[dice.randrange(VOCAB)] if maybe() < 0.2 else [],
            logprobs=0 if maybe() < 0.3 else None,
            prompt_logprobs=0 if maybe() < 0.15 else None,
            prompt_logprobs_start=dice.randrange(len(prompt) + 2) if maybe() < 0.5 else 0,
            priority=dice.choice((0, 0, 0, 1, -1)),
            salt="other" if maybe() < 0.1 else "",
            deadline=self.loop.now + dice.random() if maybe() < 0.1 else None,
            make_mask=EveryToken if maybe() < 0.1 else None,
            speculate=not self.loop.config.num_drafts or maybe() < 0.8,
        )
        try:
            self.loop.add(request, self._pair(request))
        except RequestError:
            self.refused += 1
            return
        if maybe() < 0.05:
            self.loop.poison(self.loop.streams[name, 0], len(prompt) + dice.randrange(8))

    def _pair(self, request) -> Pair | None:
        """A stop string for some, often one that will be met."""
        answer = expected(request, 0, self.loop.config.max_len).token_ids
        if len(answer) < 2 or request.params.min_tokens or self.dice.random() < 0.8:
            return None
        at = self.dice.randrange(1, len(answer))
        return answer[at - 1], answer[at]
