"""The KV cache: device arrays of keys and values, and the host's books of their blocks.

arrays        the device arrays of a KV cache, one entry per layer, and writes into them
metadata      AttentionMetadata: built from scratch, rebuilt between draft steps
block_pool    the host's reference-counted blocks, and prefix caching by hash
group_blocks  the blocks of one KV-cache group that a request holds
pool_sizes    blocks and bytes of each group's pool
"""
