"""Pass: the state that all layers of one pass over tokens share."""

from __future__ import annotations

from dataclasses import replace

import jax
from flax import struct

from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import AttentionConfig, MLAConfig, Ops
from jaxspec.layers.flat_rows import FlatRows
from jaxspec.layers.rope import RopeTables, rope_tables


@struct.dataclass
class Pass:
    """One pass of a model over rows of tokens. It is passed to every layer, and never global.

    metadata: one AttentionMetadata per KV-cache group of the model
    ops:      the implementation of each op (static), and the devices that share the layers
    rope:     cos and sin float32 [batch, rows, 1, rotated / 2] of the layers' rotary embedding; the
              model's forward sets them
    last_row: int32 [batch], the only row of each request whose output is read, or None for all.
              Layers write keys and values of all rows; the last layer may return that row alone,
              [batch, 1, D].
    flat:     where the rows of a flat pass lie: they are [1, size] everywhere but in attention, as
              are rope and the slot_mapping of the metadata; None: in any other pass
    """

    metadata: tuple[AttentionMetadata, ...]
    ops: Ops
    rope: RopeTables | None = None
    last_row: jax.Array | None = None
    flat: FlatRows | None = None

    @property
    def positions(self) -> jax.Array:
        """Position of each query row, int32 [batch, rows], the same in all groups."""
        positions = self.metadata[0].positions
        return positions if self.flat is None else self.flat.flatten(positions)

    def flattened(self, flat: FlatRows) -> Pass:
        """Return this pass over [batch, rows] as the pass over its flat rows."""

        def flatten(metadata: AttentionMetadata) -> AttentionMetadata:
            slots, rope = flat.flatten(metadata.slot_mapping), metadata.rope
            if rope is not None:
                rope = flat.flatten(rope[0]), flat.flatten(rope[1])
            return replace(metadata, slot_mapping=slots, rope=rope)

        return replace(self, metadata=tuple(map(flatten, self.metadata)), flat=flat)

    def with_rope(self, attention: AttentionConfig | MLAConfig) -> Pass:
        """Return this pass with the rotation tables of these layers.

        The tables are the metadata's if its kernel made them.
        """
        tables = self.metadata[0].rope
        if tables is None:
            tables = rope_tables(attention.rope, attention.rope_dim, self.positions)
        return replace(self, rope=tables)

    def for_layer(self, index: int, num_layers: int) -> Pass:
        """Return this pass for one of num_layers layers: all but the last return every row."""
        return self if index == num_layers - 1 else replace(self, last_row=None)
