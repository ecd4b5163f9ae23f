"""Code, data and weights that are spoiled on purpose: which check of the preflight says so."""

import json

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from changes import after_init, change_batches
from helpers import exit_code, fork, ranks

import evaluate
import model
import prepare
import train
from plaingpt.data import batches
from plaingpt.data.batches import BatchLoader
from plaingpt.system.errors import UserError
from plaingpt.training import (
    checkpoint,
    optimizers,
    schedules,
    step_guard,
)

SPOILED = []  # what people break: (function that breaks it, the check that fails, settings)


def fails(check, **settings):
    """Marks a function(patch) after which `check` fails for a run with these settings.
    patch(owner, name, change): owner.name becomes change(what it was)."""
    def add(spoil):
        SPOILED.append(pytest.param(spoil, check, settings, id=spoil.__name__))
        return spoil
    return add


# -----------------------------------------------------------------------------
# attention and positions


def attention_with_mask(patch, mask_of):
    """Attention over a whole sequence gets the mask mask_of(T), and not a causal one."""
    def change(original):
        def attention(q, k, v, is_causal=False, **rest):
            mask = mask_of(q.size(2)) if is_causal else rest['attn_mask']
            return original(q, k, v, **{**rest, 'attn_mask': mask})
        return attention
    patch(F, 'scaled_dot_product_attention', change)


@fails('the future is hidden')
def attention_is_not_causal(patch):
    attention_with_mask(patch, lambda T: None)


@fails('the future is hidden', n_layer=1)
def mask_lets_one_later_token_through(patch):
    attention_with_mask(patch, lambda T: torch.ones(T, T, dtype=torch.bool).tril(1))


@fails('the future is hidden', block_size=64)
def future_leaks_late_in_the_sequence(patch):
    attention_with_mask(patch, lambda T: torch.ones(T, T, dtype=torch.bool).tril()
                        | (torch.arange(T) >= 40)[:, None])


def reading_targets(patch, when):
    """The head reads a bit of the targets where when(model)."""
    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is not None and when(self):
            x = x + 0.1 * self.transformer.wte(targets.clamp(min=0))
        if targets is not None and self.loss_chunk_tokens:
            return None, model.chunked_cross_entropy(x, self.lm_head.weight, self.config.vocab_size,
                                                     targets, self.loss_chunk_tokens)
        logits = self.logits(x)
        return logits, None if targets is None else model.cross_entropy(logits, targets)
    patch(model.GPT, 'forward', lambda _: forward)


@fails('the future is hidden')
def targets_are_read(patch):
    reading_targets(patch, lambda gpt: True)


@fails('the future is hidden', tied_head=False, zero_init=True)
def targets_are_read_in_evaluations(patch):
    reading_targets(patch, lambda gpt: not gpt.training)


@fails('the future is hidden', tied_head=False)
def targets_are_read_in_training(patch):
    reading_targets(patch, lambda gpt: gpt.training)


@fails('the order of tokens matters')
def mask_leaves_each_token_alone(patch):
    attention_with_mask(patch, lambda T: torch.eye(T, dtype=torch.bool))


@fails('the first loss is usual')
def softmax_over_nothing(patch):
    def attention(q, k, v, **_):
        future_and_now = torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu()
        return (q @ k.mT).masked_fill(future_and_now, float('-inf')).softmax(dim=-1) @ v
    patch(F, 'scaled_dot_product_attention', lambda _: attention)


@fails('each block passes its input on')
def residual_connection_is_missing(patch):
    patch(model.Block, 'forward', lambda _: lambda self, x, *rest:
          self.mlp(self.ln_2(x + self.attn(self.ln_1(x), *rest))))


@fails('sequences and documents are apart')
def rows_share_a_norm(patch):
    patch(model.MLP, 'forward', lambda forward: lambda self, x: forward(self, x - x.mean(dim=0)))


@fails('sequences and documents are apart', batch_size=6)
def rows_of_large_batches_share_a_norm(patch):
    patch(model.MLP, 'forward', lambda forward: lambda self, x:
          forward(self, x - x.mean(dim=0) * (len(x) > 4)))


@fails('sequences and documents are apart', document_attention=True)
def documents_leak(patch):
    patch(model, 'find_documents', lambda find: lambda idx, opener: find(idx, -1))


@fails('the order of tokens matters', rotary=True)
def rotary_is_not_applied(patch):
    patch(model, 'rotate', lambda _: lambda x, cos, sin: x)


# -----------------------------------------------------------------------------
# gradients and the loss


@fails('every weight gets a gradient')
def detached_before_each_mlp(patch):
    def forward(self, x, *rest):
        x = (x + self.attn(self.ln_1(x), *rest)).detach()
        return x + self.mlp(self.ln_2(x))
    patch(model.Block, 'forward', lambda _: forward)


@fails('the gradient is true')
def branch_detached(patch):
    def forward(self, x, *rest):
        x = x + self.attn(self.ln_1(x.detach()), *rest)
        return x + self.mlp(self.ln_2(x.detach()))
    patch(model.Block, 'forward', lambda _: forward)


