"""NumPy rows of requests, as slots and the tiles of prefill hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.decode.slots import ADMISSIONS, PromptRows
from jaxspec.engine.draft_choice import rows_of
from jaxspec.engine.request import Request, slot_of
from jaxspec.engine.round_configs import GREEDY
from jaxspec.sampling.processors.processor import SampledRequest
from jaxspec.sampling.rows import STOPS, StateLayout, sampling_rows


@dataclass(frozen=True)
class RequestRows:
    """Make the rows of prefill.

    num_speculative_tokens: the largest K
    adapts: whether rows say how well a request's drafts were accepted (RequestAcceptance)
    has_fallback: whether they say it of a second method too
    """

    num_speculative_tokens: int
    adapts: bool
    has_fallback: bool

    def of_prompts(self, requests: Sequence[Request], size: int, layout: StateLayout) -> PromptRows:
        """Return NumPy rows of the requests that tiles belong to, and idle rows up to `size`."""
        (width,) = layout.sizes[STOPS]

        def integers(r: Request) -> list[int]:
            stops = r.stop_token_ids[:width]  # more only where there was no memory for them
            last = r.all_token_ids[-1] if r.num_generated else 0
            padding = [-1] * (width - len(stops))
            return [last, r.num_generated, r.max_tokens, r.draft_limit, *stops, *padding]

        # Few arrays and calls: a first token waits for this.
        found = {r: (integers(r), _sampled(r)) for r in dict.fromkeys(requests)}
        idle = [0, 0, 0, 0, *[-1] * width]
        rows = [*(found[r][0] for r in requests), *[idle] * (size - len(requests))]
        table: Any = np.asarray(rows, np.int32)
        return PromptRows(
            next_token=table[:, 0],
            num_generated=table[:, 1],
            max_tokens=table[:, 2],
            stop_token_ids=table[:, 4:],
            draft_limit=table[:, 3],
            sampling=sampling_rows(
                layout.hold(GREEDY), [found[r][1] for r in requests], batch=size
            ),
            acceptance=rows_of(
                [r.acceptance for r in requests],
                size,
                self.num_speculative_tokens,
                has_fallback=self.has_fallback,
            )
            if self.adapts
            else None,
        )


def admission_rows(
    requests: Sequence[Request], layout: StateLayout, num_slots: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the slots of at most ADMISSIONS requests, and the rows of their processors' states.

    Both have ADMISSIONS rows. Idle ones have a slot that is out of range.
    """
    idle = ADMISSIONS - len(requests)
    at = np.asarray([*map(slot_of, requests), *[num_slots] * idle], np.int32)
    return at, processor_rows(requests, layout)


def processor_rows(requests: Sequence[Request], layout: StateLayout) -> dict[str, Any]:
    """Return NumPy rows of the processors' states, and idle rows up to ADMISSIONS."""
    sampled = [*map(_sampled, requests)]
    return sampling_rows(layout, sampled, batch=ADMISSIONS).processors


def _sampled(request: Request) -> SampledRequest:
    return SampledRequest(request.params, request.seed, request.prompt_token_ids, request.token_ids)
