"""In bfloat16 on several devices, a prompt is read the same way beside any other prompts."""

from __future__ import annotations

from tests.support.devices import run_on_devices


def test_a_prompt_has_the_same_scores_alone_and_beside_others() -> None:
    """Speculative and plain runs share their prefill calls differently, and texts have to agree.

    Scores are float32, and a score's own sum has an order for each number of rows. A partial sum
    that is rounded in one call alone moves scores by 1e-2.
    """
    assert float(run_on_devices(2, "tests.parallel.bfloat16_on_devices")) < 1e-5
