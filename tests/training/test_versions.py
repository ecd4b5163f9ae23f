"""What one version wrote the next reads: tests/data holds a tiny run of each format that landed."""

import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import lines, model_of, options

import train
from plaingpt.data.dataset import open_named
from plaingpt.monitoring.run_record import read_run
from plaingpt.system.errors import UserError
from plaingpt.system.removed import REMOVED
from plaingpt.training import checkpoint as checkpoints
from plaingpt.training.settings import TrainConfig
from plaingpt.training.start import check_resumed

DATA = Path(__file__).resolve().parents[1] / 'data'
SAME = options(dataset='./dataset', out_dir='run', init_from='resume', device='cpu',
               dtype='float32', report=False)


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A run of format 1 beside its dataset, as its folders lay then."""
    shutil.copytree(DATA / 'format_1', tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change_state(change):
    """Let `change` edit the state.json of the checkpoint in run, as its version would have it."""
    found = checkpoints.find('run')
    change(found.state)
    checkpoints.write_state(found.path, found.state)


# format_1_sharded was written by two processes that shared the model, with Muon and an average
@pytest.mark.parametrize('kind', ['format_1', 'format_1_sharded'])
def test_a_run_of_an_earlier_version_goes_on_and_its_loss_is_measured_again(old, kind, capsys):
    shutil.copytree(DATA / kind, old, dirs_exist_ok=True)
    expected = lines(old / 'run', 'val_loss')[-1]['val_loss']
    train.main([*SAME, '--eval_only'])
    assert f'val loss {expected:.4f}' in capsys.readouterr().out
    train.main([*SAME, '--max_iters=9'])
    assert [line['iter'] for line in lines(old / 'run', 'loss')] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    found = checkpoints.find('run')
    assert found.iter_num == 9 and found.state['sequences'] == 9 * 8


def test_a_state_without_what_came_later_has_its_default(old):
    later = 'val_loss', 'elapsed_s', 'wandb_id'
    change_state(lambda state: [state.pop(key) for key in later])
    assert not any(checkpoints.find('run').state[key] for key in later)
    train.main([*SAME, '--max_iters=7'])
    assert checkpoints.find('run').iter_num == 7


def test_a_setting_that_came_later_is_no_change(old, capsys):
    found = checkpoints.find('run')
    saved, today = found.settings(), {field.name for field in fields(TrainConfig)}
    assert today - saved.keys()  # this format knows fewer settings than today's
    config = TrainConfig(**{key: saved[key] for key in today & saved.keys()})
    check_resumed(found, config, open_named(config.dataset))
    assert 'changed' not in capsys.readouterr().out


def test_a_setting_that_is_no_more_is_forgotten_where_it_changes_nothing(old, capsys):
    removed = dict(rotary_share=1.0, softcap='tanh', head_bias=False)
    change_state(lambda state: [state['model'].update(removed), state['config'].update(
        removed, adam_eps=1e-8, embedding_decay=state['config']['weight_decay'],
        deterministic=True, fsdp_group=2, also_evaluate='notes', max_bad_steps=3)])
    assert model_of(checkpoints.find('run')).config.n_embd == 8
    train.main([*SAME, '--max_iters=7'])
    assert not REMOVED.keys() & checkpoints.find('run').settings().keys()
    assert 'deterministic' not in ''.join(capsys.readouterr())


def test_a_run_goes_on_as_its_settings_said_in_the_words_of_an_earlier_version(old, capsys):
    change_state(lambda state: state['config'].update(
        vector_lr_scale=4.0, embedding_lr_scale=8.0, head_lr_scale=1.0, lr_schedule='wsd',
        wsd_decay=0.5, eval_tokens=5 * 4 * 16, overfit_batches=2, health_interval=7,
        keep_checkpoints=9, document_start=3, sample_tokens=0, loss_chunk_tokens=24))
    train.main(['--out_dir=run', '--init_from=resume', '--max_iters=7'])
    assert 'changed: lr_s' not in capsys.readouterr().out
    now = checkpoints.find('run').settings()
    assert now['lr_scales'] == 'embedding:8,vector:4' and now['lr_schedule'] == 'wsd:0.5'
    assert now['eval_iters'] == 5 and now['check'] == 'overfit'
    run = read_run('run')
    assert run['config']['lr_scales'] == run['changed']['lr_scales']


@pytest.mark.parametrize(('change', 'words'), [
    (lambda state: state.update(format_version=2), 'format version 2'),
    (lambda state: state['model'].update(alibi=True), 'alibi=True'),
    (lambda state: state['model'].update(rotary_share=0.5), 'rotary_share=0.5'),
    (lambda state: state['config'].update(embedding_decay=0.5), 'embedding_decay=0.5')])
def test_a_checkpoint_of_another_version_says_so_and_is_not_called_damaged(old, change, words):
    change_state(change)
    with pytest.raises(UserError, match='another version') as problem:
        checkpoints.find('run').settings()
    assert words in str(problem.value) and 'damaged' not in str(problem.value)
