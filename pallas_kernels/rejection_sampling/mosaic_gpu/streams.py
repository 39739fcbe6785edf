"""Random numbers that accept drafts and draw a token: read if given, else made in registers.

A noise.Stream has the same bits here as in its own methods: uniforms have their draft as the
offset, the token's noise has 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import noise, register_noise
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Problem, Refs, first_id


def uniform(problem: Problem, refs: Refs, request: jax.Array, draft: int) -> jax.Array:
    """Return the uniform number of one of a request's drafts."""
    if problem.accept_stream is None:
        return refs.uniforms[request * problem.K + draft]
    words = refs.accept_keys[request, 0], refs.accept_keys[request, 1]
    return noise.uniform(
        noise.stream_key(
            words, problem.accept_stream, refs.accept_position[request], jnp.int32(draft)
        ),
        jnp.uint32(0),
    )


def recover_key(problem: Problem, refs: Refs, request: jax.Array) -> noise.Key:
    """Return the key of the noise of a request's recovered or bonus token."""
    assert problem.recover_stream is not None
    words = refs.recover_keys[request, 0], refs.recover_keys[request, 1]
    return noise.stream_key(
        words, problem.recover_stream, refs.recover_position[request], jnp.int32(0)
    )


def recover_noise(problem: Problem, refs: Refs, request: jax.Array, piece: jax.Array) -> jax.Array:
    """Return the noise of a piece of the row that the request's token is drawn from."""
    if problem.recover_stream is None:
        return problem.draw.load(refs.noise.at[request], piece)
    folded = refs.recover_key is not None  # by judge: once for a request, not for each piece
    key = (
        (refs.recover_key[request, 0], refs.recover_key[request, 1])
        if folded
        else recover_key(problem, refs, request)
    )
    token_ids = problem.draw.indices(piece, first_id(problem, refs))
    return register_noise.gumbel(problem.draw.layout, key, token_ids)
