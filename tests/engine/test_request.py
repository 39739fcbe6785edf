"""A request after a failure: what was delivered stays, the rest is void."""

from __future__ import annotations

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
