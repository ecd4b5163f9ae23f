"""The numbers of a run → the console, out_dir/metrics.jsonl and, if asked, wandb and TensorBoard.

metrics.jsonl has one JSON object a line: iter (updates done), tokens, elapsed_s, and then
  for a logged step     loss lr grad_norm tokens_per_s mfu peak_memory_bytes data_wait
                        and lr_embedding lr_head lr_vector where they differ from lr;
                        with float16, loss_scale
  for an evaluation     train_loss val_loss val_bpb, val_loss_stderr where it is known, and sample,
                        a text by the model; of a mixture val_loss/NAME of each corpus, whose mean
                        by their shares is val_loss
  for a benchmark       hellaswag_acc hellaswag_acc_stderr … (eval_tasks)
  for a health check    health/… of health.py
Losses are means in nats per token over all micro-steps and processes; unknown values are null.
The backends only copy this file: a resumed run trims it to its checkpoint and sends it again.
"""

import math
import time
from contextlib import contextmanager

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.metrics_file import finite, read_rows
from plaingpt.system.devices import device_name, mfu, peak_memory_bytes, synchronize
from plaingpt.system.files import append_line
from plaingpt.system.formatting import duration, one_line, short
from plaingpt.system.machine import crowded_cores
from plaingpt.system.streams import print_line, status

MAX_ROWS = 20_000  # kept in memory; beyond it every second row without an evaluation goes
LIVE_INTERVAL_S = 0.5  # between two updates of a terminal's last line
BUSY, SLOW, AGAIN = 1.6, 2.5, 1.3  # times the best step: said where other programs run, where not,
# and may be said once more after that
SLOW_LAPS, SLOW_S = 3, 3.0  # it lasts for so many lines, and seconds


