"""Metrics backends, which get the rows of metrics.jsonl: Weights & Biases, Trackio, TensorBoard.

A backend is a class with a name, Backend(config, run, run_id), log(row) and close(), listed in
BACKENDS. A backend that raises does not stop the run: it is dropped with a warning.
"""

import shutil
from pathlib import Path

from plaingpt.monitoring.run_record import is_number
from plaingpt.system.errors import needs, print_line
from plaingpt.system.formatting import one_line


def numbers(row):
    return {key: value for key, value in row.items()
            if is_number(value) and key != 'iter'}


class Wandb:
    """A resumed run continues the same wandb run, whose server knows which rows it has. A run that
    went back to an earlier checkpoint starts a new one, since wandb rejects repeated steps."""

    name = 'wandb'

    def __init__(self, config, run, run_id):
        import wandb
        notes = None
        if run_id and run.get('went_back_to'):
            notes = f'from iteration {run["went_back_to"]} of run {run_id}'
            run_id = None
        self.run = wandb.init(project=config.wandb_project, name=config.wandb_run_name,
                              notes=notes, config=run['config'], id=run_id, resume='allow')
        self.id = self.run.id
        self.close = self.run.finish

    def log(self, row):
        if row['iter'] >= self.run.starting_step:
            self.run.log(numbers(row), step=row['iter'])


class Trackio:
    """A resumed run starts a new Trackio run and sends all rows to it."""

    name = 'trackio'

    def __init__(self, config, run, run_id):
        import trackio
        trackio.init(config.wandb_project, name=config.wandb_run_name, config=run['config'])
        self.trackio = trackio
        self.close = trackio.finish

    def log(self, row):
        self.trackio.log(numbers(row), step=row['iter'])


class TensorBoard:
    """Event files in out_dir/tensorboard. A resumed run rewrites them."""

    name = 'tensorboard'

    def __init__(self, config, run, run_id):
        from torch.utils.tensorboard import SummaryWriter
        folder = Path(config.out_dir, 'tensorboard')
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = SummaryWriter(folder)
        self.close = self.writer.close

    def log(self, row):
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row['iter'])


BACKENDS = {'wandb': Wandb, 'trackio': Trackio, 'tensorboard': TensorBoard}


def open_backends(config, run, run_id):
    """Start the backends of log_to and wandb_log. Those that fail to start are skipped.

    run: the contents of run.json; run_id: the wandb run to continue, or None
    """
    names = [name for name in config.log_to.split(',') if name]
    if config.wandb_log:
        names.insert(0, 'wandb')
    backends = []
    for name in dict.fromkeys(names):
        try:
            with needs(name, f'log_to={name}'):
                backends.append(BACKENDS[name](config, run, run_id))
        except Exception as e:  # a library may raise anything
            print_line(f'warning: {one_line(e)}; training continues without {name}')
    return backends
