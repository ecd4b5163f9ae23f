"""Numbers → the console, out_dir/metrics.jsonl and, if asked, wandb and TensorBoard.

metrics.jsonl has one JSON object a line: iter (updates done), tokens, elapsed_s, and then
  for a logged step     loss lr grad_norm tokens_per_s mfu peak_memory_bytes data_wait
                        and, with float16, loss_scale
  for an evaluation     train_loss val_loss val_bpb, and sample, what the model writes by then
  for a benchmark       hellaswag_acc hellaswag_acc_stderr … (eval_tasks)
  for a look inside     health/… of health.py
Losses are means in nats a token over all micro-steps and processes; what is unknown is null. The
file is the truth: a resumed run cuts it back to its checkpoint, and sends it to the others again.
"""

import json
import math
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.system.errors import UserError
from plaingpt.system.files import append_line
from plaingpt.system.formatting import duration, short

MOST_ROWS = 20_000  # that stay in memory: of a longer run, every second or fourth … logged step
LIVE_S = 0.5  # between two versions of the live line


class Metrics:
    """Where a run's numbers go, and its clock.

    run: the facts of the run (run_report.describe); path: metrics.jsonl, or None to write no file
    step_tokens, max_iters, eval_interval: of the whole job, for rates and the remaining time
    tokens_at: iterations done → tokens seen
    mfu_of: tokens/s → model FLOPs utilisation or None; bytes_per_token: of the validation text
    peak_memory_bytes, loss_scale: functions that are asked on logged steps
    data_wait_s: seconds that training has waited for batches so far, a function too
    backends: where rows go beside the file; quiet: do nothing (ranks other than 0)
    """

    def __init__(self, path, *, run, step_tokens, tokens_at, max_iters, eval_interval, mfu_of,
                 bytes_per_token, peak_memory_bytes, data_wait_s, loss_scale=None, elapsed_s=0.0,
                 backends=(), quiet=False):
        self.path = path
        self.run = run
        self.step_tokens = step_tokens
        self.tokens_at = tokens_at
        self.max_iters = max_iters
        self.eval_interval = eval_interval
        self.mfu_of = mfu_of
        self.bytes_per_token = bytes_per_token
        self.peak_memory_bytes = peak_memory_bytes
        self.data_wait_s = data_wait_s
        self.loss_scale = loss_scale
        self.backends = list(backends)
        self.quiet = quiet
        self.rows = []
        self.told = set()
        self.started = self.lap_started = time.perf_counter()
        self.started -= elapsed_s
        self.lap_iter, self.lap_wait_s = None, 0.0
        self.pauses, self.paused_s = 0, 0.0
        # A live line needs a terminal that is not shared with a file of the same lines.
        self.live = not quiet and sys.stdout.isatty() and sys.stderr.isatty()
        self.live_at, self.live_columns = 0.0, ()

    @classmethod
    def of_run(cls, path, *, config, run, loader, model, device, dtype, scaler, world_size=1, **options):
        from plaingpt.system import hardware
        from plaingpt.system.devices import device_name, peak_memory_bytes
        return cls(path, run=run, step_tokens=config.step_tokens(), max_iters=config.max_iters, eval_interval=config.eval_interval,
                   tokens_at=lambda it: loader.sequences_before(it) * config.block_size,
                   mfu_of=lambda r: hardware.mfu(model.flops_per_token() * r / world_size, device_name(device), dtype),
                   peak_memory_bytes=lambda: peak_memory_bytes(device), data_wait_s=lambda: loader.waited_s,
                   loss_scale=scaler.get_scale if scaler.is_enabled() else None, **options)

    def print(self, line):
        self.say(line)

    # -------------------------------------------------------------------------
    # the clock

    def elapsed_s(self):
        """Seconds since the run began, those before a resume included."""
        return time.perf_counter() - self.started

    @contextmanager
    def paused(self):
        """Time spent in here (evaluating, saving) does not count as step time."""
        began = time.perf_counter()
        self._clear()
        yield
        spent = time.perf_counter() - began
        self.lap_started += spent
        self.paused_s += spent

    def left_s(self, iter_num, step_s):
        """Seconds to the end at `step_s` a step, with evaluations as long as those so far."""
        steps = self.max_iters - iter_num
        pause_s = self.paused_s / self.pauses if self.pauses else 0.0
        return steps * step_s + math.ceil(steps / self.eval_interval) * pause_s

    # -------------------------------------------------------------------------
    # what is reported

    def begin(self, iter_num):
        """Step time counts from here. What the file has already goes to the backends."""
        if not self.quiet and self.path:
            for row in read_rows(self.path, warn=self.say):
                self._remember(row)
                self._send(row)
            self.told = {found.name for found in diagnose(self.rows, self.run)}
        self._new_lap(iter_num)

    def step(self, iter_num, loss, lr, grad_norm):
        """Report update number `iter_num`. loss and grad_norm may be tensors: reading them waits
        for the device, so call this on logged steps only."""
        loss, grad_norm = float(loss), float(grad_norm)
        lap_s = time.perf_counter() - self.lap_started
        step_s = lap_s / (iter_num - self.lap_iter)
        data_wait = (self.data_wait_s() - self.lap_wait_s) / lap_s
        self._new_lap(iter_num)
        tokens_per_s = self.step_tokens / step_s
        mfu = self.mfu_of(tokens_per_s)
        left = f'{duration(self.left_s(iter_num, step_s))} left'
        self._line(iter_num, f'loss {loss:.4f}', f'lr {lr:.2e}', f'grad {grad_norm:.2f}',
                   f'{step_s * 1e3:.{0 if step_s >= 0.1 else 1}f} ms',
                   f'{short(tokens_per_s)} tok/s', f'mfu {"n/a" if mfu is None else f"{mfu:.1%}"}',
                   left)
        self.live_columns = (f'loss {loss:.4f}', f'{short(tokens_per_s)} tok/s', left)
        scale = {'loss_scale': self.loss_scale()} if self.loss_scale else {}
        self._write(iter_num, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=tokens_per_s,
                    mfu=mfu, peak_memory_bytes=self.peak_memory_bytes(),
                    data_wait=round(data_wait, 4), **scale)

    def evaluation(self, iter_num, train_loss, val_loss, best, sample=None):
        """Report an evaluation after `iter_num` updates, and what by now looks wrong."""
        self.pauses += 1
        val_bpb = None
        columns = [f'train loss {train_loss:.4f}', f'val loss {val_loss:.4f}']
        if self.bytes_per_token:
            val_bpb = val_loss / math.log(2) / self.bytes_per_token
            columns.append(f'{val_bpb:.3f} bits/byte')
        if best:
            columns.append('best')
        self._line(iter_num, *columns)
        self._write(iter_num, train_loss=train_loss, val_loss=val_loss, val_bpb=val_bpb,
                    **({} if sample is None else {'sample': sample}))
        self._diagnose()

    def benchmark(self, iter_num, name, scores, quote):
        """Report the scores of a benchmark, a dict, after `iter_num` updates."""
        self._line(iter_num, f'{name}: {quote}')
        self._write(iter_num, **{f'{name}_{key}': value for key, value in scores.items()})

    def sample(self, iter_num, text):
        """Show what the model writes after `iter_num` updates."""
        self.say(f'---------------\n{text}\n---------------')
        self._write(iter_num, sample=text)

    def health(self, iter_num, values):
        """Report a look inside the model: {'health/…': number}, or nothing."""
        if values:
            self._write(iter_num, **values)

    def tick(self, iter_num):
        """Keep a terminal's live line up to date; call it every step."""
        if not self.live or time.perf_counter() < self.live_at + LIVE_S:
            return
        self.live_at = time.perf_counter()
        share = iter_num / max(1, self.max_iters)
        columns = [f'{iter_num}/{self.max_iters}', '━' * round(20 * share) +
                   '─' * (20 - round(20 * share)), *self.live_columns]
        sys.stderr.write('\r\x1b[K' + ' | '.join(columns))
        sys.stderr.flush()

    def say(self, line):
        """Print a line, from rank 0 only."""
        if not self.quiet:
            self._clear()
            print(line, flush=True)

    def wandb_id(self):
        """Of the wandb run that a resumed run goes on with, or None."""
        return next((backend.id for backend in self.backends if backend.name == 'wandb'), None)

    def close(self, ended=True):
        """Hand over the last numbers, and what looks wrong. ended: no more will come."""
        self._clear()
        if self.path:
            self._diagnose(ended)
        for backend in self.backends:
            backend.close()

    # -------------------------------------------------------------------------

    def _new_lap(self, iter_num):
        self.lap_started, self.lap_iter = time.perf_counter(), iter_num
        self.lap_wait_s = self.data_wait_s()

    def _clear(self):
        if self.live:
            sys.stderr.write('\r\x1b[K')
            sys.stderr.flush()

    def _line(self, iter_num, *columns):
        self.say(' | '.join([f'iter {iter_num:>{len(str(self.max_iters))}}', *columns]))

    def _write(self, iter_num, **values):
        if self.quiet:
            return
        row = {'iter': iter_num, 'tokens': self.tokens_at(iter_num),
               'elapsed_s': round(self.elapsed_s(), 3),
               **{key: x if isinstance(x, str) else finite(x) for key, x in values.items()}}
        self._remember(row)
        if self.path:
            append_line(self.path, row)
            self._send(row)

    def _remember(self, row):
        self.rows.append(row)
        if len(self.rows) > MOST_ROWS:
            self.rows = [row for i, row in enumerate(self.rows) if i % 2 or 'val_loss' in row]

    def _send(self, row):
        for backend in list(self.backends):
            try:
                backend.log(row)
            except Exception as e:  # whatever goes wrong in there: the file has the numbers
                self.backends.remove(backend)
                self.say(f'warning: no more numbers go to {backend.name} ({e}); '
                         f'{self.path} has them all')

    def _diagnose(self, ended=False):
        if self.quiet:
            return
        for found in diagnose(self.rows, self.run, ended):
            if found.name not in self.told:
                self.told.add(found.name)
                self.say(f'diagnosis: {found}')