class Metrics:
    """Where a run's numbers go, and its clock.

    path: metrics.jsonl, or None to write no file
    config, run: its TrainConfig, and its facts (run_record.describe_run)
    loader, model: of the training tokens, and the model that is neither compiled nor wrapped
    device, dtype, scaler, world_size: what the job computes with
    bytes_per_token: of the evaluated text, or None; elapsed_s: before the run was resumed
    backends: of open_backends; quiet: write and print nothing (ranks other than 0)
    """

    def __init__(self, path, *, config, run, loader, model, device, dtype, scaler, world_size=1,
                 bytes_per_token=None, elapsed_s=0.0, backends=(), quiet=False):
        self.path, self.config, self.run, self.loader = path, config, run, loader
        self.device, self.device_name, self.dtype = device, device_name(device), dtype
        self.scaler, self.bytes_per_token = scaler, bytes_per_token
        self.flops_per_token = model.flops_per_token() / world_size  # of each device
        self.backends, self.quiet = list(backends), quiet
        self.clock = Clock(elapsed_s)
        self.columns, self.shown_at = (), 0.0  # of the last line of a terminal
        self.rows = []
        self.diagnosed = set()  # names of what was printed already

    def begin(self, iter_num):
        """Start the clock of steps. The rows of a resumed run go to the backends."""
        self.counted = iter_num  # steps, those before a resume included
        if not self.quiet and self.path:
            for row in read_rows(self.path, self.print):
                self._remember(row)
                self._send(row)
            # That the data has changed since is news.
            earlier = {**self.run, 'changed_data': None}
            self.diagnosed = {found.name for found in diagnose(self.rows, earlier)}
        self._show(iter_num, *['compiling'] * bool(self.run.get('compile')))  # until the first step
        self.shown_at = 0.0
        self.clock.begin_lap(iter_num, self.loader.waited_s)

    def elapsed_s(self):
        """Seconds since the run began, those before a resume included."""
        return self.clock.elapsed_s()

    def at(self, iter_num):
        """What every row begins with, after `iter_num` updates."""
        return {'iter': iter_num, 'tokens': self.loader.tokens_before(iter_num),
                'elapsed_s': round(self.elapsed_s(), 3)}

    @contextmanager
    def paused(self, what):
        """A context: time spent in it does not count as step time, and a terminal shows `what`.
        What a device has still to do of the steps before does count: it is waited for first."""
        synchronize(self.device)
        with self.clock.paused(), status.doing(what):
            yield

    def tick(self, iter_num):
        """Show on a terminal where the run stands; call it after every step."""
        before, self.counted = self.counted, iter_num
        if iter_num != before + 1 and 'counted' not in self.diagnosed:
            self.diagnosed.add('counted')
            self.print(f'diagnosis: after one step the iteration is {iter_num}, and it was {before}'
                       ": the learning rate, the tokens and the run's end go by it; see that the "
                       'loop adds 1 for each step')
        if time.perf_counter() >= self.shown_at + LIVE_INTERVAL_S:
            self._show(iter_num, *self.columns)

    def step(self, iter_num, loss, lr, grad_norm):
        """Log update number `iter_num`. loss and grad_norm may be tensors: reading them waits
        for the device, so call this on logged steps only."""
        loss, grad_norm = float(loss), float(grad_norm)
        step_s, data_wait = self.clock.end_lap(iter_num, self.loader.waited_s)
        busy = crowded_cores.describe()
        if self.clock.slowed_down(step_s, BUSY if busy else SLOW):
            why = f'the machine is busy: {busy}' if busy else 'steps have become slow'
            self.print(f'{why}; a step takes {step_s * 1e3:.0f} ms now, and took '
                       f'{self.clock.best_s * 1e3:.0f} ms at best')
        tokens_per_s = self.config.step_tokens() / step_s
        utilisation = mfu(self.flops_per_token * tokens_per_s, self.device_name, self.dtype)
        speed = f'{short(tokens_per_s)} tok/s'
        remaining = f'{duration(self.remaining_s(iter_num, step_s))} left'
        used = [] if self.device.type != 'cuda' else \
            ['mfu n/a' if utilisation is None else f'mfu {utilisation:.1%}']
        self.columns = f'loss {loss:.4f}', speed, remaining  # of a terminal's last line
        self._show(iter_num, *self.columns)
        self._print_columns(
            iter_num, f'loss {loss:.4f}', f'lr {lr:.2e}', f'grad {grad_norm:.2f}',
            f'{step_s * 1e3:.{0 if step_s >= 0.1 else 1}f} ms', speed, *used, remaining)
        scale = {'loss_scale': self.scaler.get_scale()} if self.scaler.is_enabled() else {}
        rates = {f'lr_{kind}': lr * factor for kind, factor in self.config.scales().items()
                 if factor != 1}
        self._write(iter_num, loss=loss, lr=lr, **rates, grad_norm=grad_norm,
                    tokens_per_s=tokens_per_s, mfu=utilisation,
                    peak_memory_bytes=peak_memory_bytes(self.device),
                    data_wait=round(data_wait, 4), **scale)

    def remaining_s(self, iter_num, step_s):
        """Seconds to the end at `step_s` a step, with evaluations as long as those so far."""
        steps = self.config.max_iters - iter_num
        evaluations = math.ceil(steps / self.config.eval_interval)
        evaluation_s = self.clock.paused_s / max(1, self.clock.evaluations)
        return steps * step_s + evaluations * evaluation_s

    def evaluation(self, iter_num, train_loss, val_loss, best, sample=None, of_each=None,
                   val_stderr=None):
        """Log an evaluation after `iter_num` updates, and print what now looks wrong. of_each: of
        several corpora, {name: validation loss}; val_stderr: the standard error of val_loss"""
        of_each = of_each or {}
        self.clock.evaluations += 1
        val_bpb = None
        columns = [f'train loss {train_loss:.4f}', f'val loss {val_loss:.4f}'
                   + ('' if val_stderr is None else f' ± {val_stderr:.4f}')]
        if self.bytes_per_token:
            val_bpb = val_loss / math.log(2) / self.bytes_per_token
            columns.append(f'{val_bpb:.3f} bits/byte')
        columns += [f'{name} {loss:.4f}' for name, loss in of_each.items()]
        if best:
            columns.append('best')
        self._print_columns(iter_num, *columns)
        self._write(iter_num, train_loss=train_loss, val_loss=val_loss, val_bpb=val_bpb,
                    **({} if val_stderr is None else {'val_loss_stderr': val_stderr}),
                    **{f'val_loss/{name}': loss for name, loss in of_each.items()},
                    **({} if sample is None else {'sample': sample}))
        self._diagnose()

    def benchmark(self, iter_num, name, scores, quote):
        """Log the scores of a benchmark, {name: number}; quote: the same for people."""
        self._print_columns(iter_num, f'{name}: {quote}')
        self._write(iter_num, **{f'{name}_{key}': value for key, value in scores.items()})

    def sample(self, iter_num, text):
        """Log a text by the model."""
        self.print(f'---------------\n{text}\n---------------')
        self._write(iter_num, sample=text)

    def health(self, iter_num, values):
        """Log {'health/…': number}."""
        self._write(iter_num, **values)

    def print(self, line):
        """Print a line, from rank 0 only."""
        if not self.quiet:
            print_line(line)

    def wandb_id(self):
        """Of the wandb run that a resumed run continues, or None."""
        return next((backend.id for backend in self.backends if backend.name == 'wandb'), None)

    def close(self):
        """Print what looks wrong and close the backends."""
        status.show('')
        if self.path:
            self._diagnose()
        for backend in self.backends:
            try:
                backend.close()
            except Exception as e:  # what it lacks is in the file
                self.print(f'warning: {backend.name} does not end well ({one_line(e)}); '
                           f'{self.path} has all numbers')

    def _show(self, iter_num, *columns):
        """Where the run stands → the last line of a terminal."""
        self.shown_at = time.perf_counter()
        done = round(20 * iter_num / max(1, self.config.max_iters))
        status.show(f'{iter_num}/{self.config.max_iters} | {"━" * done + "─" * (20 - done)}',
                    ' | '.join(columns))

    def _print_columns(self, iter_num, *columns):
        width = len(str(self.config.max_iters))
        self.print(' | '.join([f'iter {iter_num:>{width}}', *columns]))

    def _write(self, iter_num, **values):
        if self.quiet:
            return
        row = {**self.at(iter_num),
               **{key: x if isinstance(x, str) else finite(x) for key, x in values.items()}}
        self._remember(row)
        if self.path:
            append_line(self.path, row)
            self._send(row)

    def _remember(self, row):
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self.rows = [row for i, row in enumerate(self.rows) if i % 2 or 'val_loss' in row]

    def _send(self, row):
        for backend in list(self.backends):
            try:
                backend.log(row)
            except Exception as e:  # a backend may raise anything, and must not stop the run
                self.backends.remove(backend)
                self.print(f'warning: no more numbers go to {backend.name} ({one_line(e)}); '
                           f'{self.path} has them all')

    def _diagnose(self):
        if self.quiet:
            return
        for found in diagnose(self.rows, self.run):
            if found.name not in self.diagnosed:
                self.diagnosed.add(found.name)
                self.print(f'diagnosis: {found}')


