"""A set of mailboxes that got no answer is replaced, and freed once no program writes to it."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.decode import mailboxes
from pallas_kernels.peers import mailbox

pytestmark = pytest.mark.once


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New mailboxes of one CPU device; an error is in those that are numbered here."""
    numbers: list[int] = []
    made = iter(range(9))

    def make(_: object) -> tuple[jax.Array, np.ndarray]:
        return jnp.full((1, 8), next(made), jnp.uint32), np.zeros(2, np.uint32)

    def error(memory: jax.Array) -> str | None:
        return "rank 1 did not answer" if int(memory[0, 0]) in numbers else None

    monkeypatch.setattr(mailbox, "make_mailboxes", make)
    monkeypatch.setattr(mailbox, "mailbox_error", error)
    monkeypatch.setattr(mailboxes, "_mailboxes", {})
    monkeypatch.setattr(mailboxes, "_failures", {})
    return numbers


def config() -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    placement = SimpleNamespace(mesh=mesh, size=2)
    return SimpleNamespace(placement=placement, ops=SimpleNamespace(all_reduce="mosaic_gpu"))


def number_of(cfg: Any) -> int:
    return int(mailboxes.mailboxes_of(cfg.placement.mesh).memory[0, 0])


def test_mailboxes_with_an_error_are_replaced_and_freed(failed: list[int]) -> None:
    cfg = config()
    assert mailboxes.silent_rank(cfg, 0) is None and number_of(cfg) == 0
    old = weakref.ref(mailboxes.mailboxes_of(cfg.placement.mesh).memory)
    failed.append(0)
    assert mailboxes.silent_rank(cfg, 0) == "rank 1 did not answer"
    gc.collect()
    assert old() is None
    assert mailboxes.silent_rank(cfg, mailboxes.num_failures(cfg)) is None and number_of(cfg) == 1


def test_another_engine_on_the_devices_hears_of_an_error_once(failed: list[int]) -> None:
    """Its programs exchanged through the same mailboxes."""
    cfg = config()
    failed.append(number_of(cfg))
    seen = mailboxes.num_failures(cfg)
    for _ in range(2):  # two engines, whose states were made before
        assert mailboxes.silent_rank(cfg, seen) == "rank 1 did not answer"
    seen = mailboxes.num_failures(cfg)  # they begin anew
    assert seen == 1 and mailboxes.silent_rank(cfg, seen) is None


def test_old_mailboxes_outlive_the_programs_that_were_launched_with_them(
    failed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has read the addresses launches, and that program is waited for."""
    cfg, events = config(), []
    failed.append(number_of(cfg))
    has_read, usual = threading.Event(), mailbox.mailbox_error

    def wait(memory: jax.Array) -> str | None:
        has_read.wait(10)
        events.append("waited")
        return usual(memory)

    monkeypatch.setattr(mailbox, "mailbox_error", wait)

    def launch() -> None:
        with mailboxes.launching(cfg):
            mailboxes.given_addresses(cfg)
            has_read.set()
            thread.join(0.1)  # it waits for the launch
            events.append("launched")

    thread = threading.Thread(target=lambda: mailboxes.silent_rank(cfg, 0))
    launcher = threading.Thread(target=launch)
    for each in (thread, launcher):
        each.start()
    for each in (launcher, thread):
        each.join(10)
    assert events == ["waited", "launched", "waited"]


def test_an_error_that_two_threads_read_replaces_the_mailboxes_once(
    failed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config()
    failed.append(number_of(cfg))
    usual, both = mailbox.mailbox_error, threading.Barrier(2)

    def together(memory: jax.Array) -> str | None:
        reason = usual(memory)
        both.wait(10)
        return reason

    monkeypatch.setattr(mailbox, "mailbox_error", together)
    found: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(mailboxes.silent_rank(cfg, 0)))
        for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert found == ["rank 1 did not answer"] * 2 and number_of(cfg) == 1
