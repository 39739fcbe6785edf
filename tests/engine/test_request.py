"""A request after a failure: what was delivered stays, the rest is void."""

from __future__ import annotations

import pytest

from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.request import Request
from jaxspec.sampling.logprobs import Logprob
from jaxspec.sampling.params import SamplingParams


def test_a_rewound_request_holds_its_delivered_tokens_and_nothing_of_the_engine() -> None:
    decode = "".join
    detokenizer = Detokenizer(lambda ids: decode(chr(65 + i) for i in ids), ("DE",))
    request = Request([1], SamplingParams(logprobs=0), 9, detokenizer=detokenizer)
    request.hashes, request.num_cached, request.num_unread = [b"of the prompt"], 4, 2
    request.extend([0, 1])
    request.num_delivered, detokenizer.num_taken = 2, 1
    request.extend([2, 3, 4])
    request.logprobs = [{t: Logprob(-1.0, 1)} for t in range(5)]
    assert request.finish_reason == "stop" and detokenizer.text == "ABC"

    request.rewind()
    assert request.finish_reason is None and request.token_ids == [0, 1]
    assert len(request.logprobs) == 2 and not detokenizer.stopped
    assert (detokenizer.text, detokenizer.new_text(last=True)) == ("AB", "B")
    assert (request.hashes, request.num_cached, request.num_unread) == ([], 0, 0)

    assert request.extend([2, 3, 4]) == 3
    assert request.finish_reason == "stop" and detokenizer.new_text(last=True) == "BC"


@pytest.mark.parametrize("has_text", [False, True])
def test_a_request_ends_at_its_first_stop_token_or_at_its_limit(has_text: bool) -> None:
    def extended(tokens: list[int], begun: int = 0) -> tuple[int, list[int], str | None]:
        detokenizer = Detokenizer(lambda ids: " ".join(map(str, ids)), ()) if has_text else None
        request = Request([1], SamplingParams(), 4, stop_token_ids=(8, 9), detokenizer=detokenizer)
        assert request.extend([1] * begun) == begun
        return request.extend(tokens), request.token_ids[begun:], request.finish_reason

    assert extended([]) == (0, [], None)
    assert extended([3, 4, 5]) == (3, [3, 4, 5], None)
    assert extended([3, 9, 8, 5]) == (2, [3, 9], "stop")
    assert extended([3, 4, 5, 9]) == (4, [3, 4, 5, 9], "stop")  # at the limit too
    assert extended([3, 4, 5, 6, 9]) == (4, [3, 4, 5, 6], "length")
    assert extended([3, 4], begun=2) == (2, [3, 4], "length")
    assert extended([3, 8, 4], begun=3) == (1, [3], "length")


def test_a_stop_string_ends_a_request_in_the_middle_of_its_tokens() -> None:
    detokenizer = Detokenizer(lambda ids: "".join(chr(65 + i) for i in ids), ("CD",))
    request = Request([1], SamplingParams(), 9, detokenizer=detokenizer)
    assert request.extend([1, 2, 3, 4, 5]) == 3
    assert (request.token_ids, request.finish_reason) == ([1, 2, 3], "stop")
