# Teach GPT-2, or a model of your own, to answer: docs/chat.md.
#   python prepare.py chat mine.csv --tokenizer=gpt2
#   python train.py config/finetune_chat.py
#   python sample.py --out_dir=out-chat --chat=True

out_dir = 'out-chat'
dataset = 'chat'  # conversations, prepared with the tokenizer of the model
init_from = 'gpt2'  # or gpt2-medium …, or the out_dir of a run of yours

# 4 sequences · 8 accumulated · 512 tokens = 16,384 tokens a step, padding included
batch_size = 4
gradient_accumulation_steps = 8
block_size = 512  # longer conversations are cut where a user speaks
document_attention = True  # conversations that share a sequence do not see each other
max_iters = 100  # the first lines tell how many epochs that is: two or three are enough
dropout = 0.1

learning_rate = 3e-5  # small: the weights are good already
weight_decay = 0.0
warmup_iters = 10

eval_interval = 20
eval_iters = 20
log_interval = 1
always_save_checkpoint = False  # the best on the validation split, before it learns by heart
