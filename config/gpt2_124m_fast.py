# GPT-2 124M in a sixth of the tokens that config/gpt2_124m.py takes. The model, the optimizer and
# all rates are those of modded-nanogpt, records/track_3_optimization/train_gpt_simple.py, which
# reports a loss of 3.28 on FineWeb after 3,250 steps. A test compares the two.
#   python prepare.py fineweb10B-gpt2 --max_shards=20
#   python train.py config/gpt2_124m_fast.py
#   torchrun --nproc_per_node=8 train.py config/gpt2_124m_fast.py
# Not measured here yet: no GPU was at hand.

out_dir = 'out-gpt2-124m-fast'
dataset = 'fineweb10B-gpt2'  # 10.3B GPT-2 tokens, downloaded as such; 20 shards are 2B
wandb_run_name = 'gpt2-124m-fast'

n_layer = 12
n_head = 6  # heads of 128 channels
n_embd = 768
block_size = 1024
bias = True
rotary = True
rotary_share = 0.5  # half of the channels
rotary_base = 1281  # 1024^(32/31): the 32 frequencies go from 1 down to 1/1024
rmsnorm = True
embedding_norm = True
qk_norm = True
qk_scale = 0.12
mlp = 'relu2'
tied_head = False
head_bias = True
logit_softcap = 15
softcap = 'sqrt'
zero_init = True

# 2^19 tokens a step; batch_size is what one GPU of 80 GB holds at once (planned, not measured):
# halve it when memory is short, the accumulation adapts.
total_batch_size = 2**19
batch_size = 64
loss_chunk_tokens = 8192

# 3,250 steps · 2^19 = 1.7B tokens
max_iters = 3250
optimizer = 'muon'
muon_scale = 'original'
muon_iterations = 'exact'
momentum = 0.95
learning_rate = 0.025
embedding_lr_scale = 0.7 / 0.025
head_lr_scale = 0.004 / 0.025
vector_lr_scale = 0.015 / 0.025
weight_decay = 0.05
embedding_decay = vector_decay = 0.001
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10 / 2**19  # theirs is for gradients summed over the tokens of a step
grad_clip = 0.0

warmup_iters = 0
lr_schedule = 'wsd'
wsd_decay = 0.7
min_lr = 0.0

# Under 1% of the FLOPs. The record evaluates every 125 steps on the first 10,485,760 tokens of the
# validation shard, which would be 11%. The loss that compares, afterwards:
#   python train.py config/gpt2_124m_fast.py --init_from=resume --eval_only --eval_tokens=10485760
eval_interval = 250
eval_tokens = 2**20
log_interval = 10
checkpoint_async = True  # training waits for a copy in the host's memory only
