"""Whether looking for drafts has gained.  Numbers only; no clock.

What a lookup finds is known only after the step before: a call that looks waits for it, and the device stands still
while the host comes back, whatever is chosen then.  So a call is weighed by all it took, and calls stop looking when
their rows got fewer tokens than as much plain decode would have given them."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.97  # of what was known, after each call that looked
TRIAL = 4.0  # calls that the hope of a new beginning weighs as much as
HOPE = 1.1  # a little more than plain decode
ENOUGH = 3 * TRIAL  # calls after which a gain is no mere hope


@dataclass(slots=True)
class LookGain:
    """Of calls that looked, with one number of rows: tokens of a row against plain decode calls that took as long."""

    tokens: float = HOPE * TRIAL
    plain_calls: float = TRIAL
    seen: float = 0.0  # calls that looked, since the beginning

    @property
    def is_worth_it(self) -> bool:
        return self.tokens >= self.plain_calls

    @property
    def is_proven(self) -> bool:
        return self.is_worth_it and self.seen >= ENOUGH

    def update(self, tokens: float, plain_calls: float) -> None:
        self.tokens = self.tokens * KEEP + tokens
        self.plain_calls = self.plain_calls * KEEP + plain_calls
        self.seen += 1

    def begin_anew(self) -> None:
        """A probe: a few calls that look decide again."""
        self.tokens, self.plain_calls, self.seen = HOPE * TRIAL, TRIAL, 0.0
