"""A request while it runs: its parameters, tokens and place in the engine. No scheduling."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxspec.cache.group_blocks import RequestBlocks
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.draft_choice import RequestAcceptance
from jaxspec.engine.metrics import RequestTimes, SpecDecodeMetrics
from jaxspec.sampling.logprobs import Logprob
from jaxspec.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]
# After a step that failed for an unknown request: a suspect runs its next step as the only suspect,
# and is cleared if that step succeeds (Engine.advance).
Standing = Literal["trusted", "suspect", "cleared"]


def derive_seed(seed: int | None, index: int) -> int:
    """Return the 64-bit seed of the index-th text of a prompt.

    The first text has the request's own seed; None draws one.
    """
    if seed is None:
        return secrets.randbits(64)
    if index == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"{seed % 2**64}/{index}".encode()).digest()[:8], "little")


@dataclass(eq=False)
class Request:
    """One text of one prompt.

    max_tokens: those of params, or what max_model_len leaves
    stop_token_ids: tokens that end the text, end-of-text ids included
    draft_limit: draft tokens of a round at most, the engine's K or fewer
    seed: 64 bits, drawn before the request runs, so that it goes on alike when prefilled again
    index, sample: the prompt's place in the call, and the text's among its n
    request_id: the prompt's number among all of the LLM, as text
    num_prefix_hits: prompt tokens that the prefix cache held at its first admission
    on_tokens: called with the request and the number of new tokens, once for each result: a
        round, or all rounds of a step if they have no drafts
    num_delivered: generated tokens that a caller of LLM has been given, or that count as given
    ended: whether that caller has been given the end as well
    error: the exception that ended it, with finish_reason "error"
    all_token_ids: prompt and text
    logprobs: of each generated token; empty unless params want them
    prompt_logprobs: of each prompt token, None for the first; empty unless params want them

    The scheduler's part:
    slot: its row of the batch on the device; None while it waits
    admitted: number of its admission; the oldest running request has the smallest
    blocks: its blocks of each KV-cache group
    hashes: those of its full blocks
    num_registered: blocks that may be shared
    num_prefilled: known tokens sent to prefill
    num_cached: tokens in the target's cache, by the results read so far
    num_consumed: tokens of these that the draft has consumed too; no row before is computed again
    num_unread: rounds and ended prompts whose results are not read yet
    num_unread_rounds: the rounds among them
    acceptance: that of its drafts so far, from its first admission on; None unless it chooses their
        number
    standing: whether a failure may belong to it
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    draft_limit: int = 0
    seed: int = 0
    index: int = 0
    sample: int = 0
    prompt: Any = None
    request_id: str = ""
    num_prefix_hits: int | None = None
    metrics: SpecDecodeMetrics = field(default_factory=lambda: SpecDecodeMetrics(0))
    times: RequestTimes = field(default_factory=lambda: RequestTimes(time.perf_counter()))
    detokenizer: Detokenizer | None = None
    on_tokens: Callable[[Request, int], None] | None = None
    num_delivered: int = 0
    ended: bool = False

    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    all_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    slot: int | None = None
    admitted: int = 0
    blocks: list[RequestBlocks] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_prefilled: int = 0
    num_cached: int = 0
    num_consumed: int = 0
    num_unread: int = 0
    num_unread_rounds: int = 0
    acceptance: RequestAcceptance | None = None
    standing: Standing = "trusted"

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.all_token_ids) - len(self.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, the stop token included."""
        return self.all_token_ids[len(self.prompt_token_ids) :]

    @property
    def num_pages(self) -> int:
        """Columns of a block table that hold all its blocks, in every group; 0 for no blocks."""
        return max((held.num_pages for held in self.blocks), default=0)

    @property
    def num_known(self) -> int:
        """Tokens that prefill caches: all but the last generated one, which a round reads next."""
        return len(self.all_token_ids) - (self.num_generated > 0)

    @property
    def is_prefilled(self) -> bool:
        """Whether its whole prompt was sent, so that its slot generates."""
        return self.num_cached > 0

    def may_generate(self, *, may_wait: bool) -> bool:
        """Return False once the unread results must hold its last token: each brings at least one.

        may_wait: a round may bring none (SchedulerConfig)
        """
        sure = self.num_unread - (self.num_unread_rounds if may_wait else 0)
        return self.finish_reason is None and self.num_generated + sure < self.max_tokens

    def rewind(self) -> None:
        """Go back to the last delivered tokens, and hold no slot and no blocks.

        After a failure. An exception may have come between any two lines of the engine. So tokens
        that were not delivered are void, and so is all that the scheduler noted. Prefill over the
        prompt and the delivered tokens goes on from there, as after a preemption.
        """
        if self.num_generated > self.num_delivered or self.finish_reason is not None:
            del self.all_token_ids[len(self.prompt_token_ids) + self.num_delivered :]
            if self.detokenizer is not None:
                self.detokenizer.rewind(self.token_ids, min_tokens=self.params.min_tokens)
        del self.logprobs[self.num_delivered :]
        self.finish_reason = self.error = None
        if self.acceptance is not None:
            self.acceptance.rewind(self.num_delivered)
        self.slot, self.blocks, self.hashes = None, [], []
        self.num_registered = self.num_prefilled = self.num_cached = self.num_consumed = 0
        self.num_unread = self.num_unread_rounds = 0

    def extend(self, tokens: Sequence[int]) -> int:
        """Append tokens of rounds up to the request's end, and return how many those were."""
        stops, room = self.stop_token_ids, self.max_tokens - self.num_generated
        end = next((i for i, t in enumerate(tokens, start=1) if t in stops), len(tokens))
        kept = tokens[: min(end, room)]
        is_stop = len(kept) > 0 and kept[-1] in stops
        if self.detokenizer is None:
            self.all_token_ids += kept
        else:
            for count, token in enumerate(kept, start=1):
                self.all_token_ids.append(token)
                may_stop = self.num_generated > self.params.min_tokens
                if self.detokenizer.push(token, may_stop=may_stop):
                    is_stop, kept = True, kept[:count]
                    break
        if is_stop:
            self.finish_reason = "stop"
        elif kept and self.num_generated >= self.max_tokens:
            self.finish_reason = "length"
        return len(kept)


def slot_of(request: Request) -> int:
    """Return the slot of a request that is admitted or prefilled.

    Only a round, or reading a result, takes slots away, and both come after.
    """
    assert request.slot is not None
    return request.slot
