# Fine-tune GPT-2, or a model of your own, to chat: docs/chat.md.
#   python prepare.py chat mine.csv --tokenizer=gpt2
#   python train.py config/finetune_chat.py
#   python sample.py --out_dir=out-chat --chat=True

out_dir = 'out-chat'
dataset = 'chat'  # conversations, prepared with the model's tokenizer
init_from = 'gpt2'  # or gpt2-medium, …, or the out_dir of your own run

# n_embd and block_size are the model's. Models narrower than GPT-2 take more and smaller steps.
_narrow = max(1, 768 / n_embd)
block_size = min(512, block_size)  # longer conversations are split before a user turn
document_attention = True  # conversations packed into a sequence do not attend to each other
# GPT-2: 4 sequences · 8 micro-batches · 512 tokens = 16,384 tokens per step, including padding
_sequences = max(1, round(16_384 / _narrow / block_size))
batch_size = min(_sequences, max(1, round(2_048 * _narrow / block_size)))
gradient_accumulation_steps = _sequences // batch_size
max_iters = round(100 * _narrow ** 0.75)  # train.py prints how many epochs that is
dropout = 0.1

learning_rate = 3e-5 * _narrow ** 2  # small, because the weights are already good
weight_decay = 0.0
warmup_iters = max_iters // 10

eval_interval = max(1, round(max_iters / 8))
eval_iters = 20
log_interval = max(1, max_iters // 100)
always_save_checkpoint = False  # keep the best checkpoint, before the model memorizes the text
