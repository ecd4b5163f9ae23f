"""wandb and TensorBoard themselves, without a network, and what they wrote."""

import json
import os
import signal
import struct
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from helpers import exit_code, fails, fork, lines

import train
from plaingpt.monitoring.backends import BACKENDS
from plaingpt.training import checkpoint as checkpoints


@pytest.fixture(autouse=True)
def without_a_login(tmp_path, monkeypatch):
    for key in [key for key in os.environ if key.startswith('WANDB')]:
        monkeypatch.delenv(key)
    monkeypatch.setenv('HOME', str(tmp_path))  # no .netrc with a login there
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))


def kill_before(iter_num):
    """The process kills itself before update `iter_num` is reported."""
    original = train.Metrics.tick

    def tick(self, it):
        if it == iter_num:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, it)
    train.Metrics.tick = tick


@pytest.fixture
def killed(tiny, tmp_path):
    """A folder with a run of 15 iterations with both backends that was killed and resumed."""
    for name in ('wandb', 'torch.utils.tensorboard'):  # once, before the forks
        import_module(name)
    argv = [*tiny, '--max_iters=15', '--lr_decay_iters=15', '--checkpoint_interval=3',
            '--init_from=auto', '--wandb_log', '--log_to=tensorboard']
    for kill_at in (8, None):
        pid = fork(train.main, *argv, log=tmp_path / 'log',
                   before=kill_at and (lambda: kill_before(kill_at)))  # noqa: B023
        assert exit_code(pid) == (-signal.SIGKILL if kill_at else 0)
    return tmp_path


def wandb_history(path):
    """[(step, {key: value})] of a .wandb file: records of wandb's own protocol, framed as in
    LevelDB's log (blocks of 32 KiB; checksum, length, kind), after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2
    data, at, record, history = path.read_bytes(), 7, b'', []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack('<IHB', data[at:at + 7])
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last part
            parsed = wandb_internal_pb2.Record.FromString(record)
            record = b''
            if parsed.WhichOneof('record_type') == 'history':
                history.append((parsed.history.step.num, {
                    item.key or '/'.join(item.nested_key): json.loads(item.value_json)
                    for item in parsed.history.item}))
    return history


@pytest.mark.slow
def test_a_killed_run_without_a_login_is_one_curve_in_every_backend(killed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    assert 'the run is kept offline' in (killed / 'log').read_text()
    rows = lines(killed / 'out', 'loss')
    assert [row['iter'] for row in rows] == list(range(1, 16))

    events = EventAccumulator(str(killed / 'out/tensorboard'))
    events.Reload()
    for key in ('loss', 'val_loss', 'grad_norm', 'health/grad_norm/h.0', 'health/loss_at/0'):
        expected = [(row['iter'], row[key]) for row in lines(killed / 'out', key)]
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])

    files = sorted(killed.glob('wandb/offline-run-*/*.wandb'))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # one run id
    history = wandb_history(files[-1])
    assert [step for step, _ in history] == list(range(16))
    for key in ('loss', 'val_loss', 'health/grad_norm/h.0'):
        assert [(step, values[key]) for step, values in history if key in values] \
            == [(row['iter'], row[key]) for row in lines(killed / 'out', key)]
    assert checkpoints.find(killed / 'out').state['wandb_id'] in files[0].name


def test_trackio_gets_every_number_of_a_run(tiny, tmp_path, monkeypatch):
    logged, ended = [], []

    def init(project, name, config):
        assert (project, name, config['n_embd']) == ('mine', 'first', 32)
    monkeypatch.setitem(sys.modules, 'trackio', SimpleNamespace(
        init=init, log=lambda values, step: logged.append((step, values)),
        finish=lambda: ended.append(True)))
    train.main([*tiny, '--log_to=trackio', '--wandb_project=mine', '--wandb_run_name=first'])
    rows = lines(tmp_path / 'out', 'iter')
    assert [step for step, _ in logged] == [row['iter'] for row in rows] and ended == [True]
    for key in ('loss', 'val_loss', 'health/grad_norm/h.0'):
        assert [values[key] for _, values in logged if key in values] \
            == [row[key] for row in rows if key in row]


def test_a_package_that_is_not_installed_stops_no_training(tiny, capsys, monkeypatch):
    for module in ('wandb', 'torch.utils.tensorboard'):
        monkeypatch.setitem(sys.modules, module, None)
    train.main([*tiny, '--wandb_log', '--log_to=tensorboard'])
    out = capsys.readouterr().out
    assert out.count('pip install') == out.count('training continues without') == 2
    assert 'done: ' in out


class Memory:
    """A backend that a user wrote."""

    name = 'memory'
    last = None

    def __init__(self, config, run, run_id):
        self.rows, self.closed = [], False
        Memory.last = self

    def log(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True


def test_a_backend_is_one_class_and_one_entry(tiny, tmp_path, monkeypatch, capsys):
    assert 'none of wandb, trackio, tensorboard' in fails(
        capsys, monkeypatch, train.main, *tiny, '--log_to=memory')
    monkeypatch.setitem(BACKENDS, 'memory', Memory)
    train.main([*tiny, '--log_to=memory'])
    assert Memory.last.rows == lines(tmp_path / 'out', 'iter') and Memory.last.closed
