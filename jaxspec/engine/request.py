"""A request while it runs: what was asked for, what was generated, and where it stands in the engine. No scheduling."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxspec.cache.group_blocks import Held
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.metrics import RequestTimes, SpecDecodeMetrics
from jaxspec.sampling.logprobs import Logprob
from jaxspec.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


def derive_seed(seed: int | None, index: int) -> int:
    """The 64-bit seed of the index-th text of a prompt: the first has the request's own, None draws one."""
    if seed is None:
        return secrets.randbits(64)
    if index == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"{seed % 2**64}/{index}".encode()).digest()[:8], "little")


@dataclass(eq=False)
class Request:
    """One text of one prompt.

    max_tokens: params' own, or what max_model_len leaves. stop_token_ids: those that end it, end-of-text ids included.
    max_drafts: draft tokens a round at most, the engine's K or fewer. seed: 64 bits, settled here, so that a request that is
    prefilled again goes on as it would have. index, sample: the prompt's place in the call, and the text's among its n.
    on_tokens is called once a round with the number of tokens that were new. logprobs: of each generated token; prompt_logprobs: of each
    prompt token, None for the first; both empty where nobody asked.

    The scheduler's part: slot, its row on the device; blocks of each KV-cache group; hashes of its full blocks, of which num_registered
    may be shared; num_prefilled known tokens sent to prefill; num_cached tokens in the target's cache by the results read so far, of which
    the draft has consumed the first num_consumed, so that no row before is computed again; num_unread rounds, and prompts that ended,
    whose results are on their way, num_unread_rounds of them rounds.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    max_drafts: int = 0
    seed: int = 0
    index: int = 0
    sample: int = 0
    prompt: Any = None
    metrics: SpecDecodeMetrics = field(default_factory=lambda: SpecDecodeMetrics(0))
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.perf_counter()))
    detokenizer: Detokenizer | None = None
    on_tokens: Callable[[Request, int], None] | None = None

    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    all_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    slot: int | None = None
    admitted: int = 0
    blocks: list[Held] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_prefilled: int = 0
    num_cached: int = 0
    num_consumed: int = 0
    num_unread: int = 0
    num_unread_rounds: int = 0

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """What was generated, the stop token included."""
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def num_pages(self) -> int:
        """Columns of a block table that hold all of its blocks, in every group."""
        return max(held.num_pages for held in self.blocks)

    @property
    def num_known(self) -> int:
        """Tokens that prefill caches: all but the last generated one, whose successor is the next to be sampled."""
        return len(self.all_token_ids) - (self.num_generated > 0)

    @property
    def is_prefilled(self) -> bool:
        """Its whole prompt was sent, and its row on the device generates."""
        return self.num_cached > 0

    @property
    def may_generate(self) -> bool:
        """False once the results on their way hold its last token for certain: each brings at least one."""
        return self.finish_reason is None and self.num_generated + self.num_unread < self.max_tokens

    def extend(self, tokens: Sequence[int]) -> int:
        """Take over a round's tokens up to where the request ends, and return how many that were; what lies past it is dropped."""
        for count, token in enumerate(tokens, start=1):
            self.all_token_ids.append(token)
            is_stop = token in self.stop_token_ids
            if self.detokenizer is not None:
                is_stop |= self.detokenizer.push(
                    token, may_stop=self.num_generated > self.params.min_tokens
                )
            if is_stop:
                self.finish_reason = "stop"
            elif self.num_generated >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return count
        return len(tokens)
