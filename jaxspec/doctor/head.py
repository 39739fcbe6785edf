"""A head with all its tensors, and the ways to read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxspec import drafts
from jaxspec.config import ConfigError, RopeConfig, SpeculativeConfig
from jaxspec.doctor.texts import Target
from jaxspec.drafts import Eagle3Config, EagleConfig
from jaxspec.drafts.head_layout import is_speculators
from jaxspec.layers.params import Params
from jaxspec.loading.binding import bind_draft
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.model import head_config, table_tensors
from jaxspec.loading.weights import load_params

AUX, NORMS, ROPE, WINDOW = "aux layer ids", "norm switch", "rope", "window"
D2T = "direction of d2t"
PLAIN_NORMS = ("norm_before_residual", "norm_output")  # switches without tensors
NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
# What d2t may hold: target id = draft id + d2t, = d2t, or = draft id - d2t.
DIRECTIONS = ("offsets", "ids", "negated offsets")


@dataclass(frozen=True)
class Reading:
    """One way to read a head's files.

    cfg:       its static shape
    direction: of d2t, one of DIRECTIONS
    """

    cfg: Eagle3Config | EagleConfig
    direction: str = "offsets"


@dataclass(frozen=True)
class Alternative:
    """A reading that differs from another in one thing.

    kind:   what differs
    name:   for the table
    remedy: what to set for it
    """

    kind: str
    name: str
    remedy: str
    reading: Reading


@dataclass(frozen=True)
class Head:
    """A head's files, opened once.

    params:  every weight that any reading needs
    present: the reading of LLM, except where its files forbid it
    refused: (kind, sentence, remedy) of each thing that keeps LLM from loading it
    """

    folder: Path
    checkpoint: Checkpoint
    target: Target
    params: Params
    present: Reading
    refused: tuple[tuple[str, str, str], ...]

    def bound(self, reading: Reading) -> Params:
        """Return the weights of a reading, with those that it shares with the target."""
        return bind_draft(
            reading.cfg, self.params, self.target.params, self.target_ids(reading.direction)
        )

    def target_ids(self, direction: str) -> np.ndarray | None:
        """Return each draft id's target id, None in a head with the target's whole vocabulary.

        ConfigError where d2t cannot be read in this direction.
        """
        cfg = self.present.cfg
        if not cfg.maps_vocabulary:
            return None
        d2t = np.asarray(self.checkpoint.tensors["d2t"].read()).astype(np.int64)
        own = np.arange(cfg.draft_vocab_size)
        ids = {"offsets": own + d2t, "ids": d2t, "negated offsets": own - d2t}[direction]
        if ids.min() < 0 or ids.max() >= cfg.vocab_size or len(np.unique(ids)) != len(ids):
            raise ConfigError(
                f"d2t as {direction}: expected {len(ids)} different ids below {cfg.vocab_size}, "
                f"got ids {ids.min()}..{ids.max()}, {len(np.unique(ids))} of them different"
            )
        return ids

    def alternatives(self, reading: Reading, longest: int) -> Iterator[Alternative]:
        """Yield the readings that differ from this one in one thing.

        longest: tokens of the longest text; a window of as many bounds nothing
        """
        cfg = reading.cfg
        if isinstance(cfg, Eagle3Config):
            yield from self._other_layers(reading, cfg)
            yield from self._other_norms(reading, cfg)
        yield from self._other_ropes(reading)
        if cfg.sliding_window is not None and cfg.sliding_window < longest:
            yield self._without_window(reading)
        if cfg.maps_vocabulary:
            for direction in DIRECTIONS:
                if direction != reading.direction and self._is_valid(direction):
                    remedy = _d2t_remedy(self.folder, direction)
                    yield Alternative(
                        D2T, f"d2t as {direction}", remedy, replace(reading, direction=direction)
                    )

    def _other_layers(self, reading: Reading, cfg: Eagle3Config) -> Iterator[Alternative]:
        n, ids = self.target.cfg.num_layers, cfg.aux_layers
        default = (2, n // 2, n - 3)
        others = [tuple(i + by for i in ids) for by in (1, -1)]
        if len(ids) == 3:
            others.append(default)
        for other in dict.fromkeys(others):
            if not other or other == ids or min(other) < 0 or max(other) > n:
                continue
            if sorted(set(other)) == list(other):
                yield Alternative(
                    AUX,
                    f"aux layers {list(other)}",
                    f"set eagle_aux_hidden_state_layer_ids={list(other)} in the speculative config",
                    replace(reading, cfg=replace(cfg, aux_layers=other)),
                )

    def _other_norms(self, reading: Reading, cfg: Eagle3Config) -> Iterator[Alternative]:
        held = self.checkpoint.tensors
        tensors = {name for name, tensor in NORM_TENSORS.items() if tensor in held}
        for name in (*PLAIN_NORMS, *sorted(tensors)):
            value = not getattr(cfg, name)
            yield Alternative(
                NORMS,
                f"{name} {value}",
                f"set {name}={value} in the speculative config",
                replace(reading, cfg=replace(cfg, **{name: value})),
            )

    def _other_ropes(self, reading: Reading) -> Iterator[Alternative]:
        attention, targets = reading.cfg.attention, getattr(self.target.cfg, "attention", None)
        own: RopeConfig = attention.rope
        ropes = {f"rope_theta {theta:g}": replace(own, theta=theta) for theta in THETAS}
        theirs = getattr(targets, "rope", None)
        if isinstance(theirs, RopeConfig):
            ropes["the target's rope"] = theirs
        if own.rope_type != "default":
            ropes["no rope scaling"] = RopeConfig(own.theta)
        tried = [own]
        for name, rope in ropes.items():
            if rope in tried:
                continue
            tried.append(rope)
            yield Alternative(
                ROPE,
                name,
                f"set {_rope_keys(rope)} in {self._config_of_layer}",
                replace(
                    reading,
                    cfg=replace(reading.cfg, attention=dataclasses.replace(attention, rope=rope)),
                ),
            )

    def _without_window(self, reading: Reading) -> Alternative:
        return Alternative(
            WINDOW,
            "no window",
            f"widen sliding_window in {self._config_of_layer}, or remove it with layer_types and "
            "use_sliding_window",
            replace(reading, cfg=replace(reading.cfg, sliding_window=None)),
        )

    @property
    def _config_of_layer(self) -> str:
        """The place that holds the settings of the draft's layer."""
        place = "transformer_layer_config of " * is_speculators(self.checkpoint.config)
        return f"{place}{self.folder}/config.json"

    def _is_valid(self, direction: str) -> bool:
        try:
            self.target_ids(direction)
        except ConfigError:
            return False
        return True


