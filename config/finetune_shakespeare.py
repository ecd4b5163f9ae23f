# Fine-tune GPT-2 on Shakespeare: a few minutes on a GPU.
#   python train.py config/finetune_shakespeare.py
#   python sample.py --out_dir=out-shakespeare

out_dir = 'out-shakespeare'
dataset = 'shakespeare'  # 301,966 GPT-2 tokens; downloaded on first use
init_from = 'gpt2'  # or gpt2-medium, gpt2-large, gpt2-xl, as memory allows

# 1 sequence · 32 micro-batches · 1,024 tokens = 32,768 tokens per step; an epoch is 9.2 steps
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20  # two epochs: more would memorize the plays
dropout = 0.1

learning_rate = 3e-5  # small and constant, because the weights are already good
decay_lr = False

eval_interval = 5
eval_iters = 40  # the validation split has 35 sequences, so this evaluates on all of it
log_interval = 1
always_save_checkpoint = False
