"""What the commands refuse: a line that says what is wrong, where, and how to fix it."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from processes import fails

# A command line → words of the line that answers it, in this order. There are run, the out_dir of a
# model of characters, data/chars, its text, and a few files; LINE.py has what is after it.
REFUSED = r"""
train config/shakespear_char.py             → config file config/shakespear_char.py: No such file
train max_iters=10                          → 'max_iters=10' write options as --key=value
train text.txt                              → 'text.txt' is no config file, whose names end with .py
train --max_iters 10                        → --max_iters=10
train -batch_size=3                         → -batch_size=3 write options as --key=value
train --learning_rte=1e-3                   → on the command line: did you mean learning_rate?
train --epochs=3                            → see --help
train --batch_size                          → --batch_size=VALUE
train --batch_size=1.5                      → batch_size=1.5 on the command line: expected auto or a
train --compile=1                           → compile=1 expected auto or true or false
train --seed=99999999999999999999           → seed=
train --dtype=float8                        → expected auto or float32
train --learning_rate=fast                  → expected a number
train --learning_rate=nan                   → expected a number
train --dropout=1.0                         → dropout=1.0: must be below 1
train --max_iters=-1                        → max_iters=-1: must be at least 0
train --out_dir=                            → out_dir is empty
train --out_dir=text.txt/out --dataset=chars → out_dir
train --dataset=chars LINE.py out_dir = "a\0b" → out_dir=a\x00b: cannot write there
train LINE.py dataset = "a\0b"              → NUL
export run LINE.py dest = "a\0b"            → NUL
train --device=cuda --dataset=chars         → --device=cpu
train --parallel=fsdp --dataset=chars       → torchrun
train --log_to=wandb,mlflow                 → log_to=wandb,mlflow: 'mlflow' is none of
train --checkpoint=last --init_from=auto    → checkpoint=last: it is latest, best or an iteration
train --checkpoint=best                     → --init_from=resume
train --checkpoint=99 --init_from=auto      → checkpoint
train --init_from=resume                    → no checkpoint there
train --init_from=resum                     → init_from='resum' is neither did you mean resume?
train --lr_schedule=cosin                   → lr_schedule=cosin: it is cosine, wsd,
train --lr_schedule=linear:0.5              → lr_schedule=linear:0.5
train --lr_scales=embedding                 → lr_scales=embedding: it is kinds of weights and
train --lr_scales=tail:2                    → lr_scales=tail:2
train --n_embd=100 --n_head=3               → n_embd=100
train --min_lr=1 --learning_rate=0.1        → min_lr=1.0
train --warmup_iters=10 --lr_decay_iters=5  → warmup_iters=10
train --total_batch_size=1000               → total_batch_size=1000
train --batch_size=auto                     → total_batch_size
train --patience=3 --check=overfit          → patience=3 check=overfit
train --minutes=1 --max_iters=9             → --max_iters
train --minutes=1 --lr_decay_iters=9 --warmup_iters=1 → --lr_decay_iters
train --minutes=-1                          → at least 0
train LINE.py learning_rte = 3              → LINE.py, line 1: did you mean learning_rate?
train LINE.py n_head = = 4                  → LINE.py, line 1: syntax error
train LINE.py n_layer = lambda: 3           → n_layer= LINE.py, line 1
train LINE.py raise ValueError('a b')       → LINE.py, line 1: ValueError
train other/tiny.py                         → config file other/tiny.py: No such file

sample --init_from=gpt2                      → gpt2 check the name log in or give a folder
sample run --start=naïve                    → 'ï'
sample run --start=                         → start is empty
sample run --start=FILE:nowhere.txt         → nowhere.txt
sample run --checkpoint=5                   → --checkpoint=5
sample run --top_p=0                        → top_p
sample run --temperature=-1                 → temperature
sample run --repetition_penalty=0           → repetition_penalty
sample run --num_samples=0                  → num_samples
sample run --batch_size=0                   → batch_size
sample run '--stop=["a", 5]'                → not a JSON list
sample run --device=cuda:99                 → cuda
sample run --chat                           → was not tuned on conversations
sample --init_from=gpt5                     → gpt5
sample out-none                             → out-none: no checkpoint there
sample gpt2                                 → gpt2: no checkpoint there of others with --init_from
sample a b                                  → a and b: each of them names out_dir
sample a --out_dir=b                        → a and --out_dir=b: each of them names out_dir
sample top_k=5                              → write options as
sample --start a                            → --start a: write --start=a
sample missing.py                           → config file missing.py
sample ''                                   → no config file

