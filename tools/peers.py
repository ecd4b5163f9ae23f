"""Other programs that train on your own text, for own_text.py: how each is prepared, trained and
scored.

Their models have the layers, heads and channels of the settings, the vocabulary of plainGPT's
dataset, and about 2,048 tokens per step. nanoGPT has its CPU recipe, and minimind its own
tokenizer. Everything else is the program's default.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from races import CPU_RECIPE, run_and_watch, score_whole_split

from plaingpt.core.dataset import open_dataset
from plaingpt.system.files import ROOT, read_json, write_json

STEP_SEQUENCES = 8  # per step, of 256 tokens where the program does not have its own length


class Job(NamedTuple):
    """What a program trains on, in a temporary folder: train.txt, val.txt, and ours/, the text
    prepared by plainGPT."""

    folder: Path
    config: object

    def run(self, command, cwd=None, **env):
        """Run a command of another program → its output."""
        done = subprocess.run(list(map(str, command)), cwd=cwd, text=True, capture_output=True,
                              env={**os.environ, 'HF_HOME': str(self.folder / 'hf'), **env})
        if done.returncode:
            sys.exit(f'{" ".join(map(str, command))[:300]} failed:\n{done.stderr[-3000:]}')
        return done.stdout

    def prepare_text(self, name, *options):
        """Prepare the text with plainGPT."""
        run_and_watch(['prepare.py', 'text', Path(self.config.text).resolve(), *options,
                       f'--data_dir={self.folder}/{name}'], ROOT)

    def vocab_size(self):
        return open_dataset(self.folder / 'ours').vocab_size

    def text(self, split):
        return (self.folder / f'{split}.txt').read_bytes().decode()

    def peer_side(self, *arguments, cwd, python=sys.executable, **env):
        """Run a function of peer_side.py → what it printed last."""
        return self.run([python, ROOT / 'tools/peer_side.py', *arguments], cwd, **env).split()[-1]

    def score(self, function, *arguments, **options):
        return float(self.peer_side(function, self.folder / 'val.txt', *arguments, **options))


# -----------------------------------------------------------------------------
# For each program: prepare(job), train(job, out, number of steps, factor of the learning rates),
# score(job, out) → bits per byte. out: a folder that does not exist


def prepare_nanogpt(job):
    job.prepare_text('char', '--tokenizer=char')
    with open(job.folder / 'char/meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': open_dataset(job.folder / 'char').vocab_size}, f)


def train_nanogpt(job, out, steps, factor):
    run_and_watch([*CPU_RECIPE, f'--dataset={job.folder}/char', f'--out_dir={out}',
                   f'--max_iters={steps}', f'--lr_decay_iters={steps}',
                   f'--learning_rate={1e-3 * factor}', f'--min_lr={1e-4 * factor}'],
                  job.config.nanogpt)


def score_nanogpt(job, out):
    return score_whole_split(f'--init_from={out}/ckpt.pt', f'{out}.json', f'{job.folder}/char',
                             'best')['bits_per_byte']


def train_bpe(job):
    """A byte-level BPE of the tokenizers library, as for GPT-2, in bpe/."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast
    bpe = ByteLevelBPETokenizer()
    bpe.train(str(job.folder / 'train.txt'), vocab_size=job.vocab_size(), show_progress=False,
              special_tokens=['<|endoftext|>'])
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token='<|endoftext|>',
                            eos_token='<|endoftext|>').save_pretrained(job.folder / 'bpe')


def train_transformers(job, out, steps, factor):
    size = job.config.n_layer, job.config.n_head, job.config.n_embd
    job.peer_side('train_gpt2', job.folder, out, steps, 5e-5 * factor, *size, cwd=job.folder)


def score_transformers(job, out):
    job.run([sys.executable, 'evaluate.py', f'--init_from={out}/best', '--tasks=text',
             f'--data={job.folder}/val.txt', f'--output={out}.json'], ROOT)
    return read_json(f'{out}.json')['results']['text']['bits_per_byte']


def litgpt_python(job):
    return Path(job.config.litgpt).absolute() / 'bin/python'


def prepare_litgpt(job):
    train_bpe(job)
    for name in ('train', 'val'):
        (job.folder / f'litgpt/{name}').mkdir(parents=True)
        shutil.copy(job.folder / f'{name}.txt', job.folder / f'litgpt/{name}')


def train_litgpt(job, out, steps, factor):
    """The settings of litgpt's config_hub/pretrain/debug.yaml, which trains a Pythia."""
    n_embd, data = job.config.n_embd, job.folder / 'litgpt'
    write_json(f'{out}.json', {
        'model_name': 'pythia-14m',
        'model_config': {'name': 'pythia-14m', 'block_size': 256, 'n_layer': job.config.n_layer,
                         'n_embd': n_embd, 'n_head': job.config.n_head,
                         'intermediate_size': 4 * n_embd, 'vocab_size': job.vocab_size(),
                         'padding_multiple': 128},
        'out_dir': str(out), 'precision': 'bf16-mixed', 'tokenizer_dir': str(job.folder / 'bpe'),
        'data': {'class_path': 'litgpt.data.TextFiles', 'init_args': {
            'train_data_path': str(data / 'train'), 'val_data_path': str(data / 'val')}},
        'train': {'global_batch_size': STEP_SEQUENCES, 'micro_batch_size': STEP_SEQUENCES,
                  'max_tokens': steps * STEP_SEQUENCES * 256, 'lr_warmup_steps': 100,
                  'max_norm': 1.0, 'min_lr': 6e-5 * factor},
        'eval': {'interval': 1000, 'final_validation': False},
        'optimizer': {'class_path': 'torch.optim.AdamW', 'init_args': {
            'lr': 6e-4 * factor, 'weight_decay': 0.1, 'betas': [0.9, 0.95]}},
        'logger_name': 'csv'})
    job.run([litgpt_python(job), '-m', 'litgpt', 'pretrain', '--config', f'{out}.json'],
            job.folder)


