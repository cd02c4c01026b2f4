"""Loading a second checkpoint as the draft of another: everything that does not fit is said before a weight is read."""

from __future__ import annotations

from jax.sharding import Mesh

from checkpoints import open_checkpoint
from checkpoints.hub import resolve
from jaxserve.config import EngineConfig
from jaxserve.device.attention import why_not
from jaxserve.device.draft_model import OtherWidth, SecondModel
from jaxserve.device.steps import Params
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import load_params, pack_matrices
from jaxserve.models.tree import make_model
from jaxserve.text import Tokenizer, load_tokenizer
from jaxserve.text.difference import first_difference


def load_draft_model(
    reference: str, config: EngineConfig, *, target: Decoder, tokenizer: Tokenizer, max_len: int, mesh: Mesh,
    backend: str, matmul: str,
) -> SecondModel:  # fmt: skip
    """The model of a reference, in the target's dtype, on its mesh, with its attention and products.  `tokenizer`: the
    target's.

    Raises ValueError naming the draft and what is wrong with it."""
    try:
        return _load(
            reference, config, target=target, tokenizer=tokenizer, max_len=max_len, mesh=mesh, backend=backend,
            matmul=matmul,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"draft='model:{reference}': {error}") from None


def _load(
    reference: str, config: EngineConfig, *, target: Decoder, tokenizer: Tokenizer, max_len: int, mesh: Mesh,
    backend: str, matmul: str,
) -> SecondModel:  # fmt: skip
    files = resolve(reference)
    described = make_model(open_checkpoint(files).config, dtype=target.dtype, tensor_parallel=mesh.size)
    check_draft(described, config, max_len=max_len, mesh=mesh, backend=backend)
    difference = first_difference(tokenizer, load_tokenizer(files))
    if difference:
        raise ValueError(f"it does not have the model's vocabulary: {difference}")
    model, params = load_params(files, dtype=target.dtype, mesh=mesh)
    if matmul == "native":
        params = pack_matrices(model, params)
    return as_draft(model, params, target)


def check_draft(draft: Decoder, config: EngineConfig, *, max_len: int, mesh: Mesh, backend: str) -> None:
    """Raises ValueError when its context is too short, or the attention chosen for the target cannot serve it."""
    context = draft.shape.max_position
    if context < max_len:
        raise ValueError(f"it has a context of {context}, below max_len={max_len}: lower --max-len to {context}")
    refusal = why_not(
        backend, shape=draft.shape, softcap=draft.config.attention_softcap, dtype=draft.dtype,
        kv_dtype=config.kv_dtype_for(draft.dtype), page_size=config.page_size, queries=config.prefill_chunk, mesh=mesh,
    )  # fmt: skip
    if refusal:
        raise ValueError(f"attention_backend={backend!r} serves the model, but not this draft: {refusal}")


def as_draft(draft: Decoder, params: Params, target: Decoder) -> SecondModel:
    vocab = target.shape.vocab
    return SecondModel(draft if draft.shape.vocab == vocab else OtherWidth(draft, vocab), params)
