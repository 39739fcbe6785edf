"""Committing a verification: which token comes next, and on the device, which requests go on."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from tests.support.tiny import sampling_state
from tests.support.toys import toy_config

pytestmark = pytest.mark.usefixtures("toy_families")

CFG = toy_config(50, 4)


def four_requests(max_tokens: list[int], stops: list[list[int]]) -> DecodeState:
    """Backups 10 .. 40; the first two are live."""
    sampling = jax.tree.map(jnp.asarray, sampling_state([0] * 4))
    state = decode_state.init_state(
        CFG,
        sampling,
        jnp.asarray(max_tokens, jnp.int32),
        jnp.asarray(stops, jnp.int32),
        (1,),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    return replace(
        state,
        next_token=jnp.asarray([10, 20, 30, 40], jnp.int32),
        active=jnp.asarray([True, True, False, False]),
    )


OUTPUT = np.array([[0, 1, -1, -1, -1], [0, 1, 2, 3, 4], [-1] * 5, [-1] * 5], np.int32)
COUNTS = np.array([2, 5, 0, 0], np.int32)


def committed(state: DecodeState) -> DecodeState:
    return decode.advance(CFG, state, Verification(jnp.asarray(OUTPUT), jnp.asarray(COUNTS)))


def test_the_next_token_is_the_last_sampled_one_and_an_idle_row_keeps_its_own() -> None:
    """cases.md 3.5: backups 10..40, the third request padding, the fourth discarded
    -> [1, 4, 30, 40], counts [2, 5, 0, 0]."""
    after = committed(four_requests([64] * 4, [[-1]] * 4))
    assert after.next_token.tolist() == [1, 4, 30, 40]
    assert after.num_generated.tolist() == [2, 5, 0, 0]
    assert after.active.tolist() == [True, True, False, False]


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_a_stop_token_anywhere_in_the_window_ends_its_request_alone(stop: int) -> None:
    """Padding (-1) in the output and in the stop ids never matches."""
    after = committed(four_requests([64] * 4, [[-1, 7], [-1, stop], [-1, -1], [0, -1]]))
    assert after.active.tolist() == [True, False, False, False]


@pytest.mark.parametrize(("limit", "goes_on"), [(4, False), (5, False), (6, True)])
def test_max_tokens_ends_a_request_on_the_device(limit: int, goes_on: bool) -> None:
    assert committed(four_requests([64, limit, 64, 64], [[-1]] * 4)).active.tolist() == [
        True,
        goes_on,
        False,
        False,
    ]
