"""Generated tokens to increments while requests run, and to outputs at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxspec.engine.outputs import CompletionOutput, Increment, RequestOutput
from jaxspec.engine.request import Request
from jaxspec.loading import Tokenizer

Callback = Callable[[Increment], object]


class OutputCollector:
    """Count the requests of a call that have not finished, and pass on what they generate.

    advance: called with the number of requests that finished
    callback: called with each increment
    """

    def __init__(
        self, requests: Sequence[Request], advance: Callable[[int], None], callback: Callback | None
    ) -> None:
        self.unfinished = len(requests)
        self._advance, self._callback = advance, callback
        for request in requests:
            request.on_tokens = self._on_tokens

    def _on_tokens(self, request: Request, num_new: int) -> None:
        finished = request.finish_reason is not None
        if finished:
            self.unfinished -= 1
            self._advance(1)
        if self._callback is None:
            return
        text = ""
        if request.detokenizer is not None:
            if finished:
                request.detokenizer.flush()
            text = request.detokenizer.take(last=finished)
        new = request.all_token_ids[len(request.all_token_ids) - num_new :]
        try:
            self._callback(
                Increment(request.index, request.sample, new, text, request.finish_reason)
            )
        except Exception:
            if not finished:  # the engine ends the request without another call
                self.unfinished -= 1
                self._advance(1)
            raise


def request_outputs(
    requests: Sequence[Request], tokenizer: Tokenizer | None, *, finished_only: bool = False
) -> list[RequestOutput]:
    """Return the outputs in the order of the prompts, each with its n texts.

    finished_only: only prompts whose texts have all ended.
    """
    grouped: dict[int, list[Request]] = {}
    for request in requests:
        grouped.setdefault(request.index, []).append(request)
    outputs = []
    for index, group in grouped.items():
        if not finished_only or all(r.finish_reason in ("stop", "length") for r in group):
            texts = [_completion(r, tokenizer) for r in group]
            scores = (
                group[0].prompt_logprobs if group[0].params.prompt_logprobs is not None else None
            )
            outputs.append(
                RequestOutput(group[0].prompt, group[0].prompt_token_ids, texts, index, scores)
            )
    return outputs


def _completion(request: Request, tokenizer: Tokenizer | None) -> CompletionOutput:
    token_ids = request.token_ids
    text = ""
    if request.detokenizer is not None and request.detokenizer.stopped:
        text = request.detokenizer.text
    elif tokenizer is not None:
        text = tokenizer.decode(token_ids)
    reason = request.finish_reason or "cancelled"
    scores = None if request.params.logprobs is None else request.logprobs
    return CompletionOutput(
        request.sample,
        token_ids,
        text,
        reason,
        request.metrics,
        request.times,
        request.error,
        scores,
    )