def open_head(folder: Path, target: Target, speculative: SpeculativeConfig) -> Head:
    """Open a head, also one that LLM refuses for a norm switch or for d2t.

    ConfigError for a head that no reading makes whole, and for another kind of draft.
    """
    checkpoint = open_checkpoint(folder)
    family = drafts.family_of_checkpoint(speculative.method, checkpoint.config, checkpoint.tensors)
    cfg, checkpoint = head_config(family, checkpoint, target.cfg, speculative)
    if not isinstance(cfg, Eagle3Config | EagleConfig):
        raise ConfigError(f"doctor: expected an EAGLE-1 or EAGLE-3 head, got {cfg.method!r}")
    refused: list[tuple[str, str, str]] = []
    if isinstance(cfg, Eagle3Config):
        for name, tensor in NORM_TENSORS.items():
            held = tensor in checkpoint.tensors
            if getattr(cfg, name) != held:
                says = f"{name} {getattr(cfg, name)}, and {tensor} is {'' if held else 'not '}there"
                refused.append((NORMS, says, f"set {name}={held} in the speculative config"))
                cfg = replace(cfg, **{name: held})
    specs = family.param_specs(cfg)
    params = load_params(
        specs,
        table_tensors(checkpoint, cfg, specs),
        target.dtype,
        ignore=lambda name: family.ignored_tensor(cfg, name),
        source=f"head {folder}",
    )
    head = Head(folder, checkpoint, target, params, Reading(cfg), tuple(refused))
    if not cfg.maps_vocabulary or head._is_valid("offsets"):
        return head
    valid = next((d for d in DIRECTIONS if head._is_valid(d)), None)
    if valid is None:
        head.target_ids("offsets")  # raises what is wrong
        raise AssertionError("a d2t without a direction that fits has an error")
    says = "d2t as offsets names ids outside of the vocabulary, or one id twice"
    refused.append((D2T, says, _d2t_remedy(folder, valid)))
    return replace(head, present=Reading(cfg, valid), refused=tuple(refused))


def _d2t_remedy(folder: Path, direction: str) -> str:
    stored = {
        "offsets": "d2t as it was",
        "ids": "d2t - arange(len(d2t))",
        "negated offsets": "-d2t",
    }[direction]
    return f"store {stored} as d2t in {folder}: target id = draft id + d2t[draft id]"


def _rope_keys(rope: RopeConfig) -> str:
    keys: dict[str, object] = {"rope_theta": rope.theta}
    if rope.rope_type != "default":
        shown = ("rope_type", "factor", "original_max_position_embeddings")
        keys["rope_scaling"] = {name: getattr(rope, name) for name in shown}
    else:
        keys["rope_scaling"] = None
    return ", ".join(f"{key}: {value}" for key, value in keys.items())
