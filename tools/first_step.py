"""Profile the startup of train.py up to the first logged step, and from the last step to the end.

    python tools/first_step.py config/quickstart_gpu.py
    python tools/first_step.py config/quickstart.py --compile=True

Trains for two steps with an evaluation before and after, and prints a row per phase. To measure a
cold start, first empty the caches: TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR.
"""

import os
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path

STARTED_AT = time.time()  # Python itself starts in 0.02 s
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# functions that train.py calls
PHASES = ('choose_device', 'open_data', 'choose_dtype', 'fit_to_memory', 'open_batches',
          'GPT', 'build_optimizer', 'build', 'setup', 'preflight', 'open_run_folder',
          'Observers', 'evaluate')


class Stopwatch:
    """Records calls as rows: start (seconds since STARTED_AT), depth, name, seconds."""

    def __init__(self):
        self.rows = []
        self.depth = 0

    def watch(self, owner, name, label=None):
        """Time each call of owner.name from now on."""
        function = getattr(owner, name)

        @wraps(function, updated=())
        def timed(*args, **kwargs):
            row = [time.time() - STARTED_AT, self.depth, label or name, None]
            self.rows.append(row)
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                row[3] = time.time() - STARTED_AT - row[0]
        setattr(owner, name, timed)


def main(argv):
    stopwatch = Stopwatch()
    stopwatch.rows.append([0.0, 0, 'imports of train.py', None])
    import train
    from plaingpt.core.training_run import Run
    from plaingpt.system import devices
    from plaingpt.system.errors import run_script
    from train import Step
    stopwatch.rows[0][3] = time.time() - STARTED_AT
    for name in PHASES:
        stopwatch.watch(devices if name in ('choose_device', 'choose_dtype') else train, name)
    stopwatch.watch(Step, 'forward_backward', 'forward and backward')
    stopwatch.watch(Step, 'update')
    stopwatch.watch(Run, 'save')
    with tempfile.TemporaryDirectory() as out_dir:
        settings = [*argv, '--max_iters=2', '--warmup_iters=0', '--lr_decay_iters=2',
                    '--eval_interval=2', '--log_interval=1', '--report=False',
                    f'--out_dir={out_dir}']
        run_script(lambda _: train.main(settings))
    print(f'\n{"start":>8}{"time":>9}')
    for start, depth, name, seconds in stopwatch.rows:
        if seconds >= 0.001:
            print(f'{start:7.2f}s{seconds:8.2f}s  {"  " * depth}{name}')
    print(f'{time.time() - STARTED_AT:7.2f}s           end', flush=True)


if __name__ == '__main__':
    os.environ.setdefault('PLAINGPT_STARTED_AS', 'train.py')
    main(sys.argv[1:])