evaluate out-none                           → out-none: no checkpoint there
evaluate run --tasks=text                   → goes with --data
evaluate run --tasks=val --data=x           → goes with --data
evaluate run --tasks=text --data=none       → No such file
evaluate run --tasks=                       → tasks is empty
evaluate run --batch_size=0                 → batch_size
evaluate run --dataset=nowhere              → nowhere is not prepared: text FILES --data_dir
evaluate run --output=no/folder             → its folder is not there

export run                                  → dest is empty
export run --dest=data                      → exists already
export out-none --dest=x                    → out-none: no checkpoint there
export --init_from=nobody/nothing --dest=x  → nobody/nothing

serve out-none --port=0                     → out-none: no checkpoint there
serve run --host=0.0.0.0                    → API_KEY
serve run --host=::                         → API_KEY
serve run --host=my.example                 → API_KEY

plan --init_from=gpt2 --dataset=chars       → one of 50257
plan --init_from=run --block_size=32        → at most 16 tokens
plan --init_from=gpt3                       → 'gpt3' is neither
plan --init_from=resume --out_dir=data      → no checkpoint there

plot                                        → name the out_dir of a run
plot nowhere                                → nowhere has no run.json: name the out_dir of a run
plot run --output=a.html                    → must end in .png
plot --film run --output=a.png              → must end in .html
plot --film run                             → has no film: train with --film=True

prepare shakespear                          → no corpus is called 'shakespear'
prepare text                                → --input
prepare text.txt                            → prepare.py text text.txt
prepare text a --input=c b                  → a and b and --input=c: each of them names input
prepare text text.txt --prompt=a            → prompt and completion go together
prepare text text.txt --val_fraction=2      → val_fraction
prepare text text.txt --tokenizer=bpe:257   → bpe:258
prepare text text.txt --tokenizer=magic     → tokenizer
prepare text text.txt --data_dir=text.txt/d → Not a directory
prepare text text.txt --encoding=klingon    → encoding=klingon:
prepare text text.txt --encoding=hex        → encoding=hex:
prepare chat                                → chat takes --input=
prepare chat text.txt                       → conversations are read from .jsonl
prepare chat rows.jsonl --max_tokens=5      → max_tokens=5: chat does not take it
prepare chat rows.jsonl --tokenizer=.       → tokenizer=.: expected auto
prepare chat empty.jsonl                    → empty.jsonl: there is no text
prepare datatrove run --max_tokens=5 --tokenizer=byte → max_tokens=5:
prepare datatrove run --tokenizer=byte      → no *.ds with tokens there

bench --sweep=conf=0,4                      → variant 'conf=0': unknown key 'conf'
bench --sweep=conv=0,4 --judge              → one at a time
bench --variants=yours.py                   → variants=yours.py: no such file; it is ablation, grid
bench --variants=grid --batch_size=6        → batch_size=6
bench --minutes=3                           → minutes=3.0 is for train.py
bench --sweep=seed=1,2                      → leave seed and out_dir out
bench --judge --seeds=1                     → judge takes two seeds
bench --judge --minutes=1 --max_iters=9     → --max_iters
bench --save=text.txt                       → save=text.txt
bench --variants=LINE.py variants = ["conv"] → variants=LINE.py: it must define variants = {'name':
bench --variants=LINE.py variants = {"none": {"conf": 0}} → variant 'none': unknown key 'conf'

compare                                     → name one comparison: race, own-text, prepare,
compare race                                → --nanogpt=FOLDER
compare own-text --nanogpt=x --minutes=1    → say which text
compare race --nanogpt=x --batchsize=3      → unknown key 'batchsize'
"""


def files(folder):
    return sorted(path for path in folder.rglob('*') if path.is_file())


@pytest.mark.parametrize('refused', [row for row in REFUSED.splitlines() if row])
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
        refused, trained, char_data, tmp_path, capsys, monkeypatch):
    line, words = (part.strip() for part in refused.split(' → '))
    line, _, code = line.partition('LINE.py ')
    Path('data').mkdir()
    for name, source in (('run', trained), ('data/chars', char_data)):
        Path(name).symlink_to(source)
    for name, text in (('text.txt', 'some text'), ('rows.jsonl', '{"prompt": "a"}\n'),
                       ('empty.jsonl', ''), ('LINE.py', code)):
        Path(name).write_text(text)
    monkeypatch.delenv('PLAINGPT_API_KEY', raising=False)
    before = files(tmp_path)
    command, *argv = shlex.split(line + ('LINE.py' if code else ''))
    said = fails(capsys, monkeypatch, importlib.import_module(command).main, *argv)
    assert re.fullmatch(f'.*{".*".join(map(re.escape, words.split()))}.*', said)
    assert files(tmp_path) == before
