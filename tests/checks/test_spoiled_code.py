"""Code, data and weights that are spoiled on purpose: which check of the preflight says so."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import exit_code, fork_job
from runs import after_init, change_batches

import evaluate
import model
import prepare
import train
from plaingpt.checks import model_checks
from plaingpt.core import (
    bad_steps,
    batches,
    checkpoint,
    loss,
    optimizers,
    schedules,
)
from plaingpt.core.batches import BatchLoader
from plaingpt.system.errors import UserError

# What people break is a function of patch(owner, name, change): owner.name becomes
# change(what it was).


def replaced(owner, name, change):
    return lambda patch: patch(owner, name, change)


def other_batches(change):
    return partial(change_batches, change=change)


def other_weights(change):
    return partial(after_init, change=change)


def attention_with_mask(mask_of):
    """Attention over a whole sequence gets the mask mask_of(T), and not a causal one."""
    def change(original):
        def attention(q, k, v, is_causal=False, **rest):
            mask = mask_of(q.size(2)) if is_causal else rest['attn_mask']
            return original(q, k, v, **{**rest, 'attn_mask': mask})
        return attention
    return replaced(F, 'scaled_dot_product_attention', change)


def reading_targets(when):
    """The head reads a bit of the targets where when(model)."""
    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is not None and when(self):
            x = x + 0.1 * self.transformer.wte(targets.clamp(min=0))
        if targets is None:
            return self.logits(x), None
        return None, self.loss_in_chunks(self, x, targets) / targets.numel()
    return replaced(model.GPT, 'forward', lambda _: forward)


def detached_before_each_mlp(self, x, *rest):
    x = (x + self.attn(self.ln_1(x), *rest)).detach()
    return x + self.mlp(self.ln_2(x))


def branch_detached(self, x, *rest):
    x = x + self.attn(self.ln_1(x.detach()), *rest)
    return x + self.mlp(self.ln_2(x.detach()))


class WrongBackwardPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu().square()

    @staticmethod
    def backward(ctx, grad):
        return grad  # and should be 2·relu(x)·grad


def after_building(change):
    """change(model) happens to the model of the run alone."""
    def changed(build_optimizer):
        def build(gpt, *rest):
            change(gpt)
            return build_optimizer(gpt, *rest)
        return build
    return replaced(train, 'build_optimizer', changed)


def weight_beside_the_parameters(patch):
    def with_scale(gpt):
        gpt.scale = torch.randn(1) + 3
    after_init(patch, with_scale)
    patch(model.GPT, 'logits', lambda logits: lambda self, x: logits(self, x) * self.scale)


def layer_beside_the_class(gpt):
    gpt.transformer.h[0].mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def tied_head_lost_on_load(load_weights):
    def load(self, gpt, *rest):
        load_weights(self, gpt, *rest)
        gpt.lm_head.weight = nn.Parameter(torch.randn_like(gpt.lm_head.weight) * 0.02)
    return load


def validation_is_training_text(opened):
    def open_batches(*arguments):
        train_data, val_data = opened(*arguments)
        val_data.stream = train_data.stream
        return train_data, val_data
    return open_batches


def loss_of(counts, when=lambda gpt: True, rows=None):
    """Where when(model), only targets at the positions counts(T) of the first `rows` count."""
    def change(original):
        def forward(self, idx, targets=None):
            if targets is not None and when(self):
                counted = torch.zeros_like(targets, dtype=torch.bool)
                counted[:rows, counts(targets.size(1))] = True
                targets = targets.masked_fill(~counted, -1)
            return original(self, idx, targets)
        return forward
    return replaced(model.GPT, 'forward', change)


def loss_of_the_first_chunk(apply):
    def changed(loss_of, chunk, targets, *others):
        counted = targets.where(torch.arange(len(targets)) < chunk, -1)
        return apply(loss_of, chunk, counted, *others)
    return changed


def after_attention(change):
    """change(y) edits what each attention layer returns, (B, T, C)."""
    def changed(forward):
        def spoiled(*arguments, **how):
            y = forward(*arguments, **how).clone()
            change(y)
            return y
        return spoiled
    return replaced(model.CausalSelfAttention, 'forward', changed)


def leak(to, source):
    """Half of what attention returns at `source` is added at `to`."""
    def change(y):
        y[:, to] += 0.5 * y[:, source].clone()
    return after_attention(change)


def leak_in_eval_mode(patch):
    def change(forward):
        def changed(self, *arguments):
            y = forward(self, *arguments)
            return y if self.training else y + y.roll(-1, 1)
        return changed
    patch(model.CausalSelfAttention, 'forward', change)


def leak_between_rows(to, source):
    def change(y):
        if len(y) > max(to, source):
            y[to] += 0.5 * y[source].clone()
    return after_attention(change)


def ngrams_of_later_tokens(forward):
    return lambda self, idx, *rest: forward(self, idx.roll(-1, 1), *rest)


def around_steps(change):
    """change(update, step, lr) takes the place of Step.update."""
    return replaced(train.Step, 'update', lambda update: lambda self, lr: change(update, self, lr))


def step_twice(update, step, lr):
    once = step.optimizer.step
    step.optimizer.step = lambda: (once(), once())
    try:
        return update(step, lr)
    finally:
        del step.optimizer.step


def state_cleared(update, step, lr):
    norm = update(step, lr)
    step.optimizer.state.clear()
    return norm


def state_zeroed(update, step, lr):
    norm = update(step, lr)
    for state in step.optimizer.state.values():
        state['exp_avg'].zero_()
    return norm


def vectors_left_out(update, step, lr):
    for p in step.model.parameters():
        if p.dim() == 1:
            p.grad = None
    return update(step, lr)


def embedding_decays(groups_of):
    def changed(*arguments):
        groups = groups_of(*arguments)
        groups['embedding']['weight_decay'] *= 1000
        return groups
    return changed


not_shifted = other_batches(lambda idx, targets: (idx, idx.clone()))
not_causal = attention_with_mask(lambda T: None)
in_order = replaced(batches, 'permute', lambda _: lambda indices, n, k: indices)


def undivided(step, forward_backward, batches):
    """A step that adds up the losses of its micro-batches."""
    micro_steps, step.micro_steps = step.micro_steps, 1
    loss = sum(forward_backward(step, batches) for _ in range(micro_steps))
    step.micro_steps, step.loss = micro_steps, loss
    return loss


# The check that fails → [(what is broken, what breaks it, settings of the run)]
SPOILED = {
    'attention_is_causal': [
        ('attention is not causal', not_causal, {}),
        ('the future leaks late in the sequence', attention_with_mask(
            lambda T: torch.ones(T, T, dtype=torch.bool).tril()
            | (torch.arange(T) >= 40)[:, None]), {'block_size': 64}),
        ('the second token leaks into the first', leak(slice(0, 1), slice(1, 2)), {}),
        ('a token leaks to one just before it', leak(slice(20, 21), slice(25, 26)),
         {'block_size': 32}),
        ('the future leaks in eval mode alone', leak_in_eval_mode, {}),
        ('n-grams contain the next token', replaced(
            model.NgramEmbedding, 'forward', ngrams_of_later_tokens), {'ngram_rows': 50})],
    'weights_outlive_their_decay': [
        ('the weights shrink by a tenth per step', lambda patch: None,
         {'learning_rate': 1e-2, 'weight_decay': 10}),
        ('a decay of 100 at a small rate', lambda patch: None,
         {'learning_rate': 1e-5, 'weight_decay': 100}),
        ('one group decays a thousand times as fast', replaced(
            optimizers, 'parameter_groups', embedding_decays), {})],
    'token_order_matters': [
        ('the mask leaves each token alone', attention_with_mask(
            lambda T: torch.eye(T, dtype=torch.bool)), {}),
        ('rotary is not applied', replaced(
            model, 'rotate', lambda _: lambda x, cos, sin: x), {'rotary': True})],
    'initial_loss_is_about_ln_vocab_size': [
        ('initialized ten times too large', other_weights(
            lambda gpt: [p.mul_(10) for p in gpt.parameters() if p.dim() == 2]),
         {'n_embd': 128})],
    'blocks_are_residual': [
        ('a residual connection is missing', replaced(
            model.Block, 'forward', lambda _: lambda self, x, *rest:
            self.mlp(self.ln_2(x + self.attn(self.ln_1(x), *rest)))), {})],
    'sequences_are_independent': [
        ('rows share a norm', replaced(
            model.MLP, 'forward', lambda forward: lambda self, x:
            forward(self, x - x.mean(dim=0))), {}),
        ('the first row reads the second', leak_between_rows(0, 1), {'batch_size': 2}),
        ('the third row reads the first', leak_between_rows(2, 0), {})],
    'every_parameter_gets_a_gradient': [
        ('detached before each MLP', replaced(
            model.Block, 'forward', lambda _: detached_before_each_mlp), {})],
    'gradients_match_finite_differences': [
        ('a branch is detached', replaced(model.Block, 'forward', lambda _: branch_detached), {}),
        ('a backward pass is wrong', replaced(
            model, 'ACTIVATIONS', lambda table: {**table, 'relu2': WrongBackwardPass.apply}),
         {'mlp': 'relu2', 'n_embd': 64})],
    'evaluation_loss_matches_the_logits': [
        ('the loss is shifted twice', replaced(
            model.GPT, 'forward', lambda forward: lambda self, idx, targets=None: forward(
                self, idx, targets if targets is None else F.pad(targets[:, 1:], (0, 1), value=-1)
            )), {}),
        ('logits are scaled in the loss alone', replaced(
            model.GPT, 'loss', lambda loss: lambda self, logits, targets: loss(
                self, logits * 4, targets)), {}),
        ('an evaluation is in train mode', replaced(
            model.GPT, 'eval', lambda _: lambda self: self), {'dropout': 0.2}),
        ('eval mode is kept', replaced(
            model.GPT, 'train', lambda _: lambda self, mode=True:
            nn.Module.train(self, mode and self.training)), {'dropout': 0.2})],
    'every_parameter_is_trainable': [
        ('frozen', after_building(lambda gpt: gpt.transformer.h[1].requires_grad_(False)), {}),
        ('the optimizer has no embedding', replaced(
            optimizers, 'parameter_groups', lambda groups_of: lambda *arguments: {
                name: group for name, group in groups_of(*arguments).items()
                if name != 'embedding'}), {'tied_head': False})],
    'model_matches_its_config': [
        ('a layer is beside the class', after_building(layer_beside_the_class), {})],
    'checkpoint_round_trip_works': [
        ('a weight is not a parameter', weight_beside_the_parameters, {}),
        ('the tied head is lost on load', replaced(
            checkpoint.Checkpoint, 'load_into', tied_head_lost_on_load), {}),
        ('momentum is lost on load', replaced(
            checkpoint.Checkpoint, 'load_optimizer', lambda _: lambda *_: None), {})],
    'epoch_reads_every_sequence_once': [
        ('the same batch each step', replaced(
            BatchLoader, 'sequence_ids', lambda ids: lambda self, step, micro:
            ids(self, 0, micro)), {}),
        ('the same micro-batch', replaced(
            BatchLoader, 'sequence_ids', lambda ids: lambda self, step, micro:
            ids(self, step, 0)), {})],
    'sequences_are_shuffled': [('text in its order', in_order, {})],
    'every_target_counts': [
        ('the loss is that of the last token', loss_of(lambda T: torch.arange(T) == T - 1), {}),
        ('the first half, in training', loss_of(
            lambda T: torch.arange(T) < T // 2, lambda gpt: gpt.training), {'block_size': 64}),
        ('all but the first, in evaluations', loss_of(
            lambda T: torch.arange(T) > 0, lambda gpt: not gpt.training), {}),
        ('the first sequence', loss_of(lambda T: slice(None), lambda gpt: True, rows=1), {}),
        ('all but the first chunk are dropped', replaced(
            loss.LossInChunks, 'apply', loss_of_the_first_chunk), {})],
    'batches_match_the_files': [
        ('targets are not shifted', not_shifted, {}),
        ('tokens are left out', other_batches(
            lambda idx, targets: (idx.clamp(min=3), targets)), {}),
        ('splits are swapped', replaced(
            train, 'open_batches', lambda opened: lambda *arguments: opened(*arguments)[::-1]), {}),
        ('validation is training text', replaced(
            train, 'open_batches', validation_is_training_text), {})],
    'evaluation_reads_every_sequence_once': [
        ('the last batch is dropped', replaced(
            BatchLoader, 'eval_batches', lambda batches_of: lambda *arguments:
            batches_of(*arguments)[:-1]), {})],
    'step_follows_the_gradient': [
        ('uphill', replaced(torch.amp.GradScaler, 'scale', lambda scale: lambda self, loss:
                            scale(self, -loss)), {}),
        ('the loss is not divided', replaced(
            train.Step, 'forward_backward', lambda original: lambda self, batches:
            undivided(self, original, batches)), {}),
        ('gradients are kept', replaced(
            torch.optim.AdamW, 'zero_grad', lambda _: lambda *_, **__: None), {}),
        ('weights are held', replaced(
            bad_steps.BadSteps, 'must_skip', lambda original: lambda *arguments:
            1 - original(*arguments)), {}),
        ('two steps per update', around_steps(step_twice), {}),
        ('the state is cleared', around_steps(state_cleared), {}),
        ('the state is zeroed', around_steps(state_zeroed), {}),
        ('the momentum of Muon is cleared', around_steps(state_cleared), {'optimizer': 'muon'}),
        ('biases and norms are left out', around_steps(vectors_left_out), {})],
    'learning_rate_lasts': [
        ('the rate is gone at iteration 15', lambda patch: None,
         {'lr_decay_iters': 15, 'min_lr': 0.0}),
        ('a schedule of another unit', replaced(
            schedules, 'SCHEDULES', lambda table: {**table, 'linear': lambda at, *ends:
                                                   max(0.0, 1 - at / 100)}),
         {'lr_schedule': 'linear', 'max_iters': 1000, 'lr_decay_iters': 1000, 'min_lr': 0.0})]}


@pytest.mark.parametrize(('check', 'spoil', 'settings'), [
    pytest.param(check, spoil, settings, id=name, marks=[pytest.mark.slow] if i > 1 else [])
    for check, spoiled in SPOILED.items() for i, (name, spoil, settings) in enumerate(spoiled)])
def test_broken_code_fails_its_check(check, spoil, settings, patch, failed):
    spoil(patch)
    assert check in failed(**{'n_layer': 3, **settings})


def test_documents_that_leak_fail_their_check(documents, patch, failed):
    patch(model, 'find_documents', lambda find: lambda idx, bos_id: find(idx, -1))
    assert failed(dataset=documents, document_attention=True) == ['sequences_are_independent']


def test_a_second_document_that_is_not_causal_fails_its_check(documents, patch, failed):
    def find_documents(find):
        def changed(idx, bos_id):
            positions, mask = find(idx, bos_id)
            starts = torch.arange(idx.size(1)) - positions  # (B, T)
            same = starts[:, None, :, None] == starts[:, None, None, :]
            return model.Documents(positions, mask | same & (starts > 0)[:, None, :, None])
        return changed
    patch(model, 'find_documents', find_documents)
    assert 'attention_is_causal' in failed(dataset=documents, document_attention=True)


# -----------------------------------------------------------------------------
# whole runs


def test_a_dataset_with_the_tokenizer_of_another_fails_its_check(text_file, tmp_path, failed):
    (tmp_path / 'backwards.txt').write_text(text_file.read_text()[::-1])
    for name, source in (('one', text_file), ('other', tmp_path / 'backwards.txt')):
        prepare.main(['text', f'--input={source}', '--tokenizer=bpe:400',
                      f'--data_dir={tmp_path}/{name}'])
    one, other = (json.loads((tmp_path / name / 'meta.json').read_text())
                  for name in ('one', 'other'))
    (tmp_path / 'one/meta.json').write_text(json.dumps({**one, 'tokenizer': other['tokenizer']}))
    assert failed(dataset=tmp_path / 'one') == ['tokens_match_the_tokenizer']


def test_a_split_that_was_not_filled_fails_its_check(char_data, tmp_path, failed):
    folder = shutil.copytree(char_data, tmp_path / 'one')
    (folder / 'meta.json').unlink()
    ids = np.fromfile(folder / 'train.bin', '<u2')
    ids[int(0.6 * len(ids)):] = 7
    ids.tofile(folder / 'train.bin')
    assert failed(dataset=folder, vocab_size=100) == ['tokens_vary']


def test_a_check_that_fails_stops_the_run(patch, tiny, fails_with, tmp_path):
    not_shifted(patch)
    assert fails_with(*tiny).endswith(' --skip_checks=batches_match_the_files')
    assert not (tmp_path / 'out/run.json').exists()
    train.main([*tiny, '--check=False'])


def test_an_intended_change_skips_its_check_alone(patch, tiny, fails_with):
    not_causal(patch)
    in_order(patch)
    tiny = [*tiny, '--block_size=8']
    assert fails_with(*tiny).endswith('--skip_checks=sequences_are_shuffled')
    both = '--skip_checks=sequences_are_shuffled,attention_is_causal'
    assert fails_with(*tiny, '--skip_checks=sequences_are_shuffled').endswith(both)
    train.main([*tiny, both])
    patch(model.Block, 'forward', lambda _: lambda self, x, *rest: x + self.attn(x, *rest))
    assert fails_with(*tiny, both).endswith(f'{both},every_parameter_gets_a_gradient')


def test_skipped_checks_stay_skipped_after_a_resume(patch, tiny, tmp_path):
    not_causal(patch)
    train.main([*tiny, '--skip_checks=attention_is_causal'])
    train.main([*tiny, '--init_from=resume', '--max_iters=8'])
    assert checkpoint.find(tmp_path / 'out').iter_num == 8


def test_an_unknown_check_is_named_with_the_nearest(tiny, fails_with):
    error = fails_with(*tiny, '--skip_checks=attention_is_casual')
    assert 'attention_is_casual' in error
    assert 'attention_is_causal' in error


def test_an_error_in_a_check_says_how_to_skip_it(patch, tiny):
    patch(model_checks, 'ActivationRecorder', lambda _: None)
    with pytest.raises(TypeError) as problem:
        train.main([*tiny, '--check'])
    name, = re.findall(r'--skip_checks=(\w+)', problem.value.__notes__[0])
    train.main([*tiny, '--check', f'--skip_checks={name}'])


def test_a_lost_mask_is_noticed_after_training(patch, tiny, fails_with, tmp_path):
    train.main([*tiny, '--max_iters=2'])
    not_causal(patch)
    for again in ('--max_iters=4', '--eval_only=True'):
        assert 'attention_is_causal' in fails_with(*tiny, '--init_from=resume', again)
    with pytest.raises(UserError, match='causal'):
        evaluate.main([f'--out_dir={tmp_path}/out', '--device=cpu'])


def same_rank_everywhere():
    original = BatchLoader.__init__
    BatchLoader.__init__ = lambda self, *arguments, rank=0, **rest: original(
        self, *arguments, **rest)


@pytest.mark.slow
def test_two_processes_with_the_same_data_fail_their_check(tiny, tmp_path):
    pids, logs = fork_job(train.main, 2, tmp_path, *tiny, before=same_rank_everywhere)
    assert 0 not in [exit_code(pid) for pid in pids.values()]
    assert '--skip_checks=epoch_reads_every_sequence_once' in ''.join(
        log.read_text() for log in logs.values())
