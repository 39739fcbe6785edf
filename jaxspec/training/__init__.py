"""Training a draft on its target's own text.

chat_target      the target with its chat template and tokenizer
dry_run          a tiny target with random weights
generation       the target writes chats: turns in the engine's slots, refilled as they end
openings         first words of a user's turn, which the target continues
task_prompts     short prompts: tasks of many kinds, with blanks that are filled at random
long_prompts     long prompts from texts of this machine: documents, code, retrieval
data             chats as flat token arrays, prompts and their 13-gram check, batches of one length
chat_files       chats on disk: prompts of files in, a folder out; several folders in, to train on
target           the target's hidden states of a batch, recomputed online
vocabulary       which target tokens the draft may propose (d2t, t2d)
config           what a run is, apart from the head's shape
heads            a head's shape and first weights, fresh or from another head
losses           pure functions over logits, hidden states and masks
step_attention   what a row sees while it drafts
eagle3, eagle    training-time test: the dense forward of each head over several draft steps
documents        several chats in a row: where each begins, which rows are of one
anchors          the rows that blocks of drafts begin at
blocks           DFlash's and DSpark's pass over the blocks of a row
objective        the target's side of a batch, the loss, the sums that metrics are made of
block_objective  the same for drafts that make blocks
methods          the methods that can be trained, each with its objective
trained          the weights of a draft that training moves
feature_scale    the size of the target's features, which a block head's fc learns without
optimizer        AdamW or Muon, and the schedule
loop             the compiled train step, data-parallel, and the loop around it
run              a run: a new head, trained, saved and evaluated on the way
run_record       what a run writes down
resume           masters and optimiser state on disk
checkpoint       a head on disk, in the speculators or SafeAI (EAGLE-1) format
averaging        heads of several runs -> one with the means of their weights
evaluation       acceptance through the real propose and verify
card, plot       a head's README.md and the picture of its run
"""
