"""Every backend gets what metrics.jsonl has. None of them stops a run."""

import sys
from unittest.mock import Mock

import pytest
from runs import lines

import train


@pytest.mark.parametrize('name', ['wandb', 'trackio'])
def test_a_service_gets_every_number_of_a_resumed_run(
        name, tiny, tmp_path, monkeypatch):
    service = Mock(id='abc', starting_step=0)  # stands for the package, and for its run
    service.init.return_value = service
    monkeypatch.setitem(sys.modules, name, service)
    chosen = '--wandb_log' if name == 'wandb' else f'--log_to={name}'  # nanoGPT's word, and ours
    argv = [*tiny, chosen, '--wandb_project=mine', '--wandb_run_name=first']
    train.main([*argv, '--max_iters=3'])
    assert service.init.call_args.kwargs['name'] == 'first'
    assert service.init.call_args.kwargs['config']['n_embd'] == 32
    assert service.finish.called
    if name == 'wandb':
        service.starting_step = 4  # what it has already is not sent again
    else:
        service.log.reset_mock()  # a run of its own, with all rows
    train.main([*argv, '--init_from=resume', '--max_iters=6', '--lr_decay_iters=6'])
    assert service.init.call_args.kwargs.get('id') == ('abc' if name == 'wandb' else None)
    sent = [(call.kwargs['step'], *call.args) for call in service.log.call_args_list]
    for key in ('loss', 'val_loss', 'health/grad_norm/h.0'):
        assert [(step, values[key]) for step, values in sent if key in values] \
            == [(row['iter'], row[key]) for row in lines(tmp_path / 'out', key)]


def test_a_run_resumed_from_an_earlier_checkpoint_is_a_new_wandb_run(tiny, tmp_path, monkeypatch):
    class Server:  # of wandb, which takes no step of a run twice
        def __init__(self):
            self.rows = {}

        def init(self, id=None, **options):
            self.current = id or f'run{len(self.rows)}'
            rows = self.rows.setdefault(self.current, {})
            return Mock(id=self.current, starting_step=1 + max(rows, default=-1), log=self.log)

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
    assert list(server.rows['run0'])[-1] == 6
    expected = {row['iter']: row['loss'] for row in lines(tmp_path / 'out', 'loss')}
    assert list(expected) == list(range(1, 9))
    sent = {step: row['loss'] for step, row in server.rows['run1'].items() if 'loss' in row}
    assert sent == expected


def test_a_backend_that_cannot_start_does_not_stop_training(tiny, tmp_path, capsys, monkeypatch):
    refuse = Mock(side_effect=ConnectionError('there is no network'))
    monkeypatch.setitem(sys.modules, 'wandb', Mock(init=refuse))
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    train.main([*tiny, '--wandb_log', '--log_to=tensorboard'])
    out = capsys.readouterr().out
    assert 'there is no network' in out
    assert 'pip install tensorboard' in out
    assert lines(tmp_path / 'out', 'loss')[-1]['iter'] == 6
