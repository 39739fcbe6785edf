"""Generated tokens to increments while requests run, and to outputs at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from jaxspec.engine.outputs import CompletionOutput, Increment, RequestOutput
from jaxspec.engine.request import Request
from jaxspec.loading import Tokenizer
from jaxspec.sampling.logprobs import Logprob
from jaxspec.sampling.params import SamplingParams

Callback = Callable[[Increment], object]
PositionScores = Mapping[int, Logprob]  # by token id


class OutputCollector:
    """Make increments of what the requests of a call generate.

    put: takes each increment
    streams: False makes one increment of each request, at its end and without tokens
    """

    def __init__(
        self, requests: Sequence[Request], put: Callable[[Increment], object], *, streams: bool
    ) -> None:
        self._put, self._streams = put, streams
        for request in requests:
            request.on_tokens = self._on_tokens

    def _on_tokens(self, request: Request, num_new: int) -> None:
        del num_new  # a request that is rewound generates tokens again that were not delivered
        finished = request.finish_reason is not None
        if not self._streams and not finished:
            request.num_delivered = request.num_generated
            return
        num_prompt, tokens = len(request.prompt_token_ids), request.all_token_ids
        num_generated = len(tokens) - num_prompt
        detokenizer, num_taken, text, new = request.detokenizer, 0, "", []
        if self._streams:
            new = tokens[num_prompt + request.num_delivered :]
            if detokenizer is not None:
                if request.error is None:
                    if finished:
                        detokenizer.flush()
                    text = detokenizer.new_text(last=finished)
                num_taken = detokenizer.num_taken + len(text)
        increment = Increment(
            request.index, request.sample, new, text, request.finish_reason, request.error
        )
        try:
            self._put(increment)
        finally:
            # An interrupt comes right after a call of a function, so all of this is done or none.
            request.num_delivered, request.ended = num_generated, finished
            if detokenizer is not None:
                detokenizer.num_taken = num_taken


def request_outputs(
    requests: Sequence[Request], tokenizer: Tokenizer | None, *, finished_only: bool = False
) -> list[RequestOutput]:
    """Return the outputs in the order of the prompts, each with its n texts.

    finished_only: only prompts whose texts have all ended.
    """
    grouped: dict[int, list[Request]] = {}
    for request in requests:
        grouped.setdefault(request.index, []).append(request)
    outputs, texts_of_tokens = [], TokenTexts(tokenizer)
    for index, group in grouped.items():
        if not finished_only or all(
            r.ended and r.finish_reason in ("stop", "length") for r in group
        ):
            texts = [_completion(r, tokenizer) for r in group]
            first = group[0]
            scores = None if first.params.prompt_logprobs is None else first.prompt_logprobs
            for scored in (scores, *(text.logprobs for text in texts)):
                texts_of_tokens.fill(scored or ())
            outputs.append(
                RequestOutput(
                    first.prompt,
                    first.prompt_token_ids,
                    texts,
                    index,
                    scores,
                    first.request_id,
                    first.num_prefix_hits,
                )
            )
    return outputs


def decoder(tokenizer: Tokenizer, params: SamplingParams) -> Callable[[list[int]], str]:
    """Return what makes the text of a request's tokens. By default it is the tokenizer's own."""
    if params.skip_special_tokens:
        return tokenizer.decode
    return partial(tokenizer.decode, skip_special_tokens=False)


class TokenTexts:
    """The text of each token by itself, decoded once for all outputs of a call."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, str | None] = {}

    def fill(self, positions: Iterable[PositionScores | None]) -> None:
        """Give each score the text of its token, in place: there may be millions."""
        if self._tokenizer is None:
            return
        texts = self._found
        for scores in positions:
            for token, score in scores.items() if scores is not None else ():
                if token not in texts:
                    texts[token] = self._decode(token)
                score.decoded_token = texts[token]

    def _decode(self, token: int) -> str | None:
        assert self._tokenizer is not None
        try:
            try:
                return self._tokenizer.decode([token], skip_special_tokens=False)
            except TypeError:  # an object whose decode knows no such keyword
                return self._tokenizer.decode([token])
        except Exception:  # a row of the embedding that is no token
            return None


def _completion(request: Request, tokenizer: Tokenizer | None) -> CompletionOutput:
    token_ids = request.token_ids
    text, error = "", request.error
    if request.detokenizer is not None and request.detokenizer.stopped:
        text = request.detokenizer.text
    elif tokenizer is not None:
        try:
            text = decoder(tokenizer, request.params)(token_ids)
        except Exception as e:  # the other texts of the call are fine
            error = error or e
    reason = "error" if error else request.finish_reason or "cancelled"
    scores = None if request.params.logprobs is None else request.logprobs
    return CompletionOutput(
        request.sample,
        token_ids,
        text,
        reason,
        request.metrics,
        request.times,
        error,
        scores,
        _stop_reason(request) if reason == "stop" else None,
    )


def _stop_reason(request: Request) -> str | int | None:
    """Return what ended the text, if the request's own parameters name it."""
    if request.detokenizer is not None and request.detokenizer.stopped:
        return request.detokenizer.stop_string
    last = request.all_token_ids[-1]
    return last if last in request.params.stop_token_ids else None
