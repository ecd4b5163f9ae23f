"""Where the time goes from the command to the first logged step, and from the last one to the end.

    python tools/first_step.py config/quickstart_gpu.py
    python tools/first_step.py config/quickstart.py --compile=True

It trains for two steps, with an evaluation before and after, and prints a row for each part. To
see a cold start, empty the caches first: TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR.
"""

import os
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BEGAN = psutil.Process().create_time()  # of this process
# what train.py calls, by the names that it has there
PARTS = ('choose_device', 'open_data', 'choose_training_dtype', 'fit_to_memory', 'open_batches',
         'GPT', 'build_optimizer', 'setup', 'preflight', 'Monitor', 'evaluate', 'save')


class Stopwatch:
    """Rows of (seconds since the process began, depth, name, seconds), in the order of their begin.
    """

    def __init__(self):
        self.rows, self.depth = [], 0

    def watch(self, owner, name, label=None):
        """Time each call of owner.name from now on."""
        function = getattr(owner, name)

        @wraps(function, updated=())
        def timed(*arguments, **settings):
            row = [time.time() - BEGAN, self.depth, label or name, None]
            self.rows.append(row)
            self.depth += 1
            try:
                return function(*arguments, **settings)
            finally:
                self.depth -= 1
                row[3] = time.time() - BEGAN - row[0]
        setattr(owner, name, timed)


def main(argv):
    stopwatch = Stopwatch()
    stopwatch.rows.append([0.0, 0, 'Python, and imports of train.py', None])
    import train
    from plaingpt.system import devices
    from plaingpt.training.step import Step
    stopwatch.rows[0][3] = time.time() - BEGAN
    for name in PARTS:
        stopwatch.watch(devices if name == 'choose_device' else train, name)
    stopwatch.watch(Step, 'forward_backward', 'forward and backward')
    stopwatch.watch(Step, 'update')
    with tempfile.TemporaryDirectory() as out_dir:
        train.main([*argv, '--max_iters=2', '--warmup_iters=0', '--lr_decay_iters=2',
                    '--eval_interval=2', '--log_interval=1', '--report=False',
                    f'--out_dir={out_dir}'])
    print(f'\n{"at":>8}{"took":>9}')
    for began, depth, name, seconds in stopwatch.rows:
        if seconds >= 0.001:
            print(f'{began:7.2f}s{seconds:8.2f}s  {"  " * depth}{name}')
    print(f'{time.time() - BEGAN:7.2f}s           end', flush=True)


if __name__ == '__main__':
    os.environ.setdefault('PLAINGPT_STARTED_AS', 'train.py')
    main(sys.argv[1:])
