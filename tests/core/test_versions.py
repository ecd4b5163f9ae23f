"""What 1.x wrote a later 1.x reads: tests/data holds a tiny run of 1.0 with its dataset, format_1,
and one of two processes that shared the model, with Muon and an average of the weights,
format_1_sharded. Their run.json has their commands. They were written when 1.0 was released, and
stay as they are: where one of them cannot be read, the change that did it is wrong.
"""

import shutil

import pytest
from processes import ROOT, fails, options
from runs import lines

import sample
import train
from plaingpt.core import checkpoint as checkpoints
from plaingpt.monitoring.run_folder import archive_previous_run

SAME = options(dataset='./dataset', out_dir='run', init_from='resume', device='cpu',
               dtype='float32', report=False)


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A run of 1.0 beside its dataset, in the working directory."""
    shutil.copytree(ROOT / 'tests/data/format_1', tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change_state(change):
    """Let `change` edit the state.json of the checkpoint in run, as its version would have it."""
    found = checkpoints.find('run')
    change(found.state)
    checkpoints.write_state(found.path, found.state)


@pytest.fixture(params=['format_1', 'format_1_sharded'])
def each(request, old):
    """Each of the runs of 1.0."""
    shutil.copytree(ROOT / 'tests/data' / request.param, old, dirs_exist_ok=True)
    return old


def test_the_loss_of_a_run_of_1_0_is_what_it_was(each, capsys):
    expected = lines(each / 'run', 'val_loss')[-1]['val_loss']
    train.main([*SAME, '--eval_only'])
    assert f'{expected:.4f}' in capsys.readouterr().out


def test_the_sketch_of_a_run_of_1_0_is_moved_with_it(old):
    (old / 'run/trained_on.npz').write_bytes(b'hashes')
    archive = archive_previous_run(old / 'run')
    assert (archive / 'trained_on.npz').read_bytes() == b'hashes'
    assert {path.name for path in (old / 'run').iterdir()} == {'checkpoints', 'old-001'}


def test_a_run_of_1_0_is_resumed(each):
    train.main([*SAME, '--max_iters=9'])
    assert [line['iter'] for line in lines(each / 'run', 'loss')] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert checkpoints.find('run').state['sequences'] == 9 * 8


def test_a_setting_of_1_0_that_has_another_name_now_has_not_changed(each, capsys):
    checkpoint = checkpoints.find('run')
    train.main([*SAME, '--max_iters=7'])
    assert 'ema_decay' not in capsys.readouterr().out
    after = checkpoints.find('run').state['config']
    assert after['ema_decay'] == checkpoint.state['config']['average_decay']


def test_numbers_of_1_0_that_auto_would_give_are_read_as_auto(old, capsys):
    train.main([*SAME, '--max_iters=9', '--learning_rate=3e-4'])
    printed = capsys.readouterr().out
    assert 'changed: lr_decay_iters 6 → 9' in printed
    assert 'changed: min_lr 6e-05 → 3e-05' in printed
    config = checkpoints.find('run').settings()
    assert (config['lr_decay_iters'], config['min_lr']) == ('auto', 'auto')


def test_other_numbers_of_1_0_are_read_as_they_are(old, capsys):
    change_state(lambda state: state['config'].update(lr_decay_iters=5, min_lr=1e-5))
    train.main([*SAME, '--max_iters=7', '--learning_rate=1e-4'])
    printed = capsys.readouterr().out
    assert 'lr_decay_iters' not in printed
    assert 'min_lr' not in printed
    config = checkpoints.find('run').settings()
    assert (config['lr_decay_iters'], config['min_lr']) == (5, 1e-5)


def test_a_setting_that_a_checkpoint_does_not_have_is_its_default(old, capsys):
    change_state(lambda state: [state['config'].pop('film'), state['config'].pop('conv'),
                                state['model'].pop('conv')])
    train.main([*SAME, '--max_iters=7'])
    assert 'conv' not in capsys.readouterr().out  # it did not change
    assert checkpoints.find('run').state['config']['conv'] == 0


@pytest.mark.parametrize(('change', 'sampling_needs_it'), [
    (lambda state: state.update(alibi=True), False),
    (lambda state: state['config'].update(alibi=True), False),
    (lambda state: state['model'].update(alibi=True), True),
    (lambda state: state.update(format_version=2), True)],
    ids=['state', 'config', 'model', 'format'])
def test_what_a_newer_version_wrote_is_refused_by_what_needs_it(
        change, sampling_needs_it, old, capsys, monkeypatch):
    change_state(change)
    sampling = ['run', '--device=cpu', '--max_new_tokens=5']
    errors = [fails(capsys, monkeypatch, train.main, *SAME)]
    if sampling_needs_it:
        errors.append(fails(capsys, monkeypatch, sample.main, *sampling))
    else:
        sample.main(sampling)
        assert capsys.readouterr().out
    for error in errors:
        assert 'run/checkpoints/iter-00000006' in error
        assert 'alibi' in error or 'format_version=2' in error
