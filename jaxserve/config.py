"""Every choice an operator can make: one dataclass whose fields are the flags of the scripts and the keywords of LLM.

Standard library only.  A value is checked here when it needs nothing but itself and its neighbours; what depends on
the model or the device is checked where that is known."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

Accelerator = Literal["auto", "cpu", "gpu", "tpu"]
DTypeName = Literal["auto", "float32", "bfloat16"]
KVDTypeName = Literal["auto", "float32", "bfloat16", "float8_e4m3fn", "int8"]
AttentionBackend = Literal["auto", "native", "xla", "pallas_tpu", "pallas_triton", "pallas_mosaic_gpu", "reference"]
MatmulBackend = Literal["auto", "native", "xla"]

KV_8_BITS = ("float8_e4m3fn", "int8")
MAX_DRAFTS = 15  # a verify row then has 16 queries, the most a decode kernel is made for
DEFAULT_MODEL = "smollm2-135m-instruct"


def option(default, help_text: str, group: str):
    """A config field that is also a command-line flag."""
    return dataclasses.field(default=default, metadata={"help": help_text, "group": group})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine.  Raises ValueError naming the field and the numbers."""

    model: str = option(DEFAULT_MODEL, "packaged name, folder, .gguf file or hf:org/name", "model")
    accelerator: Accelerator = option("auto", "which devices to run on", "model")
    dtype: DTypeName = option("auto", "of weights and activations; auto = float32 on cpu, bfloat16 elsewhere", "model")
    tensor_parallel: int = option(1, "devices to split every layer over", "model")
    attention_backend: AttentionBackend = option(
        "auto", "paged attention implementation; auto = the device's kernel where it serves, else xla", "model"
    )
    matmul_backend: MatmulBackend = option(
        "auto", "products with float32 weights; auto = on one cpu native where it is installed, else xla", "model"
    )
    seed: int | None = option(None, "of the host's generator that seeds unseeded requests", "model")

    max_len: int = option(0, "longest sequence (prompt + output); 0 = the model's context, at most 8192", "memory")
    pool: str = option("auto", "tokens of KV that the page pool holds, or auto = what memory allows", "memory")
    kv_dtype: KVDTypeName = option("auto", "of the pool; auto = that of the weights; 8 bits come with scales", "memory")
    page_size: int = option(64, "tokens per page", "memory")
    memory_fraction: float = option(0.9, "share of the free device memory the pool may take", "memory")
    cpu_pool_fraction: float = option(0.1, "share of the host's available RAM the pool may take on cpu", "memory")

    slots: int = option(32, "sequences decoded together", "scheduling")
    queue_limit: int = option(1024, "waiting sequences before a request is refused", "scheduling")
    prefill_chunk: int = option(256, "most tokens of one prompt computed in one call", "scheduling")
    prefill_tokens: int = option(256, "most tokens computed in one prefill call (rows x chunk)", "scheduling")
    max_decode_wait: float = option(0.5, "seconds a streaming row may wait for one prefill call", "scheduling")
    prefix_reuse: bool = option(True, "share pages between equal prefixes", "scheduling")
    batch_invariant: bool = option(
        False, "one decode and one prefill shape: a row's bits never depend on its mates", "scheduling"
    )

    draft: str = option(
        "none",
        "what proposes tokens ahead: none, ngram, self:int8, self:int4, self:layers=N or model:REF",
        "speculation",
    )
    speculate_tokens: int | str = option(
        "auto", "draft tokens that a step verifies, with --draft; auto = as many as gain at the time, 0 = none",
        "speculation",
    )  # fmt: skip

    max_stop_ids: int = option(16, "stop ids (end-of-sequence ids included) a request may have", "limits")
    max_logit_bias: int = option(300, "logit_bias and banned_token_ids entries a request may have, together", "limits")
    max_allowed_ids: int = option(1024, "allowed_token_ids a request may have", "limits")

    compile_cache: str = option(
        "auto", "folder of the persistent compile cache; auto = the user's cache folder, off = none", "start"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type) == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{field.name}={value!r} must be an integer")
        for name, choices in (
            ("accelerator", Accelerator),
            ("dtype", DTypeName),
            ("kv_dtype", KVDTypeName),
            ("attention_backend", AttentionBackend),
            ("matmul_backend", MatmulBackend),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(choices))}")
        if self.page_size < 16 or self.page_size % 16:
            raise ValueError(f"page_size={self.page_size} must be a multiple of 16 (kernels load whole 16-token tiles)")
        if self.kv_dtype in KV_8_BITS and self.page_size % 32:
            raise ValueError(
                f"page_size={self.page_size} must be a multiple of 32 with kv_dtype={self.kv_dtype} (tiles of 8-bit numbers)"
            )
        for name in ("slots", "queue_limit", "tensor_parallel", "max_stop_ids", "max_logit_bias", "max_allowed_ids"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        tokens = str(self.speculate_tokens)
        if tokens != "auto" and not (tokens.isascii() and tokens.isdigit() and int(tokens) <= MAX_DRAFTS):
            raise ValueError(f"speculate_tokens={tokens} must be auto or a number from 0 to {MAX_DRAFTS}")
        if self.draft == "none" and tokens not in ("auto", "0"):
            raise ValueError(f"speculate_tokens={tokens} needs a draft: draft='ngram', say")
        for name in ("prefill_chunk", "prefill_tokens"):
            if getattr(self, name) < 16:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 16")
        if self.max_len < 0:
            raise ValueError(f"max_len={self.max_len} must not be negative (0 = the model's context)")
        for name in ("memory_fraction", "cpu_pool_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 and at most 1")
        if self.max_decode_wait <= 0:
            raise ValueError(f"max_decode_wait={self.max_decode_wait} must be above 0 seconds")
        if self.pool != "auto" and not (self.pool.isdigit() and int(self.pool) >= self.page_size):
            raise ValueError(
                f"pool={self.pool!r} must be auto or a number of tokens, at least one page ({self.page_size})"
            )

    def kv_dtype_for(self, weights: str) -> str:
        """The pool's dtype beside weights of this one."""
        return weights if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def speculates(self) -> bool:
        return self.draft != "none" and str(self.speculate_tokens) != "0"

    @property
    def fixed_drafts(self) -> int | None:
        """K when the operator has chosen it; None = auto."""
        return None if self.speculate_tokens == "auto" else int(self.speculate_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Measured seconds of a decode call of `rows` (a compiled number of them), sampler included."""

    rows: int
    drafts: int  # K; 0 = plain decode
    propose: float  # seconds to make the drafts
    verify: float  # seconds of the rest: decode, or verify

    @property
    def total(self) -> float:
        return self.propose + self.verify


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler must know: numbers the runner has fixed by the time it exists."""

    slots: int
    page_size: int
    num_pages: int  # of the pool, page 0 (scrap) included
    max_len: int
    queue_limit: int
    prefix_reuse: bool = True
    max_decode_wait: float = 0.25
    decode_buckets: tuple[int, ...]  # rows of the compiled decode programs, ascending
    prefill_buckets: tuple[tuple[int, int], ...]  # (rows, chunk) of the compiled prefill programs
    prefill_seconds: tuple[float, ...] = ()  # measured time of each prefill bucket; empty = not known, no bound
    num_drafts: int = 0  # the largest K of the verify programs; 0 = no speculation
    verify_shapes: tuple[tuple[int, int], ...] = ()  # (rows, K) of them; empty = every decode bucket with num_drafts
    has_draft_pool: bool = False  # the draft keeps K/V of its own, in pages of the same ids
    is_adaptive: bool = False  # K follows what drafts gain; else every call that has drafts verifies num_drafts
    is_lookup: bool = False  # the draft may find nothing: which program verifies is chosen when it has looked
    step_times: tuple[StepTime, ...] = ()  # of every decode and verify program, when adaptive
    batch_invariant: bool = False
    age_seconds: float = 30.0  # waiting this long is worth one level of priority

    def __post_init__(self) -> None:
        if self.pool_tokens < self.max_len:
            raise ValueError(
                f"the page pool holds {self.pool_tokens} tokens ({self.num_pages - 1} pages of {self.page_size}), fewer than one"
                f" sequence of max_len={self.max_len}: raise --pool or lower --max-len"
            )

    @property
    def pool_tokens(self) -> int:
        """Tokens the pool can hold; page 0 is scrap and holds none."""
        return (self.num_pages - 1) * self.page_size

    @property
    def verify_calls(self) -> tuple[tuple[int, int], ...]:
        """(rows, K) of every verify program."""
        if not self.num_drafts:
            return ()
        return self.verify_shapes or tuple((rows, self.num_drafts) for rows in self.decode_buckets)

    @property
    def pages_per_row(self) -> int:
        """P: columns of a page table."""
        return -(-self.max_len // self.page_size)
