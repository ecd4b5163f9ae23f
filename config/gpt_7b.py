# A GPT with 6.9B parameters and the architecture of Llama 7B (Touvron et al. 2023), on 137B tokens,
# for 8 GPUs with 80 GB each. Planned, not measured.
#   python plan.py config/gpt_7b.py --processes=8 --gpu_memory_gb=80
#   torchrun --nproc_per_node=8 train.py config/gpt_7b.py

out_dir = 'out-gpt-7b'
dataset = 'fineweb100B-gpt2'  # 103B GPT-2 tokens, downloaded already tokenized
wandb_run_name = 'gpt-7b'

n_layer = 32
n_head = 32
n_embd = 4096
block_size = 2048
rotary = True
rmsnorm = True
mlp = 'swiglu'
tied_head = False

# 2^22 tokens per step, as in Llama. batch_size is planned, not measured, to fit when the model is
# sharded over 8 GPUs: halve it if memory is short; gradient accumulation adapts. One GPU cannot
# hold all parameters, gradients and optimizer states (102 GiB), so parallel=auto shards them.
total_batch_size = 2**22
batch_size = 8
activation_checkpointing = 'selective'

# 32,724 steps · 2^22 = 137B tokens, 20 per parameter (compute-optimal, Hoffmann et al. 2022):
# 1.3 epochs of this sample of FineWeb.
max_iters = 32724
learning_rate = 3e-4  # Llama, table 2, for 7B
warmup_iters = 2000  # as in Llama
weight_decay = 0.1

eval_interval = 250  # under 1% of the FLOPs
eval_iters = 256  # 256 · 8 sequences = 4.2M tokens of validation text
log_interval = 10
