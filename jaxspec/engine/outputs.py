"""Results: a RequestOutput for each prompt, and Increments for streaming callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxspec.config import ConfigError
from jaxspec.engine.inputs import Prompt
from jaxspec.engine.metrics import RequestTimes, SpecDecodeMetrics
from jaxspec.engine.request import FinishReason
from jaxspec.sampling.logprobs import Logprob


@dataclass
class CompletionOutput:
    """One generated text.

    index: its number among the prompt's n texts
    token_ids: the generated tokens, the stop token included
    text: their text without special tokens, cut off before a stop string
    finish_reason: "stop" (an end-of-text or stop token, or a stop string), "length" (max_tokens, or
        no room left), "cancelled", or "error" (an exception that belongs to this text, such as one
        of the callback, or too little memory for its sampling parameters)
    error: that exception
    logprobs: of each generated token and of the likeliest alternatives, by token id; None unless
        SamplingParams.logprobs is set
    stop_reason: the stop string, or the id among SamplingParams.stop_token_ids, that ended the
        text; None for an end-of-text token and other ends
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: SpecDecodeMetrics
    times: RequestTimes
    error: BaseException | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The text's log-probability under the model's own distribution; None without logprobs."""
        if self.logprobs is None:
            return None
        return sum(
            place[token].logprob for token, place in zip(self.token_ids, self.logprobs, strict=True)
        )

    def finished(self) -> bool:
        """Return whether the text has come to an end."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The result of one prompt. token_ids, text, ... are those of the first, often the only, text.

    prompt: the prompt as the caller gave it
    prompt_token_ids: its tokens
    outputs: its n texts
    index: its number in the call
    request_id: its number among all prompts of the LLM, as text
    num_cached_tokens: prompt tokens that the prefix cache held when it was admitted; None if it
        was not
    prompt_logprobs: of each prompt token (None for the first) and of the likeliest alternatives, by
        token id; None unless SamplingParams.prompt_logprobs is set
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    index: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    request_id: str = ""
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether all texts have come to an end."""
        return all(text.finished() for text in self.outputs)

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

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
    """An addition to one text. The texts of all increments make the whole text.

    index: the prompt's number in the call
    sample: the text's number among the prompt's n
    token_ids, text: what is new; the last increment may have nothing new
    finish_reason: None except in the last increment
    error: the exception that ended the text, with finish_reason "error"
    """

    index: int
    sample: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    error: BaseException | None = None


class EngineError(RuntimeError):
    """A failure of the engine itself, such as an XLA error in a round.

    Every call whose requests ran then gets one of its own. The engine can be used again.
    """


class EngineConfigError(EngineError, ConfigError):
    """An EngineError whose cause is a setting or a checkpoint, such as too little memory."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while texts were generated. The engine can be used again.

    outputs: the prompts whose texts were finished. A traceback prints their number, and the
        beginnings of their texts.
    """

    def __init__(self, outputs: list[RequestOutput], *args: Any) -> None:
        super().__init__(*args)
        self.outputs = outputs

    def __str__(self) -> str:
        texts = "".join(f"\n  {output.text or output.token_ids!r:.100}" for output in self.outputs)
        return (
            f"{len(self.outputs)} prompts were finished, "
            f"their outputs are in this exception's outputs{':' if texts else ''}{texts}"
        )
