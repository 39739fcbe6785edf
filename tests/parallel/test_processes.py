"""Two processes run one engine: process 0 schedules, process 1 follows. A process that is lost ends
the other one with a sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from jaxspec import ConfigError, EngineConfig
from jaxspec.loading.placement import choose_placements
from jaxspec.parallel import processes
from jaxspec.parallel.processes import ACK_EVERY, Channel, ProcessError, join_processes
from tests.support.slow import slow


def start(case: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "tests.parallel.one_of_two_processes"
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), case],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.once
@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("tokens", ["speculative"]),
        slow("more", ["speculative", "plain"]),
        slow("adaptive", ["speculative"]),
    ],
)
def test_two_processes_give_the_tokens_of_one(case: str, kinds: list[str]) -> None:
    """Late arrivals and a cancelled stream; "more": plain, other features, a warm-up;
    "adaptive": drafts that adapt and fall back."""
    both = start(case)
    printed = [process.communicate(timeout=600) for process in both]
    for process, (_, errors) in zip(both, printed, strict=True):
        assert process.returncode == 0, errors[-3000:]
    leader, follower = (
        [line for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in printed
    )
    assert [line.split(" ", 1)[0] for line in leader] == kinds
    assert follower == [line for own in leader for line in ("refused", own)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("case", "sentences"),
    [
        ("stop1", ["expected a sign of life of process 1 within 10 s, got none; process 0 ends"]),
        slow("fail1", ["EngineError: engine: expected prefill and rounds that run, got"]),
        slow("die1", ["EngineError: engine: expected prefill and rounds that run, got"]),
        slow(
            "stop0", ["expected a sign of life of process 0 within 10 s, got none; process 1 end"]
        ),
        # jax ends a follower whose coordinator is gone, unless its own wait notices it first.
        slow("die0", ["expected process 0 to lead", "the JAX distributed service detected fatal"]),
    ],
)
def test_a_process_that_is_lost_ends_the_other_one_with_a_sentence(
    case: str, sentences: list[str]
) -> None:
    both = start(case)
    lost = int(case[-1])
    try:
        _, errors = both[1 - lost].communicate(timeout=300)
    finally:
        both[lost].send_signal(signal.SIGKILL)
        both[lost].communicate()
    assert both[1 - lost].returncode not in (0, None)
    assert any(sentence in errors for sentence in sentences), errors[-3000:]


class Store:
    """The key-value store of jax's distributed client."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        if key in self.values:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value.encode()

    def key_value_delete(self, key: str) -> None:
        del self.values[key]

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        end = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values:
            if time.monotonic() > end:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            time.sleep(1e-4)
        return self.values[key]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        return self.blocking_key_value_get_bytes(key, timeout_in_ms).decode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two processes in one: the thread named "1" is process 1."""
    made = Store()
    monkeypatch.setattr(processes, "_client", lambda: made)
    monkeypatch.setattr(processes, "watch", lambda: None)
    monkeypatch.setattr(processes, "POLL_MS", 5)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: int(threading.current_thread().name == "1"))
    monkeypatch.setattr(processes, "_channels", 0)
    return made


def test_a_follower_reads_each_message_once_and_the_store_stays_small(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, read, most = Channel(), [], 0

    def follow() -> None:
        monkeypatch.setattr(processes, "_channels", 0)
        channel = Channel()
        assert not channel.leads
        while (message := channel.receive()) is not None:
            read.append(message)

    thread = threading.Thread(target=follow, name="1")
    thread.start()
    time.sleep(0.02)  # several waits that end without a message
    sent = [("name", [i, "x" * i]) for i in range(5 * ACK_EVERY)]
    for message in sent:
        leader.tell(message)
        most = max(most, len(store.values))
    leader.close("done")
    thread.join(timeout=60)
    assert read == sent and most <= 2 * ACK_EVERY + 2
    assert not leader.is_open
    leader.close("twice")
    with pytest.raises(ProcessError, match=r"expected \[1\] to follow, got done"):
        leader.tell(1)


def test_a_channel_closes_although_a_message_was_not_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = store.key_value_set_bytes

    def interrupted(key: str, value: bytes) -> None:
        monkeypatch.setattr(store, "key_value_set_bytes", usual)
        usual(key, value)
        raise KeyboardInterrupt

    leader = Channel()
    monkeypatch.setattr(store, "key_value_set_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leader.tell("sent")
    leader.close("an interrupt")
    monkeypatch.setattr(processes, "_channels", 0)
    follower = Channel()
    assert [follower.receive(), follower.receive()] == ["sent", None]


def test_a_channel_that_another_thread_closes_sends_every_message_and_then_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, leader = store.key_value_set_bytes, Channel()
    closer = threading.Thread(target=leader.close, args=("closed",))

    def between_check_and_message(key: str, value: bytes) -> None:
        monkeypatch.setattr(store, "key_value_set_bytes", usual)
        closer.start()
        closer.join(0.1)
        usual(key, value)

    monkeypatch.setattr(store, "key_value_set_bytes", between_check_and_message)
    leader.tell("sent")
    closer.join(10)
    with pytest.raises(ProcessError, match=r"expected \[1\] to follow, got closed"):
        leader.tell("late")
    monkeypatch.setattr(processes, "_channels", 0)
    follower = Channel()
    assert [follower.receive(), follower.receive()] == ["sent", None]


def test_a_follower_whose_leader_is_gone_gets_a_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> bytes:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nmore")

    monkeypatch.setattr(store, "blocking_key_value_get_bytes", gone)
    with pytest.raises(ProcessError, match="expected process 0 to lead, got UNAVAILABLE: failed"):
        Channel().receive()


def test_an_environment_without_a_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *at, **own: called.append((at, own)))
    join_processes({})
    full = {
        "JAX_COORDINATOR_ADDRESS": "host:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    for name in full:
        with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS: expected host:port, with"):
            join_processes({k: v for k, v in full.items() if k != name})
    for name, bad in (
        ("JAX_PROCESS_ID", "one"),
        ("JAX_PROCESS_ID", "2"),
        ("JAX_PROCESS_ID", "-1"),
        ("JAX_NUM_PROCESSES", "0"),
        ("JAX_NUM_PROCESSES", "²"),
        ("JAX_COORDINATOR_ADDRESS", "localhost"),
        ("JAX_COORDINATOR_ADDRESS", ":1"),
        ("JAX_COORDINATOR_ADDRESS", "host:0"),
        ("JAX_COORDINATOR_ADDRESS", "host:65536"),
    ):
        with pytest.raises(ValueError, match=f"expected host:port, .* got .*{name}='{bad}'"):
            join_processes(full | {name: bad})
    assert not called
    join_processes(full)
    assert called == [(("host:1",), {"num_processes": 2, "process_id": 1})]


@pytest.mark.parametrize("idle", [0, 3])
def test_devices_come_evenly_from_the_processes(idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """idle: devices that the first process has and the second one does not."""
    devices = [SimpleNamespace(process_index=i // (4 + idle), id=i) for i in range(8 + idle)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[: 4 + idle])
    monkeypatch.setattr("jaxspec.loading.placement.make_mesh", lambda chosen: list(chosen))
    [placement] = choose_placements(EngineConfig(tensor_parallel_size=4))
    assert [d.id for d in placement.mesh] == [0, 1, 4 + idle, 5 + idle]  # type: ignore[union-attr]
    for size in (3, 10):
        with pytest.raises(
            ConfigError,
            match="expected a multiple of the 2 processes, at most 8, as each has 4 devices or",
        ):
            choose_placements(EngineConfig(tensor_parallel_size=size))
    with pytest.raises(ConfigError, match="data_parallel_size: expected 1 with 2 processes, got 2"):
        choose_placements(EngineConfig(tensor_parallel_size=2, data_parallel_size=2))
