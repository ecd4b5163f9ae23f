"""What several test files use."""

import faulthandler
import hashlib
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import prepare
from model import GPT
from plaingpt.data.batches import BatchLoader
from plaingpt.data.chat_tokenizer import ChatTokenizer
from plaingpt.data.tokenizers import ByteTokenizer
from plaingpt.inference import lm_eval_model
from plaingpt.system.errors import run_script
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.step import Step

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get('PLAINGPT_SHARED', ROOT.parent / 'shared'))


def shared_file(name):
    """A file of real text that is beside the checkout on some machines; skips where absent."""
    path = SHARED / 'data' / name
    if not path.exists():
        pytest.skip(f'{path} is not there (PLAINGPT_SHARED names its folder)')
    return path


def copy_project(folder):
    """Copy what a checkout has of code → the folder, which must not exist."""
    for name in ('plaingpt', 'tests', 'tools', 'config', 'references'):
        shutil.copytree(ROOT / name, folder / name,
                        ignore=shutil.ignore_patterns('__pycache__'))
    for path in (*ROOT.glob('*.py'), *ROOT.glob('*.toml'), ROOT / 'README.md', ROOT / 'LICENSE'):
        shutil.copy(path, folder)
    return folder


def options(**values):
    return [f'--{key}={value}' for key, value in values.items()]


TINY = options(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=6,
               gradient_accumulation_steps=2, eval_interval=3, eval_iters=2, warmup_iters=2,
               lr_decay_iters=6, device='cpu', dtype='float32', report=False)
# of runs that the preflight checks
CHECKED = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4, total_batch_size=0,
               gradient_accumulation_steps=2, device='cpu', dtype='float32', vocab_size=0,
               compile=False, max_iters=300, eval_iters=2, eval_interval=10,
               warmup_iters=2, lr_decay_iters=300, check=True)


