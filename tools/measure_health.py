"""What health, logging and samples cost beside the steps: python tools/measure_health.py [CONFIG …]

Trains in one process, with a health check at every fifth step and a logged line at every other, and
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


def record_times(owner, name):
    """Let function `name` of a module or class record the seconds of each call → their list."""
    original, times = getattr(owner, name), []

    def timed(*arguments):
        began = time.perf_counter()
        result = original(*arguments)
        times.append(time.perf_counter() - began)
        return result
    setattr(owner, name, timed)
    return times


def median_sum(parts):
    """Median over calls of the sum of the parts, without the first calls."""
    return median([sum(times) for times in zip(*parts, strict=True)][3:])


def main(argv):
    steps = [record_times(train, name) for name in ('forward_backward', 'update')]
    checks = [record_times(Health, name) for name in ('before_update', 'after_update', 'measure')]
    lines = [record_times(Metrics, 'step')]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train.main([*argv, f'--out_dir={folder}', f'--max_iters={STEPS}', '--eval_iters=1',
                    '--eval_interval=1000000', '--checkpoint_interval=1000000', '--report=False',
                    '--sample_tokens=0', '--health_interval=5', '--log_interval=2'])
    step, health, line = map(median_sum, (steps, checks, lines))
    print(f'{" ".join(argv)}: a step {step * 1e3:.2f} ms, a health check {health * 1e3:.2f} ms, '
          f'a logged line {line * 1e3:.3f} ms')
    print(f'every 100 steps a health check: {1 + health / step / 100:.4f} times the time of a '
          f'step; every 10 a line: {1 + line / step / 10:.4f}; both: '
          f'{1 + health / step / 100 + line / step / 10:.4f}')


if __name__ == '__main__':
    main(sys.argv[1:] or ['config/shakespeare_char_cpu.py'])