class Clock:
    """The time of a run, and of laps: the steps from one logged line to the next."""

    def __init__(self, elapsed_s=0.0):
        self.began = time.perf_counter() - elapsed_s
        self.paused_s, self.evaluations = 0.0, 0
        self.best_s, self.slow_laps, self.slow_since, self.told_slow = math.inf, 0, 0.0, False

    def elapsed_s(self):
        return time.perf_counter() - self.began

    def begin_lap(self, iter_num, waited_s):
        """waited_s: how long training has waited for batches so far."""
        self.lap_began, self.lap_iter, self.lap_waited_s = time.perf_counter(), iter_num, waited_s

    def end_lap(self, iter_num, waited_s):
        """→ (seconds a step took, share of the lap spent waiting for batches); begins the next."""
        lap_s = time.perf_counter() - self.lap_began
        step_s = lap_s / (iter_num - self.lap_iter)
        data_wait = (waited_s - self.lap_waited_s) / lap_s
        self.begin_lap(iter_num, waited_s)
        return step_s, data_wait

    @contextmanager
    def paused(self):
        """A context whose time counts for no lap."""
        began = time.perf_counter()
        yield
        pause_s = time.perf_counter() - began
        self.lap_began += pause_s
        self.paused_s += pause_s

    def slowed_down(self, step_s, limit):
        """Whether steps take `limit` times as long as at best, for SLOW_LAPS laps and SLOW_S
        seconds; once until they are fast again. step_s: of the lap that has ended."""
        now, self.best_s = time.perf_counter(), min(self.best_s, step_s)
        self.told_slow &= step_s >= AGAIN * self.best_s
        if step_s < limit * self.best_s:
            self.slow_laps, self.slow_since = 0, now
            return False
        self.slow_laps += 1
        lasts = self.slow_laps >= SLOW_LAPS and now >= self.slow_since + SLOW_S
        told, self.told_slow = self.told_slow, self.told_slow or lasts
        return lasts and not told