def fails(capsys, monkeypatch, main, *argv):
    """Run a script's main, expect exit code 2 and one `error:` line → that line."""
    monkeypatch.setattr(sys, 'argv', ['script', *map(str, argv)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run_script(main)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: '), lines
    return lines[0]


def size_of_png(path):
    """(width, height) in pixels."""
    data = path.read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')


def run(*command, cwd=None):
    """Run a command as a user would → its stdout. Fails the test if it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, text=True, capture_output=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fork(main, *argv, log, before=None, **env):
    """Run a command's `main` in a fork of this process, as a user would run its script → the
    process id. log: file of all that it prints; before: called first; env: added variables."""
    pid = os.fork()
    if pid:
        return pid
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (open(fd, 'w', buffering=1, closefd=False) for fd in (1, 2))
    sys.argv = ['script.py', *map(str, argv)]
    os.environ.update(env)
    # Also where the tests run under nohup, and after a library has set a handler in this process.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # No process outlives a test that fails; one that hangs says where.
    faulthandler.dump_traceback_later(300, exit=True, file=2)
    tqdm.set_lock(threading.RLock())  # its own is shared with forks, which may be killed with it
    code = 0
    try:
        if before:
            before()
        run_script(main)
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def fork_job(main, processes, folder, *argv, before=None, missing=()):
    """As fork, in the processes of one job, or in one that is no job; `missing` ones never come
    → {rank: process id}, {rank: file of all that it prints, folder/log0, …}"""
    envs = ranks(processes) if processes > 1 else [{}]
    logs = {rank: folder / f'log{rank}' for rank in range(processes) if rank not in missing}
    return {rank: fork(main, *argv, log=log, before=before, **envs[rank])
            for rank, log in logs.items()}, logs


def launch(main, processes, folder, *argv, before=None):
    """The same, to the end → what rank 0 printed. Fails the test where one fails."""
    pids, logs = fork_job(main, processes, folder, *argv, before=before)
    codes = [exit_code(pid) for pid in pids.values()]
    assert codes == [0] * processes, [log.read_text() for log in logs.values()]
    return logs[0].read_text()


def die_before_change(n, within):
    """End this process with exit code 9 before its n-th change of a path that has `within` in it.
    """
    count = itertools.count(1)

    def hook(event, arguments):
        changes = event in ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link') or (
            event == 'open' and type(arguments[2]) is int and arguments[2] & os.O_CREAT)
        if changes and within in str(arguments[0]) and next(count) == n:
            os._exit(9)
    sys.addaudithook(hook)


def run_copy(folder, script, *argv):
    """Run a script of a copy of the project in a fork of this process, which saves importing torch
    → (exit code, all that it printed)"""
    def main(argv):
        for name in list(sys.modules):
            if str(ROOT) in (getattr(sys.modules[name], '__file__', None) or '') \
                    and 'site-packages' not in sys.modules[name].__file__:
                del sys.modules[name]
        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if path != str(ROOT))]
        runpy.run_path(script, run_name='__main__')
    log = Path(folder, 'log')
    return exit_code(fork(main, *argv, log=log)), log.read_text()


def exit_code(pid):
    """Wait for a process of `fork` → its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(condition, seconds=60):
    """Wait for another process to bring it about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ranks(size):
    """The environment of each process of a job that is started without torchrun."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]  # which is free
    return [dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                 LOCAL_WORLD_SIZE=str(size), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
            for rank in range(size)]


CHAT = ChatTokenizer(ByteTokenizer())


def ask(question, answer, *more):
    texts = [question, answer, *more]
    return [{'role': ('user', 'assistant')[i % 2], 'content': text}
            for i, text in enumerate(texts)]


def conversations(n, seed=0):
    """Answers are of very different lengths, so that micro-batches have few targets or many."""
    rng = random.Random(seed)
    return [ask(f'{i}?' * rng.randint(1, 4), 'ab' * rng.choice((1, 1, 12))) for i in range(n)]


def rounding(logits, n_layer, n_embd):
    """How far logits may lie apart from others that are computed in another order in float32: each
    block adds sums of n_embd products. Eight times what is typical; a mistake makes far more."""
    return 8 * torch.finfo(torch.float32).eps * n_embd**0.5 * n_layer * logits.abs().max().item()


@torch.no_grad()
def same_logits(ours, theirs, idx):
    """Whether our model and one of transformers compute the same, but for rounding."""
    ours, c = ours.eval(), ours.config
    expected = theirs.eval()(idx).logits
    apart = (ours(idx)[0] - expected).abs().max().item()
    return apart < rounding(expected, c.n_layer, c.n_embd)


def write_tasks(folder, monkeypatch):
    """→ files of two tasks of lm_eval, which knows no other: the right ending, and the word."""
    tasks = pytest.importorskip('lm_eval.tasks')  # an index of its own tasks would take seconds
    monkeypatch.setattr(tasks, 'TaskManager', partial(tasks.TaskManager, include_defaults=False))
    rows = [{'text': f'usage of {word}', 'word': word, 'words': [word, 'of the usage', 'def']}
            for word in ('the', 'main', 'parser', 'import', 'a class', 'self')]
    (folder / 'questions.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for name, more in (
            ('ending', 'output_type: multiple_choice\ndoc_to_choice: words\ndoc_to_target: 0\n'
                       'metric_list: [{metric: acc}, {metric: acc_norm}]\n'),
            ('word', 'output_type: loglikelihood\ndoc_to_target: " {{word}}"\n'
                     'metric_list: [{metric: perplexity}, {metric: acc}]\n')):
        (folder / f'{name}.yaml').write_text(
            f'task: {name}\ndataset_path: json\ntest_split: test\ndoc_to_text: text\n'
            f'dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}\n{more}')
    return folder / 'ending.yaml', folder / 'word.yaml'


def one_benchmark(patch, answers):
    """eval_tasks=own asks how likely these texts are after 'def', without lm_eval."""
    def score_tasks(tasks, limit, *arguments):
        lm = lm_eval_model.Requests(*arguments)
        found = lm._loglikelihood_tokens([
            (None, lm.tok_encode('def'), lm.tok_encode(answer)) for answer in answers])
        return {'own': {'logp': sum(logp for logp, _ in found), 'questions': len(answers)}}
    patch.setattr(lm_eval_model, 'load_tasks', lambda names: None)
    patch.setattr(lm_eval_model, 'score_tasks', score_tasks)


def write_chat(folder, train, val=None):
    """Conversations → a dataset folder as prepare.py writes it."""
    folder.mkdir(parents=True)
    meta = {'format_version': 1, 'dtype': 'uint16', 'vocab_size': CHAT.vocab_size,
            'tokenizer': CHAT.to_json(), 'splits': {}, 'source': {}}
    for split, conversations in (('train', train), ('val', val or train)):
        ids, learned = (np.concatenate(part) for part in zip(
            *map(CHAT.encode_conversation, conversations), strict=True))
        digests = {}
        for name, data in ((split, ids.astype('<u2')), (f'{split}_mask', learned.astype('u1'))):
            (folder / f'{name}.bin').write_bytes(data.tobytes())
            digests[name] = hashlib.sha256(data.tobytes()).hexdigest()
        meta['splits'][split] = {
            'tokens': len(ids), 'documents': len(conversations), 'learned': int(learned.sum()),
            'files': [{'name': f'{split}.bin', 'tokens': len(ids), 'sha256': digests[split],
                       'mask_sha256': digests[f'{split}_mask']}]}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return folder


class HostReads(TorchDispatchMode):
    """Notes the operators whose result the host has to know before it can go on: on a GPU it waits
    there for all work before."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        by_number = func is torch.ops.aten.index.Tensor and not any(
            i is not None and i.dtype == torch.bool for i in args[1])  # its size is known
        if tags & set(func.tags) and not by_number:
            self.found.append(str(func))
        return func(*args, **kwargs or {})


def in_background(Saver, *arguments, **how):
    """A Saver that writes while training goes on, as on CUDA."""
    return Saver(*arguments, **{**how, 'background': True})


def after_init(patch, change):
    """change(model) happens to each GPT that is made. patch: a fixture of tests/checks"""
    def changed(init):
        def __init__(self, config):
            init(self, config)
            with torch.no_grad():
                change(self)
        return __init__
    patch(GPT, '__init__', changed)


def change_batches(patch, change):
    """Each batch becomes change(idx, targets)."""
    patch(BatchLoader, '_on_host', lambda on_host: lambda self, starts: change(
        *on_host(self, starts)))


def lines(out_dir, key):
    """The lines of a run's metrics.jsonl that have `key`."""
    text = (out_dir / 'metrics.jsonl').read_text()
    return [line for line in map(json.loads, text.splitlines()) if key in line]


def model_of(checkpoint):
    """The model that a Checkpoint holds, without dropout."""
    model = GPT(checkpoint.config)
    checkpoint.load_into(model)
    return model


def weights(out_dir, which='latest'):
    """The parameters in a checkpoint of a run."""
    return list(model_of(checkpoints.find(out_dir, which)).parameters())


def same(a, b):
    """Whether the tensors of two lists have the same bits."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def prepare_corpora(folder, texts):
    """{name: text} → the folder, with NAME.txt and, prepared by bytes, data/NAME of each."""
    for name, text in texts.items():
        (folder / f'{name}.txt').write_text(text)
        prepare.main(['text', f'--input={folder}/{name}.txt', '--tokenizer=byte',
                      f'--data_dir={folder}/data/{name}'])
    return folder


def change_steps(patch, change):
    """The loss of the n-th step, counted from 1, is change(n, model, loss) from when the loop
    begins: the preflight makes steps before. patch: a MonkeyPatch"""
    import train
    loop, forward_backward, count = train.train, Step.forward_backward, itertools.count(1)

    def changed(step, batches):
        step.loss = change(next(count), step.model, forward_backward(step, batches))
        return step.loss

    def begin(run, monitor):
        patch.setattr(Step, 'forward_backward', changed)
        return loop(run, monitor)
    patch.setattr(train, 'train', begin)
