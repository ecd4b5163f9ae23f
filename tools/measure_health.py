"""What health, logging and samples cost beside the steps: python tools/measure_health.py [CONFIG …]

Trains in one process, with a look inside at every fifth step and a logged line at every other, and
times each part by itself: the difference of two whole runs would drown in the machine's noise.
"""

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from plaingpt.monitoring.health import Health
from plaingpt.monitoring.metrics import Metrics

STEPS = 150
spent = {'step': [], 'health': [], 'log': []}


def timed(kind, function):
    def call(*arguments):
        began = time.perf_counter()
        result = function(*arguments)
        spent[kind].append(time.perf_counter() - began)
        return result
    return call


def main(argv):
    original = Health.around_update

    @contextlib.contextmanager
    def around_update(self, iter_num, scaler):
        with original(self, iter_num, scaler) as nothing:
            began = time.perf_counter()
            yield nothing
            self.inside = time.perf_counter() - began  # the update itself, which is no cost of ours

    def around(self, iter_num, scaler):
        return Timed(around_update(self, iter_num, scaler), self, iter_num)

    class Timed:
        def __init__(self, context, health, iter_num):
            self.context, self.health, self.due = context, health, health.due(iter_num)

        def __enter__(self):
            self.began = time.perf_counter()
            return self.context.__enter__()

        def __exit__(self, *problem):
            result = self.context.__exit__(*problem)
            extra = time.perf_counter() - self.began - self.health.inside
            if self.due:
                self.health.extra = extra
            return result

    def look(self):
        began = time.perf_counter()
        result = original_look(self)
        spent['health'].append(time.perf_counter() - began + self.extra)
        return result

    original_look = Health.look
    Health.around_update, Health.look = around, look
    Metrics.step = timed('log', Metrics.step)
    tick, last = Metrics.tick, [None]

    def count(self, iter_num):
        now = time.perf_counter()
        # Steps after one that neither looked nor logged are plain.
        if last[0] and (iter_num - 1) % 5 and (iter_num - 1) % 2:
            spent['step'].append(now - last[0])
        last[0] = now
        tick(self, iter_num)
    Metrics.tick = count
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train.main([*argv, f'--out_dir={folder}', f'--max_iters={STEPS}', '--eval_iters=1',
                    '--eval_interval=1000000', '--checkpoint_interval=1000000', '--report=False',
                    '--sample_tokens=0', '--health_interval=5', '--log_interval=2'])
    step, health, log = (median(spent[kind][3:]) for kind in ('step', 'health', 'log'))
    print(f'{" ".join(argv)}: a step {step * 1e3:.2f} ms, a look inside {health * 1e3:.2f} ms, '
          f'a logged line {log * 1e3:.3f} ms')
    print(f'every 100 steps a look: {1 + health / step / 100:.4f} times the time of a step; '
          f'every 10 a line: {1 + log / step / 10:.4f}; both: '
          f'{1 + health / step / 100 + log / step / 10:.4f}')


if __name__ == '__main__':
    main(sys.argv[1:] or ['config/shakespeare_char_cpu.py'])
