"""Where drafts come from, by the names of `--draft`: "none", "ngram", "self:int8", "self:int4", "self:layers=N",
"model:REF"."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.device.draft_model import SecondModel
from jaxserve.device.selfdraft import QuantisedSelf
from jaxserve.device.speculate import Draft, FirstLayers, NGram
from jaxserve.models.decoder import Decoder

NAMES = "none, ngram, self:int8, self:int4, self:layers=N, model:REF"
Load = Callable[[str], SecondModel]  # of a model's reference


def make_draft(name: str, model: Decoder, load: Load) -> Draft | None:
    """None for "none".  Raises ValueError naming the known drafts, or the numbers that do not fit the model."""
    kind, _, detail = name.partition(":")
    if kind not in DRAFTS:
        raise ValueError(f"draft={name!r} must be one of {NAMES}")
    return DRAFTS[kind](detail, model, load)


def _none(detail: str, model: Decoder, load: Load) -> None:
    if detail:
        raise ValueError(f"draft='none:{detail}' must be none: it takes no detail")


def _ngram(detail: str, model: Decoder, load: Load) -> Draft:
    if detail:
        raise ValueError(f"draft='ngram:{detail}' must be ngram: it takes no detail")
    return NGram()


def _self(detail: str, model: Decoder, load: Load) -> Draft:
    if detail in ("int8", "int4"):
        return QuantisedSelf(model, int(detail[3:]), model.matrices())
    what, _, number = detail.partition("=")
    if what != "layers" or not number.isdigit():
        raise ValueError(f"draft='self:{detail}' must be self:int8, self:int4 or self:layers=N")
    layers, all_layers = int(number), model.config.layers
    if not 1 <= layers < all_layers:
        raise ValueError(
            f"draft='self:{detail}': the model has {all_layers} layers, a draft 1 to {all_layers - 1} of them"
        )
    return FirstLayers(model.first_layers(layers))


def _model(detail: str, model: Decoder, load: Load) -> Draft:
    if not detail:
        raise ValueError("draft='model:' must be model:REF, a reference as --model takes it")
    return load(detail)


DRAFTS: dict[str, Callable[[str, Decoder, Load], Draft | None]] = {
    "none": _none, "ngram": _ngram, "self": _self, "model": _model,
}  # fmt: skip