@fails('the gradient is true', mlp='relu2', n_embd=64)
def backward_pass_is_wrong(patch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.relu().square()

        @staticmethod
        def backward(ctx, grad):
            return grad  # and should be 2·relu(x)·grad
    patch(model, 'ACTIVATIONS', lambda table: {**table, 'relu2': Wrong.apply})


@fails('the loss is that of the logits')
def loss_shifted_twice(patch):
    patch(model.GPT, 'forward', lambda forward: lambda self, idx, targets=None: forward(
        self, idx, targets if targets is None else F.pad(targets[:, 1:], (0, 1), value=-1)))


@fails('the loss is that of the logits')
def logits_scaled_in_sampling_alone(patch):
    patch(model.GPT, 'logits', lambda logits: lambda self, x: logits(self, x) * 0.25)


# -----------------------------------------------------------------------------
# weights and checkpoints


def after_building(patch, change):
    """change(model) happens to the model of the run alone."""
    def changed(build_optimizer):
        def build(gpt, *rest):
            change(gpt)
            return build_optimizer(gpt, *rest)
        return build
    patch(train, 'build_optimizer', changed)


@fails('the first loss is usual', n_embd=128)
def initialised_ten_times_too_large(patch):
    after_init(patch, lambda gpt: [p.mul_(10) for p in gpt.parameters() if p.dim() == 2])


@fails('every weight may move')
def weights_in_float16(patch):
    after_init(patch, lambda gpt: gpt.half())


@fails('every weight may move')
def frozen(patch):
    after_building(patch, lambda gpt: gpt.transformer.h[1].requires_grad_(False))


@fails('every weight may move', tied_head=False)
def optimizer_without_the_embedding(patch):
    patch(optimizers, 'parameter_groups', lambda groups_of: lambda *arguments: {
        name: group for name, group in groups_of(*arguments).items() if name != 'embedding'})


@fails('a checkpoint has every weight')
def layer_beside_the_class(patch):
    after_building(patch, lambda gpt: setattr(gpt.transformer.h[0], 'mlp', nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))))


@fails('a saved model comes back')
def weight_that_is_no_parameter(patch):
    after_init(patch, lambda gpt: setattr(gpt, 'scale', torch.randn(1) + 3))
    patch(model.GPT, 'logits', lambda logits: lambda self, x: logits(self, x) * self.scale)


@fails('a saved model comes back')
def tied_head_lost_on_load(patch):
    def change(load_weights):
        def load(self, gpt, *rest):
            load_weights(self, gpt, *rest)
            gpt.lm_head.weight = nn.Parameter(torch.randn_like(gpt.lm_head.weight) * 0.02)
        return load
    patch(checkpoint.Checkpoint, 'load_into', change)


@fails('a saved model comes back')
def momentum_lost_on_load(patch):
    patch(checkpoint.Checkpoint, 'load_optimizer', lambda _: lambda *_: None)


# -----------------------------------------------------------------------------
# batches


@fails('an epoch reads every sequence once')
def same_batch_each_step(patch):
    patch(BatchLoader, 'sequence_ids', lambda ids: lambda self, step, micro: ids(self, 0, micro))


@fails('an epoch reads every sequence once')
def same_micro_batch(patch):
    patch(BatchLoader, 'sequence_ids', lambda ids: lambda self, step, micro: ids(self, step, 0))


@fails('batches are what the files hold')
def sequences_at_random(patch):
    patch(BatchLoader, 'sequence_ids', lambda _: lambda self, step, micro:
          np.random.default_rng().integers(0, self.sequences_per_epoch, self.batch_size))


@fails('batches are what the files hold')
def targets_not_shifted(patch):
    change_batches(patch, lambda idx, targets: (idx, idx.clone()))


@fails('batches are what the files hold')
def targets_shifted_by_two(patch):
    change_batches(patch, lambda idx, targets: (idx, targets.roll(-1, dims=1)))


@fails('batches are what the files hold')
def tokens_left_out(patch):
    change_batches(patch, lambda idx, targets: (idx.clamp(min=3), targets))


@fails('batches are what the files hold')
def splits_are_swapped(patch):
    patch(train, 'open_batches', lambda opened: lambda *arguments:
          opened(*arguments)[::-1])


@fails('batches are what the files hold')
def validation_is_training_text(patch):
    def change(opened):
        def open_batches(*arguments):
            train_data, val_data = opened(*arguments)
            val_data.stream = train_data.stream
            return train_data, val_data
        return open_batches
    patch(train, 'open_batches', change)


