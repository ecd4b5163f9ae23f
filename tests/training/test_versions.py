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
from plaingpt.training import checkpoint as checkpoints

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


@pytest.mark.parametrize('kind', ['format_1', 'format_1_sharded'])
def test_a_run_of_1_0_is_resumed_and_its_loss_is_measured_again(old, kind, capsys):
    shutil.copytree(ROOT / 'tests/data' / kind, old, dirs_exist_ok=True)
    expected = lines(old / 'run', 'val_loss')[-1]['val_loss']
    train.main([*SAME, '--eval_only'])
    assert f'val loss {expected:.4f}' in capsys.readouterr().out
    train.main([*SAME, '--max_iters=9'])
    assert 'max_iters 6 → 9' in capsys.readouterr().out
    assert [line['iter'] for line in lines(old / 'run', 'loss')] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    found = checkpoints.find('run')
    assert found.iter_num == 9 and found.state['sequences'] == 9 * 8


def test_a_setting_that_did_not_exist_when_a_run_was_saved_has_its_default_and_is_no_change(
        old, capsys):
    change_state(lambda state: [state['config'].pop('film'), state['config'].pop('conv'),
                                state['model'].pop('conv')])
    train.main([*SAME, '--max_iters=7'])
    said = capsys.readouterr().out
    assert 'max_iters 6 → 7' in said and 'film' not in said and 'conv' not in said
    assert checkpoints.find('run').state['config']['conv'] == 0


@pytest.mark.parametrize(('where', 'commands'), [
    ((), (train, sample)), (('model',), (train, sample)),
    (('config',), (train,))])  # how a run is trained does not matter to sampling
def test_what_a_newer_version_wrote_is_refused_in_a_line_that_names_it(
        old, where, commands, capsys, monkeypatch):
    def add(state):
        for key in where:
            state = state[key]
        state['alibi'] = True

    change_state(add)
    for command in commands:
        argv = SAME if command is train else ['run', '--device=cpu']
        said = fails(capsys, monkeypatch, command.main, *argv)
        assert 'run/checkpoints/iter-00000006' in said and 'another version' in said
        assert 'alibi' in said and 'damaged' not in said


def test_another_format_version_is_refused_in_a_line(old, capsys, monkeypatch):
    change_state(lambda state: state.update(format_version=2))
    said = fails(capsys, monkeypatch, train.main, *SAME)
    assert 'another version' in said and 'format_version=2' in said and 'damaged' not in said
