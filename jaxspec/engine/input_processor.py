"""Prompts and sampling parameters to requests, all of them checked before any runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from jaxspec.config import ConfigError, items_of, shown
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.inputs import Prompt, as_list, encode, encode_words
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.output_processor import decoder
from jaxspec.engine.request import Request, derive_seed
from jaxspec.loading import Tokenizer
from jaxspec.loading.chat import PLAIN_CHAT, ChatOptions
from jaxspec.sampling.params import SamplingParams, end_token_ids


class InputProcessor:
    """Make requests for one target and one engine.

    tokenizer: the target's; None takes token ids alone
    eos_token_ids: tokens that end a text
    vocab_size: the target's
    max_model_len: tokens of a request at most
    num_speculative_tokens: the engine's K, 0 without a draft
    default_params: of requests that bring none
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        *,
        vocab_size: int,
        max_model_len: int,
        num_speculative_tokens: int,
        default_params: SamplingParams,
    ) -> None:
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.default_params = default_params
        self._request_ids = itertools.count()
        # Many prompts have the same bad words.
        self._encode_words = lru_cache(maxsize=256)(partial(encode_words, tokenizer=tokenizer))

    def make_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        streams: bool,
        chat: ChatOptions = PLAIN_CHAT,
    ) -> list[Request]:
        """Tokenise and check every prompt; n requests for each (LLM.make_requests)."""
        listed = as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.default_params] * len(listed)
        given = items_of(sampling_params) if isinstance(sampling_params, Sequence) else None
        if given is None:
            raise ConfigError(
                "sampling_params: expected SamplingParams, or a list of them, "
                f"got {shown(sampling_params)}"
            )
        if len(given) != len(listed):
            raise ConfigError(
                "sampling_params: expected one for all or one for each of "
                f"{len(listed)} prompts, got {len(given)}"
            )
        requests = []
        # By id: prompts that share their parameters share the copy too.
        copies: dict[int, SamplingParams] = {}
        for index, (prompt, params) in enumerate(zip(listed, given, strict=True)):
            if not isinstance(params, SamplingParams):
                raise ConfigError(
                    f"prompt {index}: sampling_params: expected SamplingParams, got {shown(params)}"
                )
            try:
                if id(params) not in copies:
                    copies[id(params)] = self.checked_copy(params)
                params = copies[id(params)]
                params.check_vocabulary(self.vocab_size, self.eos_token_ids)
            except ConfigError as e:
                raise ConfigError(f"prompt {index}: {e}") from None
            token_ids = self._encode(index, prompt, chat)
            request_id = str(next(self._request_ids))
            requests += [
                self._request(index, sample, prompt, token_ids, params, streams, request_id)
                for sample in range(params.n)
            ]
        return requests

    def checked_copy(self, params: SamplingParams) -> SamplingParams:
        """Return a copy with the tokens of bad_words among its bad_words_token_ids.

        ConfigError for parameters whose assigned values exclude each other.
        """
        params = params.checked_copy()
        if not params.bad_words:
            return params
        found = dict.fromkeys((*params.bad_words_token_ids, *self._encode_words(params.bad_words)))
        return replace(params, bad_words_token_ids=tuple(found))

    def _encode(self, index: int, prompt: Prompt, chat: ChatOptions) -> list[int]:
        token_ids = encode(index, prompt, self.tokenizer, chat)
        if not token_ids:
            raise ConfigError(f"prompt {index}: expected at least one token, got an empty prompt")
        bad = [t for t in token_ids if not 0 <= t < self.vocab_size]
        if bad:
            raise ConfigError(
                f"prompt {index}: expected token ids in 0..{self.vocab_size - 1}, "
                f"got {shown(bad[0])}"
            )
        if len(token_ids) >= self.max_model_len:
            raise ConfigError(
                f"prompt {index}: expected fewer tokens than max_model_len {self.max_model_len}, "
                f"got {len(token_ids)}"
            )
        return token_ids

    def _request(
        self,
        index: int,
        sample: int,
        prompt: Prompt,
        token_ids: list[int],
        params: SamplingParams,
        streams: bool,
        request_id: str,
    ) -> Request:
        K, own = self.num_speculative_tokens, params.num_speculative_tokens
        detokenizer = None
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                f"prompt {index}: stop: expected a target with a tokenizer, "
                "in whose texts the strings are looked for, got none"
            )
        if self.tokenizer is not None and (params.stop or streams):
            detokenizer = Detokenizer(
                decoder(self.tokenizer, params),
                params.stop,
                include_stop=params.include_stop_str_in_output,
            )
        return Request(
            prompt_token_ids=token_ids,
            # The prompt is scored once.
            params=params if sample == 0 else replace(params, prompt_logprobs=None),
            max_tokens=min(
                params.max_tokens or self.max_model_len, self.max_model_len - len(token_ids)
            ),
            stop_token_ids=end_token_ids(params, () if params.ignore_eos else self.eos_token_ids),
            draft_limit=K if own is None else min(K, own),
            seed=derive_seed(params.seed, sample),
            index=index,
            sample=sample,
            prompt=prompt,
            request_id=request_id,
            metrics=SpecDecodeMetrics(K),
            detokenizer=detokenizer,
        )
