"""What comes back: a RequestOutput for each prompt, and Increments for who streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxspec.engine.inputs import Prompt
from jaxspec.engine.metrics import RequestTimes, SpecDecodeMetrics
from jaxspec.engine.request import FinishReason
from jaxspec.sampling.logprobs import Logprob


@dataclass
class CompletionOutput:
    """One text. token_ids: what was generated, the stop token included; text: without special tokens, and cut off before a stop string.

    finish_reason: "stop" (an end-of-text or stop token, or a stop string), "length" (max_tokens, or no room left), "cancelled", or "error"
    (the callback's exception, in `error`). index: among the prompt's n.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: SpecDecodeMetrics
    times: RequestTimes
    error: BaseException | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The text's log-probability under the model's own distribution, where logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(
            place[token].logprob for token, place in zip(self.token_ids, self.logprobs, strict=True)
        )


@dataclass
class RequestOutput:
    """One prompt's result; index: its place in the call. token_ids, text, ... are those of the first (most often the only) text.

    logprobs of a text, prompt_logprobs: by token id, of each generated token and of each of the prompt's (None for its first), and of the
    likeliest in their places; None where SamplingParams did not ask.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    index: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def metrics(self) -> SpecDecodeMetrics:
        return self.outputs[0].metrics

    @property
    def times(self) -> RequestTimes:
        return self.outputs[0].times

    @property
    def error(self) -> BaseException | None:
        return self.outputs[0].error


@dataclass(frozen=True)
class Increment:
    """What one round added to one text: index is the prompt's place in the call, sample the text's among its n. Texts put together are
    the whole text. finish_reason: None until the last, which may add nothing."""

    index: int
    sample: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while texts were generated. outputs: the prompts whose texts were finished by then. The engine can be used again.

    A traceback prints what was finished: the number of prompts, and the beginnings of their texts.
    """

    def __init__(self, outputs: list[RequestOutput], *args: Any) -> None:
        super().__init__(*args)
        self.outputs = outputs

    def __str__(self) -> str:
        texts = "".join(f"\n  {output.text or output.token_ids!r:.100}" for output in self.outputs)
        return f"{len(self.outputs)} prompts were finished, their outputs are in this exception's outputs{':' if texts else ''}{texts}"
