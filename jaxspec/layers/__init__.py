"""Parts that models and drafts are made of.

context               Pass: the state that all layers of one pass over tokens share
flat_rows             the real rows of several requests, one after another
decoder_layer         a dense decoder layer: attention, then the MLP
attention             one attention layer: project, rotate, write keys and values, attend
mla                   multi-head latent attention with absorbed projections
compressed_attention  DeepSeek-V4's attention over a window and compressed entries
mlp                   the gated MLP
moe                   routers and experts
mxfp4                 MXFP4 experts of a checkpoint, packed or dequantised
quantized/            quantised linear modules: their tensors in each format, their tables
hyper_connections     DeepSeek-V4's residual of several streams
products              products with weights, and the residual stream that they add to
markov                a step of a Markov head by kernels
row_tiles             tiles of few rows, whose bits do not depend on the number of rows
sums                  sums over the devices that share a layer
embedding             token embeddings, whole or cut by vocabulary
norms                 RMS norms
rope                  rotary position embedding
params                parameter tables: checkpoint name, shape, logical axes
op_choice             the choice of each op's implementation
log_once              messages about decisions that every trace takes again
"""
