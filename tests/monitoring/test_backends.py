"""Every backend gets what metrics.jsonl has, and none of them stops a run."""

import sys
from unittest.mock import Mock

import pytest
from runs import lines

import train
from plaingpt.training import checkpoint as checkpoints


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_a_service_gets_every_number_of_a_run_and_of_a_resumed_one(
        name, tiny, tmp_path, monkeypatch):
    service = Mock(id='abc', starting_step=0)  # stands for the package, and for its run
    service.init.return_value = service
    monkeypatch.setitem(sys.modules, name, service)
    chosen = '--wandb_log' if name == 'wandb' else f'--log_to={name}'  # nanoGPT's word, and ours
    argv = [*tiny, chosen, '--wandb_project=mine', '--wandb_run_name=first']
    train.main([*argv, '--max_iters=3'])
    (*project,), told = service.init.call_args
    assert 'mine' in (*project, told.get('project')) and told['name'] == 'first'
    assert told['config']['n_embd'] == 32 and service.finish.called
    if name == 'wandb':
        assert checkpoints.find(tmp_path / 'out').state['wandb_id'] == 'abc'
        service.starting_step = 4  # what it has already is not sent again
    else:
        service.log.reset_mock()  # a run of its own, with all rows
    train.main([*argv, '--init_from=resume', '--max_iters=6', '--lr_decay_iters=6'])
    assert name != 'wandb' or service.init.call_args.kwargs['id'] == 'abc'
    sent = [(call.kwargs['step'], *call.args) for call in service.log.call_args_list]
    for key in ('loss', 'val_loss', 'health/grad_norm/h.0'):
        assert [(step, values[key]) for step, values in sent if key in values] \
            == [(row['iter'], row[key]) for row in lines(tmp_path / 'out', key)]


def test_a_run_that_goes_back_is_a_new_one_whose_origin_is_told(tiny, tmp_path, monkeypatch):
    class Server:  # of wandb, which takes no step of a run twice
        def __init__(self):
            self.rows, self.told = {}, {}

        def init(self, id=None, **told):
            run = self.current = id or f'run{len(self.rows)}'
            rows = self.rows.setdefault(run, {})
            self.told.setdefault(run, told)
            return Mock(id=run, starting_step=1 + max(rows, default=-1), log=self.log)

        def log(self, values, step):
            rows = self.rows[self.current]
            assert step >= max(rows, default=0)
            rows[step] = rows.get(step, {}) | values

    server = Server()
    monkeypatch.setitem(sys.modules, 'wandb', server)
    argv = [*tiny, '--wandb_log']
    train.main(argv)
    train.main([*argv, '--init_from=resume', '--checkpoint=3', '--learning_rate=1e-4'])
    train.main([*argv, '--init_from=resume', '--max_iters=8'])
    assert list(server.rows) == ['run0', 'run1'] and list(server.rows['run0'])[-1] == 6
    assert 'iteration 3 of run run0' in server.told['run1']['notes']
    expected = {row['iter']: row['loss'] for row in lines(tmp_path / 'out', 'loss')}
    assert {step: row['loss'] for step, row in server.rows['run1'].items() if 'loss' in row} \
        == expected and list(expected) == list(range(1, 9))


def test_a_package_that_is_absent_or_fails_stops_no_training(tiny, tmp_path, capsys, monkeypatch):
    refuse = Mock(side_effect=ConnectionError('there is no network'))
    monkeypatch.setitem(sys.modules, 'wandb', Mock(init=refuse))
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    train.main([*tiny, '--wandb_log', '--log_to=tensorboard'])
    out = capsys.readouterr().out
    assert 'there is no network; training continues without wandb' in out
    assert 'pip install tensorboard' in out and lines(tmp_path / 'out', 'loss')[-1]['iter'] == 6
