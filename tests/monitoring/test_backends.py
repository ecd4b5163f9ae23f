"""Every backend gets what metrics.jsonl has, and none of them stops a run."""

import sys
from types import SimpleNamespace

import pytest
from helpers import lines

import train
from plaingpt.training import checkpoint as checkpoints


class Recorded:
    """Stands for the packages wandb and trackio."""

    id, starting_step = 'abc', 0

    def __init__(self):
        self.started, self.rows, self.ended = [], [], False

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.ended = True


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_a_service_gets_every_number_of_a_run_and_of_a_resumed_one(
        name, tiny, tmp_path, monkeypatch):
    service = Recorded()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(
        init=lambda project=None, **rest: service.init(project=project, **rest),
        log=service.log, finish=service.finish))
    chosen = '--wandb_log' if name == 'wandb' else f'--log_to={name}'  # nanoGPT's word, and ours
    argv = [*tiny, chosen, '--wandb_project=mine', '--wandb_run_name=first']
    train.main([*argv, '--max_iters=3'])
    assert service.started[0]['project'] == 'mine' and service.started[0]['name'] == 'first'
    assert service.started[0]['config']['n_embd'] == 32 and service.ended
    first = len(service.rows)
    if name == 'wandb':
        assert checkpoints.find(tmp_path / 'out').state['wandb_id'] == 'abc'
        service.starting_step = 4  # what it has already is not sent again
    train.main([*argv, '--init_from=resume', '--max_iters=6', '--lr_decay_iters=6'])
    if name == 'wandb':
        assert service.started[1]['id'] == 'abc'
    else:
        del service.rows[:first]  # a run of its own, with all rows
    for key in ('loss', 'val_loss', 'health/grad_norm/h.0'):
        assert [(step, values[key]) for step, values in service.rows if key in values] \
            == [(row['iter'], row[key]) for row in lines(tmp_path / 'out', key)]


def test_a_package_that_is_absent_or_fails_stops_no_training(tiny, tmp_path, capsys, monkeypatch):
    def refuse(**_):
        raise ConnectionError('there is no network')
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=refuse))
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    train.main([*tiny, '--wandb_log', '--log_to=tensorboard'])
    out = capsys.readouterr().out
    assert 'there is no network; training continues without wandb' in out
    assert 'pip install tensorboard' in out and lines(tmp_path / 'out', 'loss')[-1]['iter'] == 6
