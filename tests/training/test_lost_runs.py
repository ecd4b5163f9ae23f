"""A run does not lose what it trained in silence, and does not believe a damaged optimizer."""

import shutil

import pytest
from helpers import in_the_loop

import train
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import find
from plaingpt.training.checkpoint_writer import prune


def at_step(monkeypatch, number, happen):
    """Let happen(model) after the gradients of training step `number` are there."""
    original, steps = train.forward_backward, []

    def step(model, *rest):
        steps.append(1)
        loss = original(model, *rest)
        if len(steps) == number:
            happen(model)
        return loss
    in_the_loop(monkeypatch, forward_backward=step)


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
    in_the_loop(monkeypatch, update=update)
    monkeypatch.setattr(train, 'KEPT', 1)
    with pytest.raises(UserError, match='not finite after iteration 5'):
        train.main([*tiny, '--checkpoint_interval=1'])
    found = find(tmp_path / 'out')
    assert found.iter_num == 4
    found.load_model()  # finite