# -----------------------------------------------------------------------------
# metrics.jsonl


def finite(x):
    """x, or None where it is none or no number: JSON has no NaN or infinity."""
    return x if x is not None and math.isfinite(x) else None


def parse_row(line):
    """A line of metrics.jsonl → dict. Raises ValueError where it is none of ours."""
    try:
        row = json.loads(line, parse_constant=refuse)
    except RecursionError:
        raise ValueError('nested too deep') from None
    if not isinstance(row, dict) or type(row.get('iter')) is not int \
            or any(type(row.get(key)) not in (int, float) for key in ('tokens', 'elapsed_s')):
        raise ValueError('no object with iter, tokens and elapsed_s')
    if row['iter'] < 0 or type(row.get('sample', '')) is not str:
        raise ValueError('no iteration has this')
    for key, value in row.items():
        if value is not None and key != 'sample' \
                and (type(value) not in (int, float) or not abs(value) < 1e300):
            raise ValueError(f'{key} is no number')
    return row


def refuse(constant):
    raise ValueError(f'{constant} is no JSON')


def step_tokens(rows):
    """Tokens in a step, or None before the first."""
    return next((round(row['tokens'] / row['iter']) for row in rows if row['iter']), None)


def read_rows(path, warn):
    """The rows of a metrics.jsonl, in order; `warn` gets one line about those that are not ours."""
    rows, strange = [], []
    try:
        text = Path(path).read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f'{path} cannot be read: {e.strerror}') from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(parse_row(line))
        except ValueError:
            strange.append(number)
    if strange:
        shown = ', '.join(map(str, strange[:5])) + (', …' if strange[5:] else '')
        warn(f'warning: {path}: skipped {len(strange)} of {len(rows) + len(strange)} lines that '
             f'are no rows of a run: line {shown}')
    return rows


def trim(path, last_iter):
    """Drop the lines of metrics.jsonl past `last_iter`, and one that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            if parse_row(line)['iter'] <= last_iter:
                kept.append(line + '\n')
        except ValueError:
            pass
    temporary = path.with_suffix('.tmp')
    temporary.write_text(''.join(kept), encoding='utf-8')
    temporary.rename(path)


# -----------------------------------------------------------------------------
# backends: each has a name, log(row) and close(); none of them may stop a run
