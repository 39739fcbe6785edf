"""Parts that models and drafts are made of.

attention             one attention layer: project, rotate, write keys and values, attend
mla                   multi-head latent attention with absorbed projections
compressed_attention  DeepSeek-V4's attention over a window and compressed entries
hyper_connections     DeepSeek-V4's residual of several streams
moe                   routers and experts
mxfp4                 4-bit weights
decoder_layer         a dense decoder layer: attention, then the MLP
products              projections, norms, rotary embedding, MLP
params                parameter tables: checkpoint name, shape, logical axes
kernels               which implementation of each op runs
"""