def score_litgpt(job, out):
    shutil.copy(job.folder / 'bpe/tokenizer.json', out / 'final')
    return job.score('score_litgpt', out / 'final', cwd=job.folder, python=litgpt_python(job))


def nanochat_place(job):
    return {'cwd': job.config.nanochat, 'NANOCHAT_BASE_DIR': str(job.folder / 'nanochat')}


def prepare_nanochat(job):
    """Documents of one training sequence, because nanochat's loader drops what does not fit."""
    (job.folder / 'nanochat/base_data_climbmix').mkdir(parents=True)
    job.peer_side('cut_for_nanochat', job.folder, 0, **nanochat_place(job))
    job.run([sys.executable, '-m', 'scripts.tok_train', f'--vocab-size={job.vocab_size()}'],
            **nanochat_place(job))
    job.peer_side('cut_for_nanochat', job.folder, 512, **nanochat_place(job))


def train_nanochat(job, out, steps, factor):
    """The settings of nanochat's runs/runcpu.sh, with fewer tokens per step."""
    depth = job.config.n_layer
    job.run([sys.executable, '-m', 'scripts.base_train', f'--model-tag={out.name}',
             f'--depth={depth}', f'--aspect-ratio={job.config.n_embd // depth}',
             f'--head-dim={job.config.n_embd // job.config.n_head}', '--window-pattern=L',
             '--max-seq-len=512', '--device-batch-size=4', '--total-batch-size=2048',
             '--eval-every=-1', '--core-metric-every=-1', '--sample-every=-1',
             f'--num-iterations={steps}', f'--matrix-lr={0.02 * factor}',
             f'--embedding-lr={0.3 * factor}', f'--unembedding-lr={0.008 * factor}',
             f'--scalar-lr={0.5 * factor}'], **nanochat_place(job))


def score_nanochat(job, out):
    return job.score('score_nanochat', out.name, **nanochat_place(job))


def prepare_minimind(job):
    """minimind keeps its own tokenizer, and writes into its folder: a copy of it is used."""
    shutil.copytree(job.config.minimind, job.folder / 'minimind',
                    ignore=shutil.ignore_patterns('.git', 'images'))


def train_minimind(job, out, steps, factor):
    from tokenizers import Tokenizer
    folder, text = job.folder / 'minimind', job.text('train')
    starts = [start for start, _ in Tokenizer.from_file(
        str(folder / 'model/tokenizer.json')).encode(text, add_special_tokens=False).offsets]
    cuts = [*starts[::338], len(text)]  # its sequences: 340 tokens, of which two are special
    samples = [text[i:j] for i, j in pairwise(cuts)]
    with open(f'{out}.jsonl', 'w', encoding='utf-8') as f:
        for i in range(steps * STEP_SEQUENCES):
            f.write(json.dumps({'text': samples[i % len(samples)]}) + '\n')
    job.run([sys.executable, 'train_pretrain.py', f'--data_path={out}.jsonl', f'--save_dir={out}',
             '--epochs=1', f'--batch_size={STEP_SEQUENCES}', '--accumulation_steps=1',
             f'--hidden_size={job.config.n_embd}', f'--num_hidden_layers={job.config.n_layer}',
             f'--learning_rate={5e-4 * factor}'], folder / 'trainer')


def score_minimind(job, out):
    size = {'hidden_size': job.config.n_embd, 'num_hidden_layers': job.config.n_layer}
    return job.score('score_minimind', out / f'pretrain_{job.config.n_embd}.pth', json.dumps(size),
                     cwd=job.folder / 'minimind')


class Peer(NamedTuple):
    setting: str  # of compare.py: where the program is; empty: installed
    learning_rate: float  # its default, for the table
    factors: tuple  # of that learning rate, to choose from
    steps: tuple  # few and more, to time a step
    prepare: object
    train: object
    score: object


# The default of transformers' Trainer is meant for fine-tuning, nanochat's are tuned for Muon.
PEERS = {
    'nanoGPT': Peer('nanogpt', 1e-3, (1, 3, 10), (250, 500),
                    prepare_nanogpt, train_nanogpt, score_nanogpt),
    'transformers': Peer('', 5e-5, (10, 30, 100), (8, 32),
                         train_bpe, train_transformers, score_transformers),
    'litgpt': Peer('litgpt', 6e-4, (1, 3, 10), (10, 40),
                   prepare_litgpt, train_litgpt, score_litgpt),
    'nanochat': Peer('nanochat', 0.02, (1 / 3, 1, 3), (10, 40),
                     prepare_nanochat, train_nanochat, score_nanochat),
    'minimind': Peer('minimind', 5e-4, (1, 3, 10), (8, 32),
                     prepare_minimind, train_minimind, score_minimind)}
