"""Code, data and weights that are spoiled on purpose: what the preflight says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import ROOT, options, torchrun

import model
import prepare
import train
from plaingpt.kernels import documents
from plaingpt.preflight import step_checks
from plaingpt.system.errors import UserError
from plaingpt.tokens import batches
from plaingpt.tokens.batches import BatchLoader
from plaingpt.training import checkpoint, optimizers, schedules, starting_point, training_step

SMALL = dict(n_layer=3, n_head=2, n_embd=32, block_size=16, batch_size=4, max_iters=300,
             gradient_accumulation_steps=2, eval_iters=2, warmup_iters=2, device='cpu',
             dtype='float32')


def failed(capsys, dataset, out_dir, **changes):
    """Check a small run → the names of the checks that fail."""
    with pytest.raises(UserError) as problem:
        train.main([*options(**{**SMALL, **changes, 'dataset': dataset, 'out_dir': out_dir}),
                    '--check'])
    lines = str(problem.value).splitlines()
    assert lines[-1].startswith('nothing was trained') and not Path(out_dir).exists()
    told = [line.removeprefix('FAILED ') for line in capsys.readouterr().out.splitlines()
            if line.startswith('FAILED ')]
    assert [line.startswith(f'preflight: {name}? No: ') for line, name
            in zip(lines, told, strict=False)] == [True] * (len(lines) - 1)
    return told


# -----------------------------------------------------------------------------
# what people break: each spoils something and returns the settings to train with


def after_init(monkeypatch, change):
    """Let `change(model)` happen to each GPT that is made."""
    original = model.GPT.__init__

    def changed(self, config):
        original(self, config)
        with torch.no_grad():
            change(self)
    monkeypatch.setattr(model.GPT, '__init__', changed)


def attention_is_not_causal(monkeypatch, tmp_path):
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda q, k, v, is_causal=False, **rest:
                        original(q, k, v, **rest))
    return {}


def mask_lets_one_later_token_through(monkeypatch, tmp_path):
    original = F.scaled_dot_product_attention

    def leaky(q, k, v, is_causal=False, **rest):
        T = q.size(2)
        mask = torch.ones(T, T, dtype=torch.bool).tril(1) if is_causal else rest.pop('attn_mask')
        return original(q, k, v, **{**rest, 'attn_mask': mask})
    monkeypatch.setattr(F, 'scaled_dot_product_attention', leaky)
    return dict(n_layer=1)


def mask_leaves_each_token_alone(monkeypatch, tmp_path):
    original = F.scaled_dot_product_attention

    def alone(q, k, v, is_causal=False, **rest):
        mask = torch.eye(q.size(2), dtype=torch.bool) if is_causal else rest.pop('attn_mask')
        return original(q, k, v, **{**rest, 'attn_mask': mask})
    monkeypatch.setattr(F, 'scaled_dot_product_attention', alone)
    return {}


def rows_share_a_norm(monkeypatch, tmp_path):
    original = model.MLP.forward
    monkeypatch.setattr(model.MLP, 'forward', lambda self, x: original(self, x - x.mean(dim=0)))
    return {}


def documents_leak(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, 'document_starts', lambda idx, *rest: torch.zeros_like(idx))
    return dict(document_attention=True, document_start=0)


def rotary_is_not_applied(monkeypatch, tmp_path):
    monkeypatch.setattr(model, 'rotate', lambda x, cos, sin: x)
    return dict(rotary=True)


def cached_positions_are_off_by_one(monkeypatch, tmp_path):
    from plaingpt.inference.generation import KVCache
    original = KVCache.advance

    def later(self, T):
        original(self, T)
        if isinstance(self.positions, torch.Tensor):
            self.positions = self.positions + 1
    monkeypatch.setattr(KVCache, 'advance', later)
    return {}


def detached_before_each_mlp(monkeypatch, tmp_path):
    def forward(self, x, rotary=None, cache=None, idx=None):
        x = (x + self.attn(self.ln_1(x), rotary, cache, idx)).detach()
        return x + self.mlp(self.ln_2(x))
    monkeypatch.setattr(model.Block, 'forward', forward)
    return {}


def branch_detached(monkeypatch, tmp_path):
    def forward(self, x, rotary=None, cache=None, idx=None):
        x = x + self.attn(self.ln_1(x.detach()), rotary, cache, idx)
        return x + self.mlp(self.ln_2(x.detach()))
    monkeypatch.setattr(model.Block, 'forward', forward)
    return {}


def backward_pass_is_wrong(monkeypatch, tmp_path):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.relu().square()

        @staticmethod
        def backward(ctx, grad):
            return grad  # and should be 2·relu(x)·grad

    monkeypatch.setitem(model.ACTIVATIONS, 'relu2', Wrong.apply)
    return dict(mlp='relu2', n_embd=64)


def initialised_ten_times_too_large(monkeypatch, tmp_path):
    after_init(monkeypatch, lambda gpt: [p.mul_(10) for p in gpt.parameters() if p.dim() == 2])
    return dict(n_embd=128)


def weights_in_float16(monkeypatch, tmp_path):
    after_init(monkeypatch, lambda gpt: gpt.half())
    return {}


def frozen(monkeypatch, tmp_path):
    original = starting_point.build_model

    def build_model(*arguments):
        gpt = original(*arguments)
        gpt.transformer.h[1].requires_grad_(False)
        return gpt
    monkeypatch.setattr(starting_point, 'build_model', build_model)
    return {}


def optimizer_without_the_embedding(monkeypatch, tmp_path):
    original = optimizers.parameter_groups

    def parameter_groups(*arguments):
        groups = original(*arguments)
        del groups['embedding']
        return groups
    monkeypatch.setattr(optimizers, 'parameter_groups', parameter_groups)
    return dict(tied_head=False)


def layer_beside_the_class(monkeypatch, tmp_path):
    original = starting_point.build_model

    def build_model(*arguments):
        gpt = original(*arguments)
        gpt.transformer.h[0].mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        return gpt
    monkeypatch.setattr(starting_point, 'build_model', build_model)
    return {}


def weight_that_is_no_parameter(monkeypatch, tmp_path):
    after_init(monkeypatch, lambda gpt: setattr(gpt, 'scale', torch.randn(1) + 3))
    original = model.GPT.logits
    monkeypatch.setattr(model.GPT, 'logits', lambda self, x: original(self, x) * self.scale)
    return {}


def tied_head_lost_on_load(monkeypatch, tmp_path):
    original = checkpoint.Checkpoint.load_weights

    def load_weights(self, gpt, *rest):
        original(self, gpt, *rest)
        gpt.lm_head.weight = nn.Parameter(torch.randn_like(gpt.lm_head.weight) * 0.02)
    monkeypatch.setattr(checkpoint.Checkpoint, 'load_weights', load_weights)
    return {}


def momentum_lost_on_load(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint.Checkpoint, 'load_optimizer', lambda *_: None)
    return {}


def same_batch_each_step(monkeypatch, tmp_path):
    original = BatchLoader.sequence_ids
    monkeypatch.setattr(BatchLoader, 'sequence_ids',
                        lambda self, step, micro: original(self, 0, micro))
    return {}


def sequences_at_random(monkeypatch, tmp_path):
    def sequence_ids(self, step, micro):
        return np.random.default_rng().integers(0, self.sequences_per_epoch, self.batch_size)
    monkeypatch.setattr(BatchLoader, 'sequence_ids', sequence_ids)
    return {}


def changed_on_the_way(change):
    """A spoiling that changes (idx, targets) of each batch."""
    def spoil(monkeypatch, tmp_path):
        original = BatchLoader._on_host
        monkeypatch.setattr(BatchLoader, '_on_host',
                            lambda self, starts: change(*original(self, starts)))
        return {}
    return spoil


targets_not_shifted = changed_on_the_way(lambda idx, targets: (idx, idx.clone()))
targets_shifted_by_two = changed_on_the_way(lambda idx, targets: (idx, targets.roll(-1, dims=1)))
noise_in_targets = changed_on_the_way(lambda idx, targets: (
    idx, torch.where(torch.rand(targets.shape) < 0.1, 0, targets)))
tokens_left_out = changed_on_the_way(lambda idx, targets: (idx.clamp(min=3), targets))


def last_batch_dropped(monkeypatch, tmp_path):
    original = BatchLoader.eval_batches
    monkeypatch.setattr(BatchLoader, 'eval_batches', lambda *arguments: original(*arguments)[:-1])
    return {}


def evaluation_in_train_mode(monkeypatch, tmp_path):
    monkeypatch.setattr(model.GPT, 'eval', lambda self: self)
    return dict(dropout=0.2)


def rate_gone_at_iteration_15(monkeypatch, tmp_path):
    return dict(lr_decay_iters=15, min_lr=0.0)


def schedule_of_another_unit(monkeypatch, tmp_path):
    monkeypatch.setitem(schedules.SCHEDULES, 'linear', lambda it, config:
                        config.learning_rate * max(0.0, 1 - it / 100))
    return dict(lr_schedule='linear', max_iters=1000)


def future_leaks_late_in_the_sequence(monkeypatch, tmp_path):
    original = F.scaled_dot_product_attention

    def leaky(q, k, v, is_causal=False, **rest):
        T = q.size(2)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask[40:] = True
        return original(q, k, v, **{**rest, 'attn_mask': mask if is_causal else rest['attn_mask']})
    monkeypatch.setattr(F, 'scaled_dot_product_attention', leaky)
    return dict(block_size=64)


def softmax_over_nothing(monkeypatch, tmp_path):
    def attention(q, k, v, is_causal=False, attn_mask=None, **rest):
        T = q.size(2)
        scores = (q @ k.mT).masked_fill(torch.ones(T, T).triu().bool(), float('-inf'))
        return scores.softmax(dim=-1) @ v  # the first token has nothing to attend to
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention)
    return {}


def blocks_shared(monkeypatch, tmp_path):
    after_init(monkeypatch, lambda gpt: gpt.transformer.__setitem__(
        'h', nn.ModuleList([gpt.transformer.h[0]] * len(gpt.transformer.h))))
    return {}


def splits_are_swapped(monkeypatch, tmp_path):
    original = starting_point.open_batches
    monkeypatch.setattr(starting_point, 'open_batches', lambda *arguments:
                        original(*arguments)[::-1])
    return {}


def validation_is_training_text(monkeypatch, tmp_path):
    original = starting_point.open_batches

    def open_batches(*arguments):
        train_data, val_data = original(*arguments)
        val_data.stream = train_data.stream
        return train_data, val_data
    monkeypatch.setattr(starting_point, 'open_batches', open_batches)
    return {}


def same_micro_batch(monkeypatch, tmp_path):
    original = BatchLoader.sequence_ids
    monkeypatch.setattr(BatchLoader, 'sequence_ids',
                        lambda self, step, micro: original(self, step, 0))
    return {}


def order_is_no_permutation(monkeypatch, tmp_path):
    monkeypatch.setattr(batches, 'permute', lambda indices, n, k: indices * 2 % n)
    return {}


def text_in_its_order(monkeypatch, tmp_path):
    monkeypatch.setattr(batches, 'permute', lambda indices, n, k: indices)
    return {}


def epoch_of_little_text(monkeypatch, tmp_path):
    original = BatchLoader.__init__

    def init(self, *arguments, **rest):
        original(self, *arguments, **rest)
        self.sequences_per_epoch //= self.block_size
    monkeypatch.setattr(BatchLoader, '__init__', init)
    return {}


def one_place_evaluated(monkeypatch, tmp_path):
    original = BatchLoader.eval_batches
    monkeypatch.setattr(BatchLoader, 'eval_batches', lambda *arguments: [
        starts * 0 for starts in original(*arguments)])
    return {}


def eval_mode_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(model.GPT, 'train', lambda self, mode=True:
                        nn.Module.train(self, mode and self.training))
    return dict(dropout=0.2)


def loss_shifted_twice(monkeypatch, tmp_path):
    original = model.GPT.forward
    monkeypatch.setattr(model.GPT, 'forward', lambda self, idx, targets=None: original(
        self, idx, targets if targets is None else F.pad(targets[:, 1:], (0, 1), value=-1)))
    return {}


def logits_scaled_in_sampling_alone(monkeypatch, tmp_path):
    original = model.GPT.logits
    monkeypatch.setattr(model.GPT, 'logits', lambda self, x: original(self, x) * 0.25)
    return {}


def uphill(monkeypatch, tmp_path):
    original = torch.amp.GradScaler.scale
    monkeypatch.setattr(torch.amp.GradScaler, 'scale', lambda self, loss: original(self, -loss))
    return {}


def loss_not_divided(monkeypatch, tmp_path):
    original = training_step.forward_backward
    monkeypatch.setattr(step_checks, 'forward_backward', lambda gpt, batches, micro_steps, *rest:
                        sum(original(gpt, batches, 1, *rest) for _ in range(micro_steps)))
    return {}


def gradients_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.optim.AdamW, 'zero_grad', lambda *_, **__: None)
    return {}


def weights_held(monkeypatch, tmp_path):
    original = training_step.StepGuard.check_finite
    monkeypatch.setattr(training_step.StepGuard, 'check_finite', lambda *arguments:
                        1 - original(*arguments))
    return {}


SPOILED = {
    future_leaks_late_in_the_sequence: 'the future is hidden',
    softmax_over_nothing: 'the first loss is usual',
    blocks_shared: 'a saved model comes back',
    splits_are_swapped: 'batches are what the files hold',
    validation_is_training_text: 'batches are what the files hold',
    same_micro_batch: 'each step and process has its own batch',
    order_is_no_permutation: 'an epoch reads every sequence once',
    text_in_its_order: 'an epoch reads every sequence once',
    epoch_of_little_text: 'an epoch reads every sequence once',
    one_place_evaluated: 'an evaluation reads every sequence once',
    eval_mode_kept: 'an evaluation repeats itself',
    loss_shifted_twice: 'the loss is that of the logits',
    logits_scaled_in_sampling_alone: 'the loss is that of the logits',
    uphill: 'a step follows the gradient',
    loss_not_divided: 'a step follows the gradient',
    gradients_kept: 'a step follows the gradient',
    weights_held: 'a step follows the gradient',
    attention_is_not_causal: 'the future is hidden',
    mask_lets_one_later_token_through: 'the future is hidden',
    mask_leaves_each_token_alone: 'the past is seen',
    rows_share_a_norm: 'sequences and documents are apart',
    documents_leak: 'sequences and documents are apart',
    rotary_is_not_applied: 'the order of tokens matters',
    cached_positions_are_off_by_one: 'generation with a cache is the same',
    detached_before_each_mlp: 'every weight gets a gradient',
    branch_detached: 'the gradient is true',
    backward_pass_is_wrong: 'the gradient is true',
    initialised_ten_times_too_large: 'the first loss is usual',
    weights_in_float16: 'the weights are float32',
    frozen: 'every weight may move',
    optimizer_without_the_embedding: 'every weight may move',
    layer_beside_the_class: 'a checkpoint has every weight',
    weight_that_is_no_parameter: 'a saved model comes back',
    tied_head_lost_on_load: 'a saved model comes back',
    momentum_lost_on_load: 'a saved model comes back',
    same_batch_each_step: 'each step and process has its own batch',
    sequences_at_random: 'each step and process has its own batch',
    targets_not_shifted: 'batches are what the files hold',
    targets_shifted_by_two: 'batches are what the files hold',
    noise_in_targets: 'batches are what the files hold',
    tokens_left_out: 'batches are what the files hold',
    last_batch_dropped: 'an evaluation reads every sequence once',
    evaluation_in_train_mode: 'an evaluation repeats itself',
    rate_gone_at_iteration_15: 'the learning rate lasts',
    schedule_of_another_unit: 'the learning rate lasts',
}


@pytest.mark.parametrize('spoil', SPOILED, ids=lambda spoil: spoil.__name__)
def test_what_is_broken_is_named_before_the_first_step(spoil, monkeypatch, tmp_path, char_data,
                                                       capsys):
    changes = spoil(monkeypatch, tmp_path)
    assert SPOILED[spoil] in failed(capsys, char_data, tmp_path / 'out', **changes)


def test_a_dataset_with_the_tokenizer_of_another_is_named(text_file, tmp_path, capsys):
    for name, source in (('one', text_file), ('other', Path(ROOT, 'README.md'))):
        prepare.main(['text', f'--input={source}', '--tokenizer=bpe:400',
                      f'--data_dir={tmp_path}/{name}'])
    one, other = (json.loads((tmp_path / name / 'meta.json').read_text())
                  for name in ('one', 'other'))
    (tmp_path / 'one/meta.json').write_text(json.dumps({**one, 'tokenizer': other['tokenizer']}))
    assert failed(capsys, tmp_path / 'one', tmp_path / 'out') == ['the data is text']


SPOILED_RANKS = '''
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import train
from plaingpt.tokens import batches
from plaingpt.tokens.batches import BatchLoader
from plaingpt.preflight import step_checks
from plaingpt.system.errors import run_script
original = BatchLoader.__init__
def same_rank(self, *arguments, rank=0, **rest):
    original(self, *arguments, **rest)
BatchLoader.__init__ = same_rank
run_script(train.main)
'''


def test_two_processes_with_the_same_data_are_named(tiny, tmp_path):
    script = tmp_path / 'same_rank.py'
    script.write_text(SPOILED_RANKS.format(root=str(ROOT)))
    done = torchrun(2, script, *tiny, check=False)
    assert done.returncode and '2 processes train on 1 batches' in done.stderr
    done = torchrun(2, ROOT / 'train.py', *tiny)
    assert done.stdout.count('checks passed') == 1
