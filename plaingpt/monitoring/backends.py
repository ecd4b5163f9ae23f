"""Where the rows of metrics.jsonl go beside the file: Weights & Biases, Trackio, TensorBoard.

A backend is a class with a name, Backend(config, run, run_id), log(row) and close(), and an entry
in BACKENDS. None of them may stop a run: the constructor raises UserError where it cannot start,
and a backend whose log() raises is dropped.
"""

import os
import time
from pathlib import Path

from plaingpt.system.errors import UserError, needs
from plaingpt.system.formatting import one_line
from plaingpt.system.streams import print_line


class Wandb:
    """Weights & Biases. A resumed run continues the same wandb run: the server tells from which
    step on it lacks rows. An offline run begins a new folder and writes all rows to it."""

    name = 'wandb'

    def __init__(self, config, run, run_id):
        with needs('wandb', 'logging to Weights & Biases'):
            import wandb
        facts = {'code': run['code'], 'parameters': run['parameters'], **run['config']}
        # wandb must not ask a question without a terminal, nor wait long for a network.
        settings = wandb.Settings(init_timeout=30, login_timeout=60, finish_timeout=60)
        options = dict(project=config.wandb_project, name=config.wandb_run_name, config=facts,
                       id=run_id, resume='allow', settings=settings)
        try:
            try:
                self.run = wandb.init(**options)
            except wandb.errors.Error as e:
                print_line(f'warning: wandb does not connect ({one_line(e)}): the run is kept '
                           'offline, and wandb sync sends it later')
                self.run = wandb.init(**options, mode='offline')
        except Exception as e:
            raise UserError(f'wandb does not start ({one_line(e)})') from None
        self.id = self.run.id
        self.known = self.run.starting_step  # the server has all rows before it

    def log(self, row):
        if row['iter'] >= self.known:
            values = {key: x for key, x in row.items() if key not in ('iter', 'sample')}
            self.run.log(values, step=row['iter'])
        best = self.run.summary.get('best_val_loss')
        if row.get('val_loss') is not None and (best is None or row['val_loss'] < best):
            self.run.summary.update({'best_val_loss': row['val_loss'], 'best_iter': row['iter']})

    def close(self):
        try:
            self.run.finish()
        except Exception as e:
            print_line(f'warning: wandb did not get all of it ({one_line(e)}): wandb sync sends it '
                       f'from {self.run.dir}')


class Trackio:
    """Hugging Face's Trackio, whose dashboard `trackio show` opens. A resumed run begins a new one
    there and sends all rows to it."""

    name = 'trackio'

    def __init__(self, config, run, run_id):
        with needs('trackio', 'logging to Trackio'):
            import trackio
        facts = {'code': run['code'], 'parameters': run['parameters'], **run['config']}
        try:
            trackio.init(config.wandb_project, name=config.wandb_run_name, config=facts)
        except Exception as e:
            raise UserError(f'trackio does not start ({one_line(e)})') from None
        self.trackio = trackio

    def log(self, row):
        values = {key: x for key, x in row.items() if key not in ('iter', 'sample')}
        self.trackio.log(values, step=row['iter'])

    def close(self):
        self.trackio.finish()


class TensorBoard:
    """Event files in out_dir/tensorboard. A resumed run writes them anew."""

    name = 'tensorboard'

    def __init__(self, config, run, run_id):
        with needs('tensorboard', 'logging to TensorBoard'):
            from torch.utils.tensorboard import SummaryWriter
        folder = Path(config.out_dir, 'tensorboard')
        try:
            for path in folder.glob('events.out.tfevents.*'):
                os.remove(path)
            self.writer = SummaryWriter(folder)
        except OSError as e:
            raise UserError(f'{folder} cannot be written: {e.strerror}') from None
        self.began = None

    def log(self, row):
        if self.began is None:  # the first row: those before a resume keep their distance in time
            self.began = time.time() - row['elapsed_s']
        for key, value in row.items():
            if key == 'sample':
                self.writer.add_text(key, value, row['iter'], self.began + row['elapsed_s'])
            elif key != 'iter' and value is not None:
                self.writer.add_scalar(key, value, row['iter'], self.began + row['elapsed_s'])

    def close(self):
        self.writer.close()


BACKENDS = {'wandb': Wandb, 'trackio': Trackio, 'tensorboard': TensorBoard}


def open_backends(config, run, run_id):
    """Start those of config.log_to and wandb_log=True; one that cannot start is left out with a
    warning.

    run: facts of the run; run_id: of the wandb run to continue, or None
    """
    names = ['wandb'] * config.wandb_log + [name for name in config.log_to.split(',') if name]
    backends = []
    for name in dict.fromkeys(names):
        try:
            backends.append(BACKENDS[name](config, run, run_id))
        except UserError as problem:
            print_line(f'warning: {problem}; training continues without')
    return backends
