"""Numbers → the console, out_dir/metrics.jsonl and, if asked, wandb.

metrics.jsonl has one JSON object a line: iter (updates done), tokens, elapsed_s, and then
  for a logged step     loss lr grad_norm tokens_per_s mfu peak_memory_bytes
  for an evaluation     train_loss val_loss val_bpb
  for a benchmark       hellaswag_acc hellaswag_acc_stderr … (eval_tasks)
Losses are means in nats a token over all micro-steps and processes; what is unknown is null.
"""

import json
import math
import sys
import time
from contextlib import contextmanager

from errors import UserError
from runtime import peak_memory_bytes


class Metrics:
    """Where a run's numbers go, and its clock.

    step_tokens, max_iters: of the whole job, for rates and the remaining time
    tokens_at: iterations done → tokens seen
    mfu_of: tokens/s → model FLOPs utilisation or None; bytes_per_token: of the validation text
    path: metrics.jsonl, or None to write no file; quiet: do nothing (ranks other than 0)
    """

    def __init__(self, path, *, step_tokens, tokens_at, max_iters, mfu_of, bytes_per_token,
                 device, elapsed_s=0.0, wandb_run=None, quiet=False):
        self.path = path
        self.step_tokens = step_tokens
        self.tokens_at = tokens_at
        self.max_iters = max_iters
        self.mfu_of = mfu_of
        self.bytes_per_token = bytes_per_token
        self.device = device
        self.wandb_run = wandb_run
        self.quiet = quiet
        self.started = self.lap_started = time.perf_counter()
        self.started -= elapsed_s
        self.lap_iter = None

    def elapsed_s(self):
        """Seconds since the run began, those before a resume included."""
        return time.perf_counter() - self.started

    @contextmanager
    def paused(self):
        """Time spent in here (evaluating, saving) does not count as step time."""
        began = time.perf_counter()
        yield
        self.lap_started += time.perf_counter() - began

    def start_steps(self, iter_num):
        """Step time counts from here."""
        self.lap_started, self.lap_iter = time.perf_counter(), iter_num

    def step(self, iter_num, loss, lr, grad_norm):
        """Report update number `iter_num`. loss and grad_norm may be tensors: reading them waits
        for the device, so call this on logged steps only."""
        loss, grad_norm = float(loss), float(grad_norm)
        step_s = (time.perf_counter() - self.lap_started) / (iter_num - self.lap_iter)
        self.start_steps(iter_num)
        tokens_per_s = self.step_tokens / step_s
        mfu = self.mfu_of(tokens_per_s)
        self._say(iter_num, f'loss {loss:.4f}', f'lr {lr:.2e}', f'grad {grad_norm:.2f}',
                  f'{step_s * 1e3:.{0 if step_s >= 0.1 else 1}f} ms',
                  f'{short(tokens_per_s)} tok/s', f'mfu {"n/a" if mfu is None else f"{mfu:.1%}"}',
                  f'{duration((self.max_iters - iter_num) * step_s)} left')
        self._write(iter_num, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=tokens_per_s,
                    mfu=mfu, peak_memory_bytes=peak_memory_bytes(self.device))

    def evaluation(self, iter_num, train_loss, val_loss, best):
        """Report an evaluation after `iter_num` updates."""
        val_bpb = None
        columns = [f'train loss {train_loss:.4f}', f'val loss {val_loss:.4f}']
        if self.bytes_per_token:
            val_bpb = val_loss / math.log(2) / self.bytes_per_token
            columns.append(f'{val_bpb:.3f} bits/byte')
        if best:
            columns.append('best')
        self._say(iter_num, *columns)
        self._write(iter_num, train_loss=train_loss, val_loss=val_loss, val_bpb=val_bpb)

    def benchmark(self, iter_num, name, scores, quote):
        """Report the scores of a benchmark, a dict, after `iter_num` updates."""
        self._say(iter_num, f'{name}: {quote}')
        self._write(iter_num, **{f'{name}_{key}': value for key, value in scores.items()})

    def _say(self, iter_num, *columns):
        if not self.quiet:
            print(f'iter {iter_num:>{len(str(self.max_iters))}}', *columns, sep=' | ', flush=True)

    def _write(self, iter_num, **values):
        if self.quiet:
            return
        values = {'tokens': self.tokens_at(iter_num), 'elapsed_s': round(self.elapsed_s(), 3),
                  **values}
        if self.wandb_run:
            self.wandb_run.log(values, step=iter_num)
        if self.path:
            line = {key: finite(value) for key, value in values.items()}
            append_line(self.path, {'iter': iter_num, **line})


def finite(x):
    """x, or None where it is none or no number: JSON has no NaN or infinity."""
    return x if x is not None and math.isfinite(x) else None


def append_line(path, value):
    """Add a JSON object to a .jsonl file. A disk that refuses stops no training: it is said."""
    try:
        with open(path, 'a', encoding='utf-8') as f:
            f.write(json.dumps(value) + '\n')
    except OSError as e:
        print(f'warning: a line of {path} is lost: {e.strerror}', file=sys.stderr, flush=True)


def trim(path, last_iter):
    """Drop the lines of metrics.jsonl past `last_iter`, and one that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            if json.loads(line)['iter'] <= last_iter:
                kept.append(line + '\n')
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
    temporary = path.with_suffix('.tmp')
    temporary.write_text(''.join(kept), encoding='utf-8')
    temporary.rename(path)


def start_wandb(project, name, config):
    """A wandb run that carries `config`. Raises UserError where wandb is absent or refuses."""
    try:
        import wandb
    except ImportError:
        raise UserError('wandb_log=True needs wandb: pip install wandb, or --wandb_log=False') \
            from None
    try:
        return wandb.init(project=project, name=name, config=config)
    except wandb.errors.Error as e:
        raise UserError(f'wandb does not start ({e}): log in with wandb login, set '
                        'WANDB_MODE=offline, or use --wandb_log=False') from None


def short(n):
    """1234567 → '1.23M': three digits and a unit."""
    units = ['', 'k', 'M', 'G']
    while n >= 999.5 and len(units) > 1:
        n /= 1000
        units.pop(0)
    return f'{n:#.3g}'.rstrip('.') + units[0]


def duration(seconds):
    """3725 → '1h02m', 65 → '1m05s', 5 → '5s'."""
    if seconds > 365 * 24 * 3600:
        return f'{seconds / (365 * 24 * 3600):.3g} years'
    s = round(seconds)
    if s >= 3600:
        return f'{s // 3600}h{s % 3600 // 60:02d}m'
    return f'{s // 60}m{s % 60:02d}s' if s >= 60 else f'{s}s'
