"""What the commands refuse: exit code 2 and one `error:` line, which names the key or the file and
what mends it."""

import importlib
import shlex
from pathlib import Path

import pytest
from processes import fails

# A command line → keys, files and options that its error names. There are run, the out_dir of a
# model of characters, data/chars, its text, and a few files; LINE.py has what is after it.
REFUSED = r"""
train config/shakespear_char.py             → config/shakespear_char.py
train max_iters=10                          → max_iters=10 --key=value
train text.txt                              → text.txt .py
train --max_iters 10                        → --max_iters=10
train -batch_size=3                         → -batch_size=3 --key=value
train --learning_rte=1e-3                   → learning_rte learning_rate
train --epochs=3                            → epochs max_iters
train --seq-len=8                           → seq-len block_size
train --unheard_of=3                        → unheard_of --help
train --batch_size                          → --batch_size=VALUE
train --batch_size=1.5                      → batch_size=1.5
train --compile=1                           → compile=1 auto
train --seed=99999999999999999999           → seed=
train --dtype=float8                        → dtype float8 float32
train --learning_rate=fast                  → learning_rate fast
train --learning_rate=nan                   → learning_rate nan
train --dropout=1.0                         → dropout=1.0
train --max_iters=-1                        → max_iters=-1
train --out_dir=                            → out_dir
train --out_dir=text.txt/out --dataset=chars → text.txt/out
train --device=cuda --dataset=chars         → device=cuda cpu auto
train --parallel=fsdp --dataset=chars       → torchrun
train --log_to=wandb,mlflow                 → log_to=wandb,mlflow mlflow tensorboard
train --checkpoint=last --init_from=auto    → checkpoint=last latest best
train --checkpoint=best                     → --init_from=resume
train --init_from=resume                    → out
train --init_from=resum                     → init_from resum resume
train --lr_schedule=cosin                   → lr_schedule=cosin cosine wsd
train --lr_schedule=linear:0.5              → lr_schedule=linear:0.5
train --lr_scales=tail:2                    → lr_scales=tail:2
train --n_embd=100 --n_head=3               → n_embd=100
train --min_lr=1 --learning_rate=0.1        → min_lr=1.0
train --warmup_iters=10 --lr_decay_iters=5  → warmup_iters=10
train --total_batch_size=1000               → total_batch_size=1000
train --batch_size=auto                     → total_batch_size
train --patience=3 --check=overfit          → patience=3 check=overfit
train --minutes=1 --max_iters=9             → --max_iters
train LINE.py learning_rte = 3              → LINE.py 1 learning_rte learning_rate
train LINE.py n_head = = 4                  → LINE.py 1
train LINE.py n_layer = lambda: 3           → n_layer= LINE.py 1
train LINE.py raise ValueError('a b')       → LINE.py 1 ValueError a b
train other/tiny.py                         → other/tiny.py

sample --init_from=gpt2                      → gpt2
sample run --start=naïve                    → 'ï'
sample run --start=                         → start
sample run --start=FILE:nowhere.txt         → nowhere.txt
sample run --checkpoint=5                   → --checkpoint=5
sample run '--stop=["a", 5]'                → stop= JSON
sample run --device=cuda:99                 → cuda
sample run --chat                           → --start
sample run --prompt=a                       → prompt start
sample --init_from=gpt5                     → gpt5
sample out-none                             → out-none
sample .                                    → ckpt.pt --init_from=ckpt.pt
sample ckpt.pt                              → ckpt.pt --init_from=ckpt.pt
sample gpt2                                 → gpt2 --init_from
sample a b                                  → a b out_dir
sample a --out_dir=b                        → a --out_dir=b
sample top_k=5                              → top_k=5 --key=value
sample ''                                   → .py

evaluate run --tasks=text                   → --data
evaluate run --tasks=val --data=x           → --data
evaluate run --tasks=text --data=none       → none
evaluate run --tasks=                       → tasks
evaluate run --limit=5                      → --limit=5
evaluate run --dataset=nowhere              → nowhere prepare.py --data_dir
evaluate run --output=no/folder             → output=no/folder

export run                                  → dest
export run --dest=data                      → dest=data
export --init_from=nobody/nothing --dest=x  → nobody/nothing

serve out-none --port=0                     → out-none
serve run --host=0.0.0.0                    → API_KEY
serve run --host=::                         → API_KEY
serve run --host=my.example                 → API_KEY

plan --init_from=gpt2 --dataset=chars       → 50257
plan --init_from=run --block_size=32        → block_size=32 16
plan --gpu=4090                             → gpu=4090 --gpu_memory_gb

plot                                        → out_dir
plot nowhere                                → nowhere
plot run --output=a.html                    → a.html .png
plot --film run --output=a.png              → a.png .html
plot --film run                             → --film=True
plot --film run run                         → run film

prepare shakespear                          → shakespear
prepare text                                → --input
prepare text.txt                            → prepare.py text text.txt
prepare text a --input=c b                  → a b --input=c
prepare text text.txt --prompt=a            → prompt completion
prepare text text.txt --val_fraction=2      → val_fraction
prepare text text.txt --tokenizer=bpe:257   → bpe:258
prepare text text.txt --tokenizer=magic     → tokenizer
prepare text text.txt --data_dir=text.txt/d → text.txt/d
prepare text text.txt --encoding=klingon    → encoding=klingon
prepare chat                                → --input
prepare chat text.txt                       → text.txt .jsonl
prepare chat rows.jsonl --max_tokens=5      → max_tokens=5
prepare chat rows.jsonl --tokenizer=.       → tokenizer=. auto
prepare chat empty.jsonl                    → empty.jsonl
prepare datatrove run --max_tokens=5 --tokenizer=byte → max_tokens=5
prepare datatrove run --tokenizer=byte      → run .ds

bench --sweep=conf=0,4                      → conf=0 conf
bench --sweep=conv                          → sweep=conv NAME=VALUE,VALUE
bench --sweep=conv=0,4 --judge              → judge sweep
bench --variants=yours.py                   → variants=yours.py ablation grid
bench --variants=grid --batch_size=6        → batch_size=6
bench --minutes=3                           → minutes=3 --sweep
bench --sweep=seed=1,2                      → seed out_dir
bench --judge --seeds=1                     → seeds
bench --judge --minutes=1 --max_iters=9     → --max_iters
bench --save=text.txt                       → save=text.txt
bench --variants=LINE.py variants = ["conv"] → LINE.py variants
bench --variants=LINE.py variants = {"none": {"conf": 0}} → none conf

compare                                     → race own-text prepare
compare race                                → --nanogpt=FOLDER
compare own-text --nanogpt=x --minutes=1    → --minutes=5
compare own-text x.txt --minutes=1 --peers=nanochat → peers=nanochat --nanochat=FOLDER
compare race --nanogpt=x --batchsize=3      → batchsize
"""


def files(folder):
    return sorted(path for path in folder.rglob('*') if path.is_file())


@pytest.mark.parametrize('refused', [row for row in REFUSED.splitlines() if row])
def test_a_refusal_writes_nothing_but_one_line_that_names_the_mistake(
        refused, trained, char_data, tmp_path, capsys, monkeypatch):
    line, named = (part.strip() for part in refused.split(' → '))
    line, _, code = line.partition('LINE.py ')
    Path('data').mkdir()
    for name, source in (('run', trained), ('data/chars', char_data)):
        Path(name).symlink_to(source)
    for name, text in (('text.txt', 'some text'), ('rows.jsonl', '{"prompt": "a"}\n'),
                       ('empty.jsonl', ''), ('ckpt.pt', ''), ('LINE.py', code)):
        Path(name).write_text(text)
    monkeypatch.delenv('PLAINGPT_API_KEY', raising=False)
    before = files(tmp_path)
    command, *argv = shlex.split(line + ('LINE.py' if code else ''))
    said = fails(capsys, monkeypatch, importlib.import_module(command).main, *argv)
    assert [word for word in named.split() if word not in said] == []
    assert files(tmp_path) == before
