"""Where numbers go beside metrics.jsonl: Weights & Biases, TensorBoard.

A backend has a name, log(row) and close(). None of them may stop a run.
"""

import os
import time
from pathlib import Path

from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line


def open_backends(config, run, wandb_id):
    """Those that the settings ask for. What cannot be had is said in a line, and left out.

    run: the facts of the run; wandb_id: of the wandb run to go on with, or None
    """
    backends = []
    for wanted, start in ((config.wandb_log, lambda: Wandb(config, run, wandb_id)),
                          (config.tensorboard_log, lambda: TensorBoard(config.out_dir))):
        if wanted:
            try:
                backends.append(start())
            except UserError as problem:
                print(f'warning: {problem}; training goes on without', flush=True)
    return backends


class Wandb:
    """Weights & Biases. A resumed run goes on in the same wandb run: the server says from which
    step on it lacks rows. A run that is offline begins a new folder, with all rows in it."""

    name = 'wandb'

    def __init__(self, config, run, run_id):
        try:
            import wandb
        except ImportError:
            raise UserError('wandb_log needs wandb: pip install wandb') from None
        facts = {'code': run['code'], 'parameters': run['parameters'], **run['config']}
        # Without a terminal nobody answers; and nobody should wait long for a network.
        settings = wandb.Settings(init_timeout=30, login_timeout=60, finish_timeout=60)
        options = dict(project=config.wandb_project, name=config.wandb_run_name, config=facts,
                       id=run_id, resume='allow', settings=settings)
        try:
            try:
                self.run = wandb.init(**options)
            except wandb.errors.Error as e:
                print(f'warning: wandb does not connect ({one_line(e)}): the run is kept offline, '
                      'and wandb sync sends it later', flush=True)
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
            print(f'warning: wandb did not get all of it ({one_line(e)}): wandb sync sends it '
                  f'from {self.run.dir}', flush=True)


class TensorBoard:
    """Event files in out_dir/tensorboard, written anew by a run that resumes."""

    name = 'tensorboard'

    def __init__(self, out_dir):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError('tensorboard_log needs tensorboard: pip install tensorboard') from None
        folder = Path(out_dir, 'tensorboard')
        try:
            for path in folder.glob('events.out.tfevents.*'):
                os.remove(path)
            self.writer = SummaryWriter(folder)
        except OSError as e:
            raise UserError(f'{folder} cannot be written: {e.strerror}') from None
        self.clock = None

    def log(self, row):
        if self.clock is None:  # so that rows of before a resume keep their distance in time
            self.clock = time.time() - row['elapsed_s']
        for key, value in row.items():
            if key == 'sample':
                self.writer.add_text(key, value, row['iter'], self.clock + row['elapsed_s'])
            elif key != 'iter' and value is not None:
                self.writer.add_scalar(key, value, row['iter'], self.clock + row['elapsed_s'])

    def close(self):
        self.writer.close()