@fails('an epoch reads every sequence once')
def order_is_no_permutation(patch):
    patch(batches, 'permute', lambda _: lambda indices, n, k: indices // 2)


@fails('an epoch reads every sequence once')
def text_in_its_order(patch):
    patch(batches, 'permute', lambda _: lambda indices, n, k: indices)


@fails('an epoch reads every sequence once')
def epoch_of_little_text(patch):
    def change(init):
        def __init__(self, *arguments, **rest):
            init(self, *arguments, **rest)
            self.sequences_per_epoch //= self.block_size
        return __init__
    patch(BatchLoader, '__init__', change)


# -----------------------------------------------------------------------------
# evaluations


@fails('an evaluation reads every sequence once')
def last_batch_dropped(patch):
    patch(BatchLoader, 'eval_batches', lambda batches_of: lambda *arguments:
          batches_of(*arguments)[:-1])


@fails('an evaluation reads every sequence once')
def one_place_evaluated(patch):
    patch(BatchLoader, 'eval_batches', lambda batches_of: lambda *arguments:
          [starts * 0 for starts in batches_of(*arguments)])


@fails('the loss is that of the logits', dropout=0.2)
def evaluation_in_train_mode(patch):
    patch(model.GPT, 'eval', lambda _: lambda self: self)


@fails('the loss is that of the logits', dropout=0.2)
def eval_mode_kept(patch):
    patch(model.GPT, 'train', lambda _: lambda self, mode=True:
          nn.Module.train(self, mode and self.training))


# -----------------------------------------------------------------------------
# the step and the learning rate


@fails('a step follows the gradient')
def uphill(patch):
    patch(torch.amp.GradScaler, 'scale', lambda scale: lambda self, loss: scale(self, -loss))


@fails('a step follows the gradient')
def loss_not_divided(patch):
    patch(train, 'forward_backward', lambda original: lambda gpt, batches, micro_steps, *rest:
          sum(original(gpt, batches, 1, *rest) for _ in range(micro_steps)))


@fails('a step follows the gradient')
def gradients_kept(patch):
    patch(torch.optim.AdamW, 'zero_grad', lambda _: lambda *_, **__: None)


@fails('a step follows the gradient')
def weights_held(patch):
    patch(step_guard.StepGuard, 'check_finite', lambda original: lambda *arguments:
          1 - original(*arguments))


@fails('the learning rate lasts', lr_decay_iters=15, min_lr=0.0)
def rate_gone_at_iteration_15(patch):
    pass


@fails('the learning rate lasts', lr_schedule='linear', max_iters=1000, lr_decay_iters=1000)
def schedule_of_another_unit(patch):
    patch(schedules, 'SCHEDULES', lambda table: {**table, 'linear': lambda it, config:
                                                 config.learning_rate * max(0.0, 1 - it / 100)})


@pytest.mark.parametrize('spoil, check, settings', SPOILED)
def test_what_is_broken_is_named_before_the_first_step(spoil, check, settings, patch, failed):
    spoil(patch)
    assert check in failed(**{'n_layer': 3, **settings})


# -----------------------------------------------------------------------------
# whole runs


def test_a_dataset_with_the_tokenizer_of_another_is_named(text_file, tmp_path, failed):
    (tmp_path / 'backwards.txt').write_text(text_file.read_text()[::-1])
    for name, source in (('one', text_file), ('other', tmp_path / 'backwards.txt')):
        prepare.main(['text', f'--input={source}', '--tokenizer=bpe:400',
                      f'--data_dir={tmp_path}/{name}'])
    one, other = (json.loads((tmp_path / name / 'meta.json').read_text())
                  for name in ('one', 'other'))
    (tmp_path / 'one/meta.json').write_text(json.dumps({**one, 'tokenizer': other['tokenizer']}))
    assert failed(dataset=tmp_path / 'one') == ['the data is text']


def test_a_check_that_fails_stops_the_run_unless_it_is_off(
        patch, tiny, tmp_path, capsys):
    targets_not_shifted(patch)
    for asked in ((), ('--check',)):
        with pytest.raises(UserError) as problem:
            train.main([*tiny, *asked])
        first, *_, last = str(problem.value).splitlines()
        assert first.startswith('preflight: batches are what the files hold: no, ')
        assert 'the inputs shifted by one' in first and last.startswith('nothing was trained')
    assert not (tmp_path / 'out/run.json').exists()
    capsys.readouterr()
    train.main([*tiny, '--check=False'])
    assert 'preflight' not in ''.join(capsys.readouterr())


def test_a_mask_that_is_lost_after_the_start_is_named_by_a_resume_and_an_evaluation(
        patch, tiny, tmp_path):
    train.main([*tiny, '--max_iters=2'])
    attention_is_not_causal(patch)
    for again in ('--max_iters=4', '--eval_only=True'):
        with pytest.raises(UserError, match=r'the future is hidden: no, positions'):
            train.main([*tiny, '--init_from=resume', again])
    with pytest.raises(UserError, match=r'nothing was scored, because positions'):
        evaluate.main([f'--out_dir={tmp_path}/out', '--device=cpu'])


def same_rank_everywhere():
    original = BatchLoader.__init__
    BatchLoader.__init__ = lambda self, *arguments, rank=0, **rest: original(
        self, *arguments, **rest)


@pytest.mark.slow
def test_two_processes_with_the_same_data_are_named(tiny, tmp_path):
    logs = [tmp_path / 'log0', tmp_path / 'log1']
    pids = [fork(train.main, *tiny, log=log, before=same_rank_everywhere, **env)
            for log, env in zip(logs, ranks(2), strict=True)]
    assert 0 not in [exit_code(pid) for pid in pids]
    assert 'each step, micro-batch and process needs its own' in ''.join(
        log.read_text() for log in logs)
