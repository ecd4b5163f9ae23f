"""A run does not lose what it trained in silence, and does not believe a damaged optimizer."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import find
from plaingpt.training.checkpoint_writer import prune, replace_entries


def at_step(monkeypatch, number, happen):
    """Let happen(model) after the gradients of training step `number` are there."""
    original, steps = train.forward_backward, []

    def step(model, *rest):
        steps.append(1)
        loss = original(model, *rest)
        if len(steps) == number:
            happen(model)
        return loss
    monkeypatch.setattr(train, 'forward_backward', step)


@pytest.mark.parametrize('replaced', [False, True])
def test_a_run_whose_folder_is_removed_or_replaced_stops_and_says_so(tiny, tmp_path, monkeypatch,
                                                                     replaced):
    out, another = tmp_path / 'out', [*tiny, '--max_iters=1', '--check=False']

    def remove(model):
        shutil.rmtree(out)
        monkeypatch.undo()
        if replaced:
            train.main(another)
    at_step(monkeypatch, 4, remove)
    with pytest.raises(UserError, match='was removed or replaced'):
        train.main([*tiny, '--check=False'])
    assert (find(out).iter_num == 1) if replaced else not (out / 'checkpoints').exists()


def test_what_was_just_written_is_never_pruned(trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / 'out')
    assert sorted(path.name for path in (out / 'checkpoints').iterdir())[0] == 'iter-00000003'
    prune(out, keep=1, written=3)
    assert len(list((out / 'checkpoints').iterdir())) == 2


def test_weights_that_are_not_finite_are_not_saved_and_the_checkpoint_before_stays(
        tiny, tmp_path, monkeypatch):
    original = train.update

    def update(model, *rest):
        norm = original(model, *rest)
        if rest[4] == 4:  # the iteration
            next(model.parameters()).data[0, 0] = float('nan')
        return norm
    monkeypatch.setattr(train, 'update', update)
    with pytest.raises(UserError, match='not finite after iteration 5'):
        train.main([*tiny, '--keep_checkpoints=1', '--checkpoint_interval=1'])
    found = find(tmp_path / 'out')
    assert found.iter_num == 4
    found.load_model()  # finite


def rewrite_optimizer(checkpoint, change):
    """Change the tensors of a checkpoint's optimizer; its checksums are right afterwards."""
    path = checkpoint.path / 'optimizer-00001-of-00001.safetensors'
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    from plaingpt.system.files import sha256_of
    chunks = json.loads((checkpoint.path / 'state.json').read_text())['chunks']
    for chunk in chunks:
        if chunk['name'] == path.name:
            chunk |= {'bytes': path.stat().st_size, 'sha256': sha256_of(path)}
    replace_entries(checkpoint.path, {'chunks': chunks})


KEY = 'transformer.h.0.mlp.c_fc.weight/'
DAMAGE = {
    'no step': lambda tensors: tensors.pop(KEY + 'step'),
    'no squares': lambda tensors: tensors.pop(KEY + 'exp_avg_sq'),
    'integers': lambda tensors: tensors.update(
        {KEY + 'exp_avg': tensors[KEY + 'exp_avg'].to(torch.int8)}),
    'NaN': lambda tensors: tensors[KEY + 'exp_avg'].fill_(float('nan')),
    'negative squares': lambda tensors: tensors[KEY + 'exp_avg_sq'].fill_(-1.0),
    'negative step': lambda tensors: tensors[KEY + 'step'].fill_(-1.0),
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_an_optimizer_whose_memory_is_incomplete_or_wrong_is_named(trained, tiny, tmp_path, damage):
    out = shutil.copytree(trained, tmp_path / 'out')
    rewrite_optimizer(find(out), DAMAGE[damage])
    with pytest.raises(UserError, match=f'{KEY}.* of the optimizer there'):
        train.main([*tiny, '--init_from=resume', '--checkpoint=latest', '--max_iters=9'])
    assert find(out).iter_num == 6
