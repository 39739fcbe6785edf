"""The all-reduce: its reference on several CPU devices, the layout of mailboxes, and the kernel."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.all_reduce import Peers, all_reduce, unsupported
from pallas_kernels.peers import mailbox
from pallas_kernels.peers.mailbox import Failure
from tests.kernels.interpreter import needs_mosaic
from tests.support.devices import run_on_devices


@pytest.mark.parametrize("size", [2, 4])
def test_reference_adds_in_rank_order_and_rounds_as_a_product_does(size: int) -> None:
    printed = run_on_devices(size, "tests.kernels.all_reduce_on_devices")
    assert printed == f"equal on {size} devices\n"


@pytest.mark.parametrize("size", range(2, mailbox.MAX_DEVICES + 1))
def test_slots_fill_the_mailbox_without_overlap(size: int) -> None:
    """The error's 8 bytes, and for words and for rows counters and slots."""
    before = 8
    for region, slot_bytes in (
        (mailbox.word_region(), 8 * mailbox.WORDS_A_BLOCK),  # words and epochs
        (mailbox.row_region(size), 4 * mailbox.MAX_WIDTH),  # float32
    ):
        strides, counts = region.strides(size), (region.num_blocks, 2, size - 1)
        starts = sorted(
            region.slots + sum(n * stride for n, stride in zip(index, strides, strict=True))
            for index in product(*map(range, counts))
        )
        ends = [start + slot_bytes for start in starts]
        assert starts[1:] == ends[:-1]
        assert region.counters >= before
        assert starts[0] >= region.counters + 4 * region.num_blocks
        assert {start % 128 for start in starts} == {0}  # 16 bytes are read at once
        assert region.end(size) == ends[-1]
        before = ends[-1]
    assert before == mailbox.num_bytes(size) < 2**31  # the kernel counts in int32


def test_new_mailboxes_hold_zeros_and_empty_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made without peers on one CPU device: the words' slots expect epoch 0, the rows' EMPTY."""
    monkeypatch.setattr(mailbox, "unreachable", lambda _: None)
    monkeypatch.setattr(mailbox, "_open_peer_access", lambda _: None)
    monkeypatch.setattr(mailbox, "MAX_ROWS", 3)
    region = mailbox.row_region(2)
    monkeypatch.setattr(mailbox, "num_bytes", lambda _: region.end(2))
    monkeypatch.setattr(mailbox, "row_region", lambda _: region)
    found, _ = mailbox.make_mailboxes([jax.devices()[0]])
    words, slots = np.asarray(found)[0], region.slots // 4
    assert (words[:slots] == 0).all() and (words[slots:] == mailbox.EMPTY).all()
    assert words[slots:].size == 3 * 2 * mailbox.MAX_WIDTH


def test_an_error_word_becomes_one_sentence() -> None:
    assert Failure.of(0, 0, 0) is None
    failure = Failure.of(0, (3 << 8) + 1 + 1, 77)
    assert failure == Failure(rank=0, silent=1, block=3, epoch=77)
    assert str(failure) == ("rank 1 did not answer rank 0 within 10 s (exchange 77 of block 3)")


def test_the_first_error_of_all_mailboxes_is_told() -> None:
    words = np.zeros((3, 64), np.uint32)
    mailboxes = jnp.asarray(words)
    assert mailbox.mailbox_error(mailboxes) is None
    words[1, :2], words[2, :2] = ((7 << 8) + 1, 5), ((7 << 8) + 2, 6)
    found = mailbox.mailbox_error(jnp.asarray(words))
    assert found is not None and found.startswith("rank 0 did not answer rank 1 within")


def test_devices_that_cannot_reach_each_other_are_refused() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("GPUs may reach each other")
    cpu = jax.devices()[0]
    with pytest.raises(ValueError, match="all_reduce: expected 2 to 8 devices, got 1"):
        mailbox.make_mailboxes([cpu])
    with pytest.raises(ValueError, match="all_reduce: expected NVIDIA GPUs, got cpu"):
        mailbox.make_mailboxes([cpu, cpu])


def peers(size: int = 2) -> Peers:
    return Peers(addresses=jnp.zeros(2 * size, jnp.uint32), axis="model", size=size)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"x": jnp.ones(64)}, r"x: expected \[rows, width\], got \(64,\)"),
        ({"residual": jnp.ones((2, 32))}, r"residual: expected \(2, 64\), got \(2, 32\)"),
        ({"gain": jnp.ones(32)}, r"gain: expected \(64,\), got \(32,\)"),
        (
            {"peers": Peers(addresses=jnp.zeros(2, jnp.uint32), axis="model", size=2)},
            r"addresses: expected \[4\], two words a device, got \(2,\)",
        ),
        (
            {"implementation": "nothing"},
            "implementation: expected one of reference, mosaic_gpu, got 'nothing'",
        ),
        ({"implementation": "mosaic_gpu"}, "all_reduce, implementation 'mosaic_gpu': expected"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    inputs = {"x": jnp.ones((2, 64)), "peers": peers(), "implementation": "reference"} | arguments
    if inputs["implementation"] == "mosaic_gpu" and jax.default_backend() == "gpu":
        pytest.skip("it runs on a GPU")
    with pytest.raises(ValueError, match=sentence):
        all_reduce(**inputs)


@needs_mosaic
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ((4, 4096, jnp.float16, 2), "expected bfloat16 or float32, got float16"),
        ((4, 4096, jnp.bfloat16, 1), "expected 2 to 8 devices, got 1"),
        ((257, 256, jnp.bfloat16, 2), "expected at most 256 rows, got 257"),
        ((133, 256, jnp.bfloat16, 5), "expected at most 132 rows, got 133"),
        ((4, 500, jnp.bfloat16, 2), "a multiple of 64 values up to 8192, got 500"),
        ((4, 16384, jnp.bfloat16, 2), "a multiple of 64 values up to 8192, got 16384"),
    ],
)
def test_the_kernel_says_what_it_does_not_take(case: tuple[Any, ...], sentence: str) -> None:
    assert sentence in (unsupported(*case) or "")


@needs_mosaic
def test_the_kernel_takes_the_rows_of_64_requests() -> None:
    from pallas_kernels.all_reduce import mosaic_gpu

    assert unsupported(64, 4096, jnp.bfloat16, 2) is None
    assert unsupported(64, 8192, jnp.bfloat16, 8) is None
    rows = mosaic_gpu.MAX_BYTES // (2 * 4096)
    assert unsupported(rows, 4096, jnp.bfloat16, 2) is None
    assert "bytes" in (unsupported(rows, 4096, jnp.float32, 2) or "")


@needs_mosaic
@pytest.mark.parametrize("width", range(64, mailbox.MAX_WIDTH + 1, 64))
def test_threads_divide_every_padded_width(width: int) -> None:
    from pallas_kernels.all_reduce.mosaic_gpu import padded_width, threads_of

    padded = padded_width(width)
    assert width <= padded <= min(width + 192, mailbox.MAX_WIDTH)
    warpgroups, values = threads_of(padded)
    assert padded % (128 * warpgroups * values) == 0
    assert width % values == 0  # no register lies across the width's end
    assert padded // (128 * warpgroups) <= 62  # values of a thread: they stay in registers


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpus() -> None:
    """Bits of the sum, equal ranks, calls of many shapes after each other, independent chains, and
    a rank that leaves out an all-reduce; in processes with a time limit."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs of one host")
    command = [sys.executable, "scripts/experiment_all_reduce.py", "--seconds", "5"]
    command += ["--cases", "check,stopped,independent,soak"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
