"""Training a draft on its target's own text.

generation  the target writes chats: its own decode step, many rows, continuously refilled
data        chats as flat token arrays, prompts and their 13-gram check, batches of one length
target      the target's hidden states of a batch, recomputed online
vocabulary  which target tokens the draft may propose (d2t, t2d)
losses      pure functions over logits and masks
eagle3      training-time test: the dense forward over several draft steps
loop        optimiser, schedule, the compiled train step
checkpoint  a head on disk, in the speculators format
evaluation  acceptance through the real propose and verify
"""
